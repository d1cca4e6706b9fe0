"""Folders of models: loading, copies of the code in the folders, and return to stock models."""
