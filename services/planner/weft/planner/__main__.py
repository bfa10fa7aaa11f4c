"""Entry point of `python -m weft.planner`."""

from weft.contract.startup import no_collections

with no_collections():
    from weft.planner.main import main

raise SystemExit(main())
