"""The wheels of this tree, as `make wheel` builds them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[4]
BUILD_TIMEOUT_S = 1500


@functools.cache
def wheel_folder(target: str = "wheel") -> Path:
    """Folder of Weft's wheel and of the demo model's. The first call builds them, unless they are
    newer than the sources. Fails where make, Go or a C compiler is missing. With the target
    `wheel-aarch64` there is a folder `aarch64` in it.
    """
    make = shutil.which("make")
    assert make is not None, "there is no make on the PATH"
    # Not what a make that runs these tests was given.
    inherited = ("MAKEFLAGS", "MAKELEVEL", "ARGS")
    environment = {k: v for k, v in os.environ.items() if k not in inherited}
    (ROOT / "build").mkdir(exist_ok=True)
    with FileLock(ROOT / "build" / "wheel.lock", timeout=BUILD_TIMEOUT_S):
        done = subprocess.run(
            [make, target],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return ROOT / "dist"
