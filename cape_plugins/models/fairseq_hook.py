"""Loaded by fairseq alone, which imports every module of ``<user-dir>/models``: this is how
``--user-dir cape_plugins`` registers architectures without the core depending on fairseq."""

import fairseq_user_dir  # noqa: F401
