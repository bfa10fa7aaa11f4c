"""Entry point of `python -m weft.gateway`."""

import sys

from weft.gateway.main import main

sys.exit(main(sys.argv[1:]))
