"""Changes of fairseq that hold for every model."""
