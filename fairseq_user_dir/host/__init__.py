"""Changes to fairseq that affect every model."""
