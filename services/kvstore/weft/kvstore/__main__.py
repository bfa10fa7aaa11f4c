"""Entry point of `python -m weft.kvstore`."""

from weft.contract.startup import no_collections

with no_collections():
    from weft.kvstore.main import main

raise SystemExit(main())
