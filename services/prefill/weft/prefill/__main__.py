"""Entry point of `python -m weft.prefill`."""

from weft.prefill.main import main

raise SystemExit(main())
