"""``python -m cape_plugins`` is the command ``cape-plugins``; it needs no installation."""

import sys

from cape_plugins.cli import main

sys.exit(main())
