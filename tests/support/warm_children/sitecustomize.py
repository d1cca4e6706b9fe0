"""On the path of a command whose children are to be forks: it takes the program of
tests/support/warm_python.py for its interpreter."""

import os
import sys

sys.executable = os.environ["WARM_PYTHON"]
