"""``cape-plugins doctor``: what it checks and how it reports."""
