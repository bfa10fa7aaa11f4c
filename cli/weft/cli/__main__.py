"""Entry point of `python -m weft.cli`."""

import sys

from weft.cli.main import main

sys.exit(main())
