"""What a process asks of the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import ctypes, os, struct
from weft.engine.base.processes import LONG_SLICE_NS, give_way_at_once

before = os.nice(3)
is_taken = give_way_at_once()  # Sandboxes may refuse it.
assert os.getpriority(os.PRIO_PROCESS, 0) == before
assert os.sched_getscheduler(0) == os.SCHED_OTHER
known = ctypes.create_string_buffer(48)
number = {"x86_64": 315, "aarch64": 275}[os.uname().machine]
assert ctypes.CDLL(None).syscall(number, 0, known, 48, 0) == 0
slice_ns = struct.unpack("=IIQiIQQQ", known.raw)[5]
release = tuple(int(part) for part in os.uname().release.split(".")[:2])
assert slice_ns == LONG_SLICE_NS or not is_taken or release < (6, 12), slice_ns
# Other policies stay as they are.
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
assert not give_way_at_once()
assert os.sched_getscheduler(0) == os.SCHED_BATCH
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="Linux on these machines",
)
def test_a_long_slice_changes_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
