"""``cape-plugins doctor``: checks of models on the installed hosts, and their report."""
