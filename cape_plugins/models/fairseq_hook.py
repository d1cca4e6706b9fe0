"""Only fairseq loads this module: fairseq imports every module of ``<user-dir>/models``. So
``--user-dir cape_plugins`` registers architectures, and the other modules of this package do not
depend on fairseq."""

import fairseq_user_dir  # noqa: F401
