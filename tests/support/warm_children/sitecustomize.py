"""On the path of a command whose children are to be forks: the program that it takes for its
interpreter is that of tests/support/warm_python.py."""

import os
import sys

sys.executable = os.environ["WARM_PYTHON"]
