"""Settings of position embeddings: types, encodings, domains, options and their values."""
