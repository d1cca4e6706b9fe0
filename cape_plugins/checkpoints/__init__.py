"""Reads files of trained models without fairseq or transformers."""
