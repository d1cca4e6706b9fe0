"""Families whose classes are made from stock classes at first use."""
