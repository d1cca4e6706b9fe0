"""What is computed, in the order in which data flow through it."""
