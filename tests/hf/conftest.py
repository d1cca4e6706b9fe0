"""Without the Hugging Face packages these tests are left out."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]
