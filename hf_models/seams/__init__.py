"""Replacements of stock modules: tokens, images, frames, angles, attention."""
