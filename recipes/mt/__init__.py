"""Machine translation recipes for fairseq with ``--user-dir cape_plugins``."""
