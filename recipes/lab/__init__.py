"""What the recipes share: options, steps, training runs, data, tables, figures."""
