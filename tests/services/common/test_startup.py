"""What is imported without the garbage collector is never searched; what comes later is."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from weft.contract.startup import no_collections

class Cycle:
    def __init__(self):
        self.own = self

with no_collections():
    assert not gc.isenabled()
    early = weakref.ref(Cycle())
try:
    with no_collections():
        import no_such_module
except ImportError:
    pass
assert gc.isenabled()
late = weakref.ref(Cycle())
gc.collect()
print(early() is not None, late() is None)
"""


def test_only_what_came_later_is_searched() -> None:
    """In a process of its own: nothing takes a freeze of single objects back."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "True True\n", done.stderr
