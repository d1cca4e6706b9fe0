"""Feature extractors, tokenizers and pipelines of the speech models."""
