"""Positions, their augmentation, encodings and tables, and relative attention."""
