"""Whole decoder layers with adapters at real sizes, captured and not, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from weft.kernels.ops.lora import sort_tokens
from weft.kernels.shared.side_stream import rehearsal
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import draw_slots, poison_new_memory
from weft.testing.kernels.lora_layers import LayersCase, Sizes, make_layers

pytestmark = pytest.mark.needs("cuda")

RANKS = [0, 8, 16, 5, 0, 64, 32, 1, 16]
"""By slot."""
DEMO = Sizes(hidden=576, inner=1536, heads=9, kv_heads=3, dim=64)
SMALL = Sizes(hidden=1024, inner=2816, heads=8, kv_heads=2, dim=128)
WIDE = Sizes(hidden=5120, inner=3456, heads=8, kv_heads=1, dim=128)


def run(case: LayersCase) -> torch.Tensor:
    return case.output(case.lora)


def with_other_slots(case: LayersCase) -> LayersCase:
    """The same rows with other adapters, written to where a captured step finds them."""
    slots = draw_slots(len(case.slots), len(RANKS))
    segments, host = case.lora.segments, sort_tokens(np.array(slots, np.int32), len(RANKS))
    for name, array in host._asdict().items():
        getattr(segments, name).copy_(torch.from_numpy(array))
    return replace(case, slots=slots)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        *((sizes, rows) for sizes in (DEMO, SMALL) for rows in (1, 2, 3, 4)),
        *((sizes, rows) for sizes in (SMALL, WIDE) for rows in (5, 8, 9, 16, 64, 128, 129)),
        *((SMALL, rows) for rows in (256, 257, 1024, 1025)),
    ],
    ids=lambda value: str(value.hidden if isinstance(value, Sizes) else value),
)
def test_rows_with_adapters(sizes: Sizes, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides of every number of rows at which adapters take another way."""
    fresh_seed()
    case = make_layers(sizes, rows, RANKS, torch.bfloat16, "cuda")
    exact, peer = case.written_out(torch.float64), case.written_out(torch.bfloat16)
    with torch.inference_mode():
        with rehearsal():
            run(case)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(case)
        for _ in range(10):
            out.fill_(float("nan"))
            graph.replay()
            assert_as_exact(out, peer, exact)
        captured = out.clone()
        with monkeypatch.context() as patch:
            poison_new_memory(patch)
            assert torch.equal(run(case), captured)
        for _ in range(3):
            case = with_other_slots(case)
            graph.replay()
            assert_as_exact(out, case.written_out(torch.bfloat16), case.written_out(torch.float64))
