"""Sampling on the device at real sizes: the tokens that the host draws from the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from weft.kernels.ops.sampling.device import draw_rows, top_logits
from weft.kernels.ops.sampling.reference import top_rows_reference
from weft.testing.kernels.device_sampling_cases import draw_on_host, make_case, tables_of

pytestmark = pytest.mark.needs("cuda")

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("vocab", "rows", "spread"),
    [
        (128_256, 256, 3.0),
        (128_256, 128, 0.3),
        (128_256, 128, 30.0),
        (151_936, 1, 1.0),
        (32_001, 64, 4.0),
        (999, 64, None),
    ],
)
def test_tokens_equal_the_host(vocab: int, rows: int, spread: float | None) -> None:
    case = make_case(np.random.default_rng(), vocab, rows, rows + 3, spread)
    tables, logits = tables_of(case, CUDA), case.logits.cuda()
    slots, positions = (torch.from_numpy(x).cuda() for x in (case.slots, case.positions))
    before = tables.counts.clone()
    draw_rows(logits, slots, positions, tables)  # Compiles.
    tables.counts.copy_(before)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = draw_rows(logits, slots, positions, tables)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drawn, expected = tokens.cpu().numpy(), np.array(draw_on_host(case))
    different = np.flatnonzero(drawn != expected)
    params = [(int(r), case.params[case.slots[r]]) for r in different[:5]]
    assert not len(different), (len(different), params)
    counted = (tables.counts - before).cpu()
    for row, slot in enumerate(case.slots.tolist()):
        if case.params[slot].prompt and drawn[row] >= 0:
            assert counted[slot, drawn[row]] == 2
            counted[slot, drawn[row]] = 0
    assert not counted.any()


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_top_logits_equal_log_softmax(num_top: int) -> None:
    logits = 5 * torch.randn(64, 128_256, device=CUDA)
    logits[1::2] = logits[1::2].bfloat16().float()  # Ties.
    rows = torch.randperm(64, device=CUDA)[:40]
    tokens = torch.randint(0, 128_256, (64,), device=CUDA)
    top = top_logits(logits, rows, tokens, num_top)
    chosen = logits[rows]
    log_sums, ids = top_rows_reference(chosen.cpu().numpy(), num_top)
    assert np.allclose(top.log_sums.cpu().numpy(), log_sums, rtol=0, atol=1e-12)
    assert top.ids.tolist() == ids.tolist()
    assert torch.equal(top.logits, chosen.gather(1, top.ids))
    assert torch.equal(top.drawn, chosen.gather(1, tokens[rows].unsqueeze(1)).squeeze(1))


def test_top_logits_of_heated_rows_equal_log_softmax() -> None:
    logits = 5 * torch.randn(64, 128_256, device=CUDA)
    rows = torch.randperm(64, device=CUDA)[:40]
    tokens = torch.randint(0, 128_256, (64,), device=CUDA)
    heats = torch.rand(40, device=CUDA, dtype=torch.float64) * 2 + 0.05
    top = top_logits(logits, rows, tokens, 5, heats)
    right = (logits[rows].double() / heats[:, None]).log_softmax(-1)
    own = right.gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
    assert torch.allclose(top.drawn - top.log_sums, own, atol=1e-4)
    assert torch.allclose(top.logits - top.log_sums[:, None], right.gather(1, top.ids), atol=1e-4)
