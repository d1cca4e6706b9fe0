"""Compares all types of position embeddings on all tasks of the recipes."""
