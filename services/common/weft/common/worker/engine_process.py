"""Starts the engine process: `python -m weft.common.worker.engine_process`. `engine_main` has its
arguments.
"""

from __future__ import annotations

import os
import sys

from weft.contract.startup import no_collections

if __name__ == "__main__":
    with no_collections():
        from weft.common.worker.engine_main import main

    # `sys.exit` would wait for native threads of back ends.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
