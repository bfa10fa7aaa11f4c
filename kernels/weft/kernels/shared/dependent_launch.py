"""Programmatic dependent launch (compute capability 9.0): a kernel begins while the one before it
ends.

Every such kernel calls `release_next` once it runs, and `wait_for_last` before it touches anything
but weights. Only after the wait are the writes of earlier kernels complete, since the preceding
kernel may itself have begun early. A kernel may read two kinds of data before its wait: data
written before a launch that was not dependent (`is_settled`), and, after a kernel that releases
only after its own wait, data written before that kernel. Some program of each launch must wait,
since the next kernel waits for this launch only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypedDict

import torch
import triton
import triton.language as tl
from weft.kernels.shared.sm90 import is_sm90, on_sm90


class LaunchOptions(TypedDict, total=False):
    """Keyword arguments of a launch, for Triton."""

    launch_pdl: bool


_are_ordinary: ContextVar[bool] = ContextVar("are_ordinary", default=False)


@contextmanager
def ordinary_launches() -> Iterator[None]:
    """Context in which no launch is dependent, as on a side stream (`SideStreamWork`)."""
    token = _are_ordinary.set(True)
    try:
        yield
    finally:
        _are_ordinary.reset(token)


def launch_options(device: torch.device, *, is_alone: bool = False) -> LaunchOptions:
    """Launch options of a kernel that starts while its predecessor ends.

    `is_alone`: the kernel begins only after its predecessor has ended; the next one may still begin
    early.
    """
    is_ordinary = is_alone or _are_ordinary.get() or not is_sm90(device)
    return {} if is_ordinary else {"launch_pdl": True}


@triton.jit
def wait_for_last() -> None:
    """Returns once all earlier launches are complete, at once if the launch was not dependent."""
    if on_sm90():
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_next() -> None:
    """Lets the next kernel, if it is launched as dependent, start as soon as all programs of this
    one are running.
    """
    if on_sm90():
        tl.extra.cuda.gdc_launch_dependents()
