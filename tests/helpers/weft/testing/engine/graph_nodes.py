"""Lists the nodes of captured CUDA graphs, from the driver.

    python tests/helpers/weft/testing/engine/graph_nodes.py nodes.json

writes the nodes of all graphs that engines of several models capture at start: names of kernels and
their grids, in order. It uses only what other versions of the engine have too, so that with the
path of another tree in PYTHONPATH it lists that tree's, and the files can be compared.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

_KINDS = {0: "kernel", 1: "copy", 2: "fill"}

SHAPES: dict[str, dict[str, Any]] = {
    "small llama": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3_moe": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}
"""Layers of SmolLM2-135M, Llama-3.1-8B and Qwen3-30B-A3B: kernels are chosen by size."""


class Node(NamedTuple):
    """A node of a graph."""

    kind: str
    """kernel, copy, fill, or a number."""
    name: str = ""
    """Of a kernel."""
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)


class _KernelParams(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS_v2` of cuda.h."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def nodes_of(graph: torch.cuda.CUDAGraph) -> list[Node]:
    """The nodes of a graph that was captured within `kept_graphs`, in the order of capture."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    return [_node(driver, ctypes.c_void_p(node)) for node in nodes]


def _node(driver: ctypes.CDLL, node: ctypes.c_void_p) -> Node:
    kind = ctypes.c_int()
    assert driver.cuGraphNodeGetType(node, ctypes.byref(kind)) == 0
    if kind.value != 0:
        return Node(_KINDS.get(kind.value, f"kind {kind.value}"))
    params, name = _KernelParams(), ctypes.c_char_p()
    assert driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params)) == 0
    if params.function:
        found = driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(params.function))
    else:
        found = driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(params.kernel))
    assert found == 0
    return Node("kernel", (name.value or b"").decode(), tuple(params.grid), tuple(params.block))


@contextmanager
def kept_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.cuda.CUDAGraph]]:
    """Graphs captured here keep what they were made from; gives those captured so far."""
    captured: list[torch.cuda.CUDAGraph] = []
    make = partial(torch.cuda.CUDAGraph, keep_graph=True)

    def make_noted() -> torch.cuda.CUDAGraph:
        captured.append(make())
        return captured[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", make_noted)
        yield captured


def _engines(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Settings of engines, by names."""
    from weft.testing.models.tiny_drafts import make_tiny_draft, make_tiny_eagle
    from weft.testing.models.tiny_models import make_tiny, tiny_config

    for name, shape in SHAPES.items():
        path = folder / name
        path.mkdir()
        config = tiny_config(name.split()[-1], num_hidden_layers=3, vocab_size=1000, **shape)
        (path / "config.json").write_text(json.dumps(config))
        for is_fixed in (False, True):
            yield (
                f"{name}{' deterministic' * is_fixed}",
                {"model_dir": path, "dummy_weights": True, "deterministic": is_fixed},
            )
        yield f"{name} lora", {"model_dir": path, "dummy_weights": True, "enable_lora": True}
    target = make_tiny("llama", folder / "target", num_hidden_layers=4, **SHAPES["small llama"])
    drafts = {"eagle3": make_tiny_draft, "eagle": make_tiny_eagle}
    for drafter, make in drafts.items():
        make(folder / drafter, target)
        settings = {"model_dir": target, "drafter": drafter, "draft_dir": folder / drafter}
        yield drafter, settings
    yield (
        "eagle3 trees",
        {**settings, "drafter": "eagle3", "draft_dir": folder / "eagle3"} | {"draft_width": 4},
    )


def main(out: Path) -> None:
    """Writes the nodes of all graphs of all engines, by engine and graph."""
    from weft.engine.base.config import EngineConfig
    from weft.engine.loop.build import load_parts

    listed: dict[str, list[list[Node]]] = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, settings in _engines(Path(folder)):
            config = EngineConfig(
                device="cuda",
                dtype="bfloat16",
                num_pages=256,
                max_running_requests=64,
                max_step_tokens=256,
                prefill_chunk_tokens=256,
                **settings,
            )
            with kept_graphs(patch) as graphs:
                parts = load_parts(config)
            listed[name] = [nodes_of(graph) for graph in graphs if _is_captured(graph)]
            print(name, sum(map(len, listed[name])), "nodes", flush=True)
            del parts, graphs
    out.write_text(json.dumps(listed, indent=0))


def _is_captured(graph: torch.cuda.CUDAGraph) -> bool:
    try:
        graph.raw_cuda_graph()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
