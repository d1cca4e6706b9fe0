"""Calls of users that build models with switched positions: by `switch`, and by transformers."""
