"""Shared code of the recipes: options, steps, training runs, data, tables, figures."""
