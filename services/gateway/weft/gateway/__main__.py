"""Entry point of `python -m weft.gateway`."""

import sys

from weft.contract.startup import no_collections

with no_collections():
    from weft.gateway.main import main

sys.exit(main(sys.argv[1:]))
