"""Rows of several steps reach the next stage in their order, by Triton's interpreter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.peers.triton_stage import (
    StageMemory,
    memory_bytes,
    receive_rows,
    send_rows,
)
from weft.testing.kernels.divided_models import VOCAB, run_alone, run_divided
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_arrive_in_the_order_of_the_steps(dtype: torch.dtype) -> None:
    width, most = 2 * random.randint(2, 40), random.randint(3, 60)
    row_bytes = width * torch.empty(0, dtype=dtype).element_size()
    memories = [torch.zeros(memory_bytes(row_bytes, most), dtype=torch.uint8) for _ in range(2)]
    sender, receiver = (memory.data_ptr() for memory in memories)
    ends = [
        StageMemory(
            rank=rank,
            size=2,
            capacity=most * row_bytes // 4,
            receiver=receiver,
            sender=sender,
            turns=torch.zeros(1, dtype=torch.int32),
            control=torch.zeros(2, dtype=torch.int64),
        )
        for rank in (1, 0)
    ]
    shapes = [(random.randint(1, most), width) for _ in range(9)]
    steps = [torch.randn(shape).to(dtype) for shape in shapes]
    sent = taken = 0
    while taken < len(steps):
        # The sender is at most two steps ahead.
        if sent < len(steps) and sent - taken < 2 and (sent == taken or random.random() < 0.5):
            send_rows(ends[0], steps[sent])
            sent += 1
        else:
            assert torch.equal(
                receive_rows(ends[1], torch.empty(shapes[taken], dtype=dtype)), steps[taken]
            )
            taken += 1
    with pytest.raises(ValueError, match="room for"):
        send_rows(ends[0], torch.zeros((most + 1, width), dtype=dtype))


@pytest.mark.full
def test_stages_of_two_ranks_each_have_the_logits_of_one_process(tmp_path: Path) -> None:
    """By the operations and kernels of GPUs: ranks of a stage add up sums, and each hands rows to
    one of the next stage.
    """
    seed, folder = random.randrange(1 << 30), tmp_path / "model"
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    make_tiny("llama", folder, seed, vocab_size=VOCAB, **sizes)
    alone = run_alone(folder, seed)
    together = run_divided(folder, seed, str(tmp_path / "store"), count=2)
    for found, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
