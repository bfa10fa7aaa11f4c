"""How much a recurrent layer asks of the host in a step of decodes and prompts on a GPU, which is
not captured: launches are counted, since times vary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from weft.checkpoint.recurrent_config import GatedDeltaConfig
from weft.engine.base.state_rows import StateRows
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.states import DeviceStates, StateMemory
from weft.engine.model.layers import gated_delta
from weft.kernels.ops.gated_delta import triton_gates
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.recurrence import triton_steps as recurrence
from weft.kernels.ops.recurrence.head_rows import HeadRows

pytestmark = pytest.mark.needs("triton-interpreter")

PAGE, DECODES, KEY_HEADS, HEADS, DIM = 16, 4, 2, 4, 16
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM


class Launches(TorchDispatchMode):
    """Counts operations of torch that are launches on a GPU, and kernels, which do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write
            for each in func._schema.returns
        )
        if not is_view and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def launcher(self, kernel: Any, grid: object) -> Callable[..., None]:
        """Stands for `kernel[grid]`."""
        return lambda *_, **__: self.names.append(kernel.fn.__name__)


@pytest.mark.parametrize(
    ("prompts", "most"),
    [
        ([(32, 64, [96])], 15),
        ([(32, 70, [96])], 23),
        ([(40, 62, [96])], 30),
        ([(32, 70, [96]), (0, 50, [48]), (16, 90, [96])], 30),
    ],
    ids=["from border to border", "to a last page", "from within a page", "three"],
)
def test_a_layer_makes_few_launches(
    prompts: list[tuple[int, int, list[int]]], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside four decodes; before rows were ordered and cut once a step, they were 28 to 54."""
    from triton.runtime.interpreter import InterpretedFunction

    launches = Launches()
    monkeypatch.setattr(
        InterpretedFunction, "__getitem__", lambda kernel, grid: launches.launcher(kernel, grid)
    )
    monkeypatch.setattr(gated_delta, "short_conv", recurrence.short_conv)
    monkeypatch.setattr(gated_delta, "gated_delta", recurred)
    monkeypatch.setattr(gated_delta, "delta_gates", triton_gates.delta_gates)
    cpu = torch.device("cpu")
    config = GatedDeltaConfig(
        key_heads=KEY_HEADS, value_heads=HEADS, key_dim=DIM, value_dim=DIM, taps=4, eps=1e-6
    )
    layer = gated_delta.GatedDelta(
        config=config,
        layer=0,
        in_plane=0,
        projections=(),
        conv=torch.zeros(4, CHANNELS),
        rates=torch.zeros(HEADS),
        dt_bias=torch.zeros(HEADS),
        norm=torch.zeros(DIM),
        out_proj=cast("LinearWeight", None),
        dtype="bfloat16",
    )
    count = DECODES + len(prompts)
    memory = StateMemory(layer.state_plane(1), 40, count, PAGE + 6, cpu)
    states = DeviceStates(memory, PAGE, count, cpu)
    starts = np.array([5] * DECODES + [start for start, _, _ in prompts])
    counts = np.array([1] * DECODES + [length for _, length, _ in prompts])
    borders = starts // PAGE * PAGE
    writes = [
        (DECODES + number, position, 20 + number)
        for number, (_, _, positions) in enumerate(prompts)
        for position in positions
    ]
    table = np.zeros((count, 3), np.int64)
    rows = StateRows(borders, (borders > 0).astype(np.int64), np.array(writes).T, DECODES, table)
    bounds = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    positions = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
    arrays = SimpleNamespace(
        states=rows, slots=np.arange(count), cu_q_lens=bounds, positions=positions
    )
    step = states.batch(
        cast("StepArrays", arrays),
        *(torch.from_numpy(each) for each in (arrays.slots, bounds, positions)),
    )
    inputs = [
        torch.zeros(len(positions), width, dtype=torch.bfloat16) for width in (CHANNELS, 2 * HEADS)
    ]
    with torch.inference_mode(), launches:
        out = step.run(0, inputs, layer.scan, layer.few_rows, layer.ring_inputs)
    assert len(out) == len(positions)
    assert len(launches.names) <= most, launches.names


def recurred(*parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_delta` as a GPU computes it."""
    q, k, v, decay, beta, states, sequences = parts
    rows = HeadRows(q, k, v, decay, sequences, beta=beta, is_unit=True)
    return recurrence.fastest_recurrence(rows, states)
