"""Readers for the files of trained models, which need no host."""
