"""Lists the nodes of a captured CUDA graph, from the driver."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

_KINDS = {0: "kernel", 1: "copy", 2: "fill"}


def node_counts(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    """Nodes by kind of a graph that was captured within `kept_graphs`."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    found: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        found[_KINDS.get(kind.value, f"kind {kind.value}")] += 1
    return found


@contextmanager
def kept_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs captured here keep what they were made from."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", partial(torch.cuda.CUDAGraph, keep_graph=True))
        yield
