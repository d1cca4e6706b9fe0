"""Settings that follow from the training data: alpha, and advice by lengths."""
