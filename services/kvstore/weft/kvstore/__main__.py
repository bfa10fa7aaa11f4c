"""Entry point of `python -m weft.kvstore`."""

from weft.kvstore.main import main

raise SystemExit(main())
