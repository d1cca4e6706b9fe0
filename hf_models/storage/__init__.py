"""Folders of models: loading, copies of the code in the folders, and turning back to stock models."""
