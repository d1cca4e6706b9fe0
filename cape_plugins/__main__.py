"""``python -m cape_plugins`` runs the command ``cape-plugins`` without an installation."""

import sys

from cape_plugins.cli import main

sys.exit(main())
