"""Families of Hugging Face models, one file each."""
