"""Starts the engine process: `python -m weft.common.worker.engine_process`, see `engine_main`.

The garbage collector is off while modules are imported. Nothing of theirs is garbage, and it would
visit what torch makes again and again.
"""

from __future__ import annotations

import gc
import os
import sys

if __name__ == "__main__":
    gc.disable()
    from weft.common.worker.engine_main import main

    gc.enable()
    # `sys.exit` would wait for native threads of back ends.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
