"""Binds a process to cores and to the memory of a NUMA node, and becomes a program there.

`python -I -S bound_start.py CORES NODE PROGRAM...`, with cores as 0,1,2. Empty CORES or NODE: it
leaves these as they are, and so it does with what the kernel refuses; the program looks what has
become of it. Python and its libraries begin after this, so that none of their memory is elsewhere.
The standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys

PREFERRED = 1
"""The memory policy that takes other nodes' memory once its own has none left."""
_NO_POLICY = 0x7FFF
_MAX_NODES = 1024
_WORD_BITS = 64
_GET, _SET = 0, 1
_NUMBERS = {"x86_64": (239, 238), "aarch64": (236, 237)}
"""Numbers of get_mempolicy and set_mempolicy, which the C library does not wrap, by machine."""
_Mask = ctypes.c_ulong * (_MAX_NODES // _WORD_BITS)


def prefer_memory(node: int) -> int:
    """Takes this thread's memory, and that of what it starts, from a NUMA node while it has some.
    Returns 0 or the error number.
    """
    mask = _Mask()
    if not 0 <= node < _MAX_NODES:
        return errno.EINVAL
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    return _call(_SET, PREFERRED, mask, _MAX_NODES + 1)


def memory_refusal() -> int:
    """The error number with which the host refuses memory policies, as containers do; 0: it takes
    them. Changes nothing.
    """
    error = _call(_SET, _NO_POLICY, None, 0)
    return 0 if error == errno.EINVAL else error


def memory_policy() -> tuple[int, int | None]:
    """This thread's memory policy, in the kernel's number (0: none), and the first node that it
    names; None: it names none.
    """
    mode, mask = ctypes.c_int(0), _Mask()
    if _call(_GET, ctypes.byref(mode), mask, _MAX_NODES, 0, 0):
        return 0, None
    nodes = (
        number * _WORD_BITS + (word & -word).bit_length() - 1
        for number, word in enumerate(mask)
        if word
    )
    return mode.value, next(nodes, None)


def _call(which: int, *arguments: object) -> int:
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        return errno.ENOSYS
    values = (ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)
    failed = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(numbers[which]), *values)
    return ctypes.get_errno() if failed else 0


def main(argv: list[str]) -> None:
    cores, node, *program = argv
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    if node:
        prefer_memory(int(node))
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
