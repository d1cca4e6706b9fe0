"""Checks of families and models on the hosts that are installed."""
