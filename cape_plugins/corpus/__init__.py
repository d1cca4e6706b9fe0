"""What the training data say about settings."""
