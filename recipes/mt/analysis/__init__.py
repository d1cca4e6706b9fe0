"""What the papers show about trained models: a module for each command of recipes/mt/analyze.py."""
