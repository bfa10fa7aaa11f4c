"""The C compiler and Python's headers, which Triton needs once on each machine with a GPU."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sysconfig
import tempfile
from pathlib import Path

from weft.contract.cache_folder import cache_folder
from weft.contract.errors import ConfigError

_COMPILERS = ("gcc", "clang")
"""In Triton's order."""


def ensure_triton_compiles() -> None:
    """Sets `CC`, which processes started later inherit, to the compiler in the package `ziglang`
    where Triton would find none.

    Raises ConfigError if there is no compiler, or Python's headers are missing.
    """
    if "CC" not in os.environ and not any(map(shutil.which, _COMPILERS)):
        os.environ["CC"] = str(_zig_as_cc())
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise ConfigError(
            f"Triton needs Python's headers on a GPU, and {headers}/Python.h is missing: install "
            "them (Debian's python3-dev), or take a Python that has them (uv venv "
            "--managed-python)",
            param="device",
        )


def _zig_as_cc() -> Path:
    """A program that compiles as `cc` does. Raises ConfigError without the package or a cache."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "Triton needs a C compiler on a GPU, and neither gcc nor clang is on the PATH: install "
            "one, or the wheel with its extra `gpu`, which brings one",
            param="device",
        )
    zig = Path(spec.origin).with_name("zig")
    folder = cache_folder() / "zig"
    script = folder / "cc"
    # What Triton keeps may be shared with machines of other CPUs.
    command = shlex.join([str(zig), "cc", "-mcpu=baseline"])
    text = (
        f'#!/bin/sh\nexport ZIG_GLOBAL_CACHE_DIR={shlex.quote(str(folder))}\nexec {command} "$@"\n'
    )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, path = tempfile.mkstemp(dir=folder, prefix=".cc-")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(path, 0o700)
        os.replace(path, script)  # Another worker may be running it.
    except OSError as error:
        raise ConfigError(f"cannot write {script}, Triton's compiler: {error}") from error
    return script
