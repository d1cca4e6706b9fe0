"""Folders of models: loading, copies of the code in them, and stock models again."""
