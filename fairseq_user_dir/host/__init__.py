"""What is changed in fairseq itself, for every model."""
