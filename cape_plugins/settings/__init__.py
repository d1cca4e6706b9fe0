"""What can be asked for: types, encodings, domains, options and their values."""
