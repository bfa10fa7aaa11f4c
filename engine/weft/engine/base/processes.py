"""Ties a process's life to its parent's, and asks the kernel for scheduling that suits
an engine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys

_PR_SET_PDEATHSIG = 1
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call, which the C library does not wrap everywhere, by machine."""
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
"""struct sched_attr up to `sched_period`: size, policy, flags, nice, priority, and three times."""
LONG_SLICE_NS = 10_000_000
"""Longer than any default, and short enough for two engines that share cores."""


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGKILL when the parent dies. Exits if it is already dead."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def give_way_at_once() -> bool:
    """Lets other processes of the machine run as soon as they wake, without giving up any share.

    Linux lets a waking thread preempt one that asked for a longer time slice (EEVDF; 6.12 and
    later). A process that computes on all cores would otherwise delay each message between other
    processes by the rest of its slice. Threads started later inherit it. Returns whether the kernel
    took the request; older kernels ignore the length.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, LONG_SLICE_NS, 0, 0)
    status: int = ctypes.CDLL(None).syscall(number, 0, attributes, 0)
    return status == 0
