"""The papers' analyses of trained models: one module for each command of recipes/mt/analyze.py."""
