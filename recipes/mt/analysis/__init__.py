"""Analyses of trained models as in the papers: a module for each command of
recipes/mt/analyze.py."""
