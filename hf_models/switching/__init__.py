"""One mechanism for all families: puts position embeddings into stock models."""
