"""Entry point of `python -m weft.prefill`."""

from weft.contract.startup import no_collections

with no_collections():
    from weft.prefill.main import main

raise SystemExit(main())
