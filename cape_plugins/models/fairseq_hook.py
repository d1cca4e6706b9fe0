"""fairseq alone loads this module, because it imports every module of ``<user-dir>/models``. So
``--user-dir cape_plugins`` registers architectures, and the core does not depend on fairseq."""

import fairseq_user_dir  # noqa: F401
