"""How rows of prompts are given to FlashMLA, whose operations eager torch stands in for."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.latent_attention import library_flash_mla as flash_mla
from weft.kernels.ops.latent_attention.reference import latent_attention_reference
from weft.kernels.ops.latent_attention.spec import LatentSpec
from weft.testing.kernels.kernel_checks import fresh_seed

HEADS, WIDTH, DIM, PAGE, LAYER = 2, 16, 24, 4, 1
SPEC = LatentSpec(HEADS, WIDTH, 0.3)


class Operations(NamedTuple):
    """What the package has, for requests of one row."""

    def get_mla_decoding_metadata(
        self, lens: torch.Tensor, *numbers: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert (lens > 0).all()
        return lens.clone(), lens

    def dense_decode_fwd(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        width: int,
        lens: torch.Tensor,
        table: torch.Tensor,
        scale: float,
        is_causal: bool,
        tiles: torch.Tensor,
        splits: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        assert torch.equal(tiles, lens)
        out, sums = q.new_empty(*q.shape[:3], width), torch.empty(len(q), q.shape[2], 1)
        for row, count in enumerate(lens.tolist()):
            pages = table[row, : -(-count // PAGE)].long()
            keys = cache[pages].flatten(0, 2)[:count]
            scores = q[row, 0] @ keys.t() * scale
            out[row, 0] = scores.softmax(dim=1) @ keys[:, :width]
            sums[row, :, 0] = scores.logsumexp(dim=1)
        return out, sums, None, None


def make_step(
    lengths: list[tuple[int, int]], padding: int
) -> tuple[AttentionMetadata, torch.Tensor]:
    """Requests of so many new rows and positions, two of padding, and a pool."""
    counts = [-(-kv // PAGE) for _, kv in lengths]
    order = 1 + torch.randperm(sum(counts)).int()
    table = torch.zeros(len(lengths) + 2, max(counts), dtype=torch.int32)
    for request, count in enumerate(counts):
        table[request, :count], order = order[:count], order[count:]
    rows = sum(q for q, _ in lengths)
    step = AttentionMetadata(
        page_table=table,
        places=torch.zeros(rows + padding, dtype=torch.int64),
        cu_q_lens=torch.tensor([0, *(q for q, _ in lengths), 0, 0]).cumsum(0).int(),
        kv_lens=torch.tensor([*(kv for _, kv in lengths), 0, 0]).int(),
        max_q_len=max(q for q, _ in lengths),
        max_kv_len=max(kv for _, kv in lengths),
    )
    return step, torch.randn(sum(counts) + 1, 1, 2, 1, PAGE, DIM)


@pytest.fixture(autouse=True)
def operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "_operations", Operations)
    monkeypatch.setattr(flash_mla, "_ROWS_AT_ONCE", 16)


@pytest.mark.parametrize("padding", [0, 7])
def test_each_row_is_a_request(padding: int) -> None:
    fresh_seed()
    step, pool = make_step([(1, 9), (20, 20), (5, 31), (1, 1), (2, 14)], padding)
    rows = len(step.places) - padding
    plan = flash_mla.plan_latents(step, rows + padding, HEADS)
    q = torch.randn(rows + padding, HEADS, DIM)
    found, _ = flash_mla.flash_mla(q, pool, LAYER, SPEC, plan.seen)
    exact = latent_attention_reference(q, pool, LAYER, SPEC, step)
    torch.testing.assert_close(found[:rows], exact[:rows])
    sums = torch.full((rows + padding, HEADS), float("-inf"))
    exact = latent_attention_reference(q, pool, LAYER, SPEC, step, sums)
    assert plan.before is not None
    found, found_sums = flash_mla.flash_mla(q, pool, LAYER, SPEC, plan.before)
    has_some = plan.before.lens > 0
    assert torch.equal(has_some, sums[:, 0].isfinite())
    torch.testing.assert_close(found[has_some], exact[has_some])
    torch.testing.assert_close(found_sums[has_some], sums[has_some])


def test_of_cold_prompts_requests_of_one_row_alone_have_something_before() -> None:
    fresh_seed()
    lengths = [(1, 9), (20, 20), (1, 1), (6, 6), (1, 30)]
    step, pool = make_step(lengths, 3)
    plan = flash_mla.plan_latents(step._replace(is_cold=True), len(step.places), HEADS)
    assert plan.before is not None
    assert plan.before.lens.tolist() == [8, 0, 0, 0, 29, 0, 0]
    q = torch.randn(len(step.kv_lens), HEADS, DIM)
    found, _ = flash_mla.flash_mla(q, pool, LAYER, SPEC, plan.before)
    kv_lens = step.kv_lens.clamp(min=1)
    single = step._replace(cu_q_lens=torch.arange(8).int(), kv_lens=kv_lens, max_q_len=1)
    sums = torch.empty(len(q), HEADS)
    exact = latent_attention_reference(q, pool, LAYER, SPEC, single, sums)
    torch.testing.assert_close(found[[0, 4]], exact[[0, 4]])


def test_what_it_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, dtype = LatentSpec(128, 512, 0.1), torch.bfloat16
    monkeypatch.setattr(flash_mla, "_is_hopper", lambda: False)
    assert flash_mla.lacking(dtype, 576, spec, 16) is None
    monkeypatch.setattr(flash_mla, "_is_hopper", lambda: True)
    assert flash_mla.lacking(dtype, 576, spec, 64) is None
    assert flash_mla.lacking(dtype, 576, spec, 16) == "take --page-size 64"
    assert flash_mla.lacking(dtype, 576, spec._replace(heads=16), 16) is None
    monkeypatch.setattr(flash_mla, "_operations", lambda: None)
    assert flash_mla.lacking(dtype, 576, spec, 64) == "install sgl-flash-mla"
