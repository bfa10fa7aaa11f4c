"""Sizing the KV pool: the arithmetic; what it measures is tested on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from weft.contract.errors import ConfigError
from weft.contract.layout import CacheLayout, PagedPlane, StatePart, StatePlane
from weft.engine.executor.memory_plan import (
    MemoryNeeds,
    describe_pool,
    divide_states,
    free_of_share,
    largest_step,
    pages_of,
    sampling_bytes,
)

GIB = 1 << 30


def needs(free: int) -> MemoryNeeds:
    return MemoryNeeds(
        total=100 * GIB,
        free=free,
        weights=15 * GIB,
        step=3 * GIB,
        graphs=GIB,
        sampling=GIB // 2,
    )


def test_the_pool_takes_what_nothing_else_needs() -> None:
    plan = needs(80 * GIB)
    assert plan.margin == 2 * GIB
    left = 80 * GIB - 3 * GIB - GIB - GIB // 2 - 2 * GIB
    assert pages_of(plan, 1 << 20) == left >> 20
    layout = CacheLayout.of_plane(PagedPlane(layers=2, heads=2, dim=64, dtype="bfloat16"), 16)
    text = describe_pool(plan, pages_of(plan, layout.page_bytes), layout)
    for part in ("KV pool 73.50 GiB", "weights of 15.00 GiB", "largest step 3.00 GiB"):
        assert part in text


def test_the_kv_of_a_draft_model_is_taken_from_it() -> None:
    plan = replace(needs(80 * GIB), drafts=9 * GIB)
    assert pages_of(plan, 1 << 20) == pages_of(needs(71 * GIB), 1 << 20)
    assert "KV of the draft model 9.00 GiB" in plan.describe()
    assert "draft" not in needs(80 * GIB).describe()


def test_rows_of_images_are_taken_from_it() -> None:
    plan = replace(needs(80 * GIB), media=9 * GIB)
    assert pages_of(plan, 1 << 20) == pages_of(needs(71 * GIB), 1 << 20)
    assert "rows of images 9.00 GiB" in plan.describe()
    assert "images" not in needs(80 * GIB).describe()


@pytest.mark.parametrize(
    ("share", "free", "left"),
    [
        (1.0, 60, 60),  # whoever has the other 40
        (0.5, 80, 30),
        (0.5, 10, 10),  # another one has more than its share
        (0.2, 80, 0),
    ],
)
def test_workers_on_one_gpu_share_it(share: float, free: int, left: int) -> None:
    found = free_of_share(free * GIB, 100 * GIB, 20 * GIB, share)
    assert found == left * GIB
    text = replace(needs(found), share=share).describe()
    assert ("for this worker" in text) == (share < 1)


def test_what_cannot_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"6\.00 GiB are free.*step 3\.00.*-0\.50 GiB are left"):
        pages_of(needs(6 * GIB), 1 << 20)


@pytest.mark.parametrize(("tokens", "context"), [(512, 4096), (1000, 300), (64, 64)])
@pytest.mark.parametrize("max_logits", [8, 48, 128])
def test_the_largest_step_is_well_formed(tokens: int, context: int, max_logits: int) -> None:
    layout = CacheLayout.of_plane(PagedPlane(layers=1, heads=1, dim=8, dtype="float32"), 16)
    step = largest_step(8, tokens, context, layout, max_logits)
    behind = largest_step(8, tokens, context, layout, max_logits, is_behind=True)
    if context > 1:
        assert len(behind.token_ids) == tokens
        own = np.diff(behind.cu_q_lens)
        # More positions before the step than it has rows.
        assert (behind.kv_lens - own).sum() == tokens + 1
        assert (behind.kv_lens >= 2 * own).all()
        assert len(behind.positions) == tokens
        assert behind.max_kv_len == behind.kv_lens.max() <= context
    lengths = np.diff(step.cu_q_lens)
    assert lengths.sum() == len(step.token_ids) == len(step.positions) == tokens
    assert lengths.max() == step.max_q_len <= context
    assert step.kv_lens.tolist() == lengths.tolist()
    assert step.slots.max() < layout.page_size
    assert len(step.logits_rows) == min(max_logits, tokens)


def test_sampling_has_room_for_all_requests() -> None:
    assert sampling_bytes(128_256, 256, 0) >= 256 * 128_256 * (4 + 4)


def test_blocks_get_what_requests_need_and_at_most_two_thirds() -> None:
    plane = PagedPlane(layers=2, heads=2, dim=64, dtype="float32")
    part = (StatePart("state", (64, 64), "float32"),)
    states = StatePlane(name="delta", layers=6, parts=part, ring=part)
    layout = CacheLayout(16, CacheLayout.of_plane(plane, 16).groups, states)
    assert divide_states(CacheLayout.of_plane(plane, 16), GIB, 64, 0) == (0, GIB)
    for size, most in ((GIB, 4), (GIB // 4, 4), (GIB, 64)):
        rings = (most + 1) * (16 + 2 * (1 + 5)) * states.ring_row_bytes
        num_blocks, left = divide_states(layout, size, most, 5)
        spent = rings + num_blocks * states.block_bytes
        assert spent + left == size
        assert spent <= 2 * size // 3
        assert num_blocks > 3 * most
    num_tokens = GIB // layout.page_bytes * 16
    assert divide_states(layout, GIB, 64, 0, is_fixed=True) == (193 + num_tokens // 256, GIB)
    with pytest.raises(ConfigError, match="lower max_running_requests"):
        divide_states(layout, 64 << 20, 64, 5)
