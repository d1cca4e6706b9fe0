"""Changes of fairseq itself, which hold for every model."""
