"""The process of a rank other than the first: `python -m weft.engine.executor.ranks.rank_process FD
PARENT_PID`.
"""

from __future__ import annotations

import os
import sys

from weft.contract.startup import no_collections

if __name__ == "__main__":
    with no_collections():
        from weft.engine.executor.ranks.follow import main

    # Not sys.exit: native threads must not hold up the end.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
