"""Entry point of `python -m weft.decode`."""

from weft.decode.main import main

raise SystemExit(main())
