"""Entry point of `python -m weft.decode`."""

from weft.contract.startup import no_collections

with no_collections():
    from weft.decode.main import main

raise SystemExit(main())
