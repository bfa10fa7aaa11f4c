"""What the programs share while they start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Imports within it run without the garbage collector, whose searches are a quarter of the
    start of a process that imports torch. What exists at the end stays out of all later searches:
    modules and classes live as long as the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
