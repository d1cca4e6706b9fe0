"""``python -m cape_plugins`` is the command ``cape-plugins``, also where nothing is installed."""

import sys

from cape_plugins.cli import main

sys.exit(main())
