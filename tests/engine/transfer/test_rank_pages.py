"""Pages travel between workers of any numbers of ranks, and come back from tiers to all ranks."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from weft.testing.engine.eagle3_cases import HeadReference, PublishedEntries
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.tier_bench import TierBench
from weft.testing.models.families import make_family
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.usefixtures("single_thread"), pytest.mark.full]
PAGE, SIZES = 8, (1, 2, 4)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny"), seed, num_attention_heads=8)


def new_prompt(num_pages: int) -> list[int]:
    return [random.randrange(3, 250) for _ in range(num_pages * PAGE + 3)]


@pytest.mark.parametrize(("owner", "filler"), [*itertools.product(SIZES, SIZES)][1:])
def test_a_shipped_prompt_has_the_text_of_one_that_stays(
    model_dir: Path, owner: int, filler: int
) -> None:
    check_shipped(model_dir, {"tp": owner}, {"tp": filler})


@pytest.mark.parametrize(
    ("owner", "filler"),
    [
        ({"tp": 2, "ep": 2}, {}),
        ({}, {"tp": 4, "ep": 4}),
        ({"tp": 4}, {"tp": 2, "ep": 2}),
        ({"tp": 4, "ep": 4}, {"tp": 2}),
        ({"pp": 2}, {}),
        ({}, {"pp": 3}),
        ({"pp": 2}, {"tp": 2}),
    ],
)
def test_shipped_pages_hold_the_entries_of_a_draft_head_and_of_layers_with_experts(
    owner: dict[str, int], filler: dict[str, int], tmp_path: Path, seed: int
) -> None:
    """Between stages, ranks with whole experts and such that have a part of each."""
    sizes = {"num_attention_heads": 8, "num_hidden_layers": 4, "num_experts": 8}
    folder = make_tiny("qwen3_moe", tmp_path / "model", seed, **sizes)
    head = {"draft_dir": make_tiny_draft(tmp_path / "head", folder, seed + 1)}
    reference = HeadReference(folder, head["draft_dir"])
    drafting = {"drafter": "eagle3", "draft_gate": "fixed"}
    check_shipped(folder, owner | head | drafting, filler | head, reference)


@pytest.mark.parametrize(("owner", "filler"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["gemma4", "gemma4-keys"])
def test_pages_of_layers_that_share_k_and_v_or_have_heads_of_other_shapes(
    kind: str, owner: int, filler: int, tmp_path: Path, seed: int
) -> None:
    folder = make_family(kind, tmp_path / "model", seed)
    check_shipped(folder, {"tp": owner}, {"tp": filler})


def check_shipped(
    model_dir: Path,
    owner: dict[str, Any],
    filler: dict[str, Any],
    reference: HeadReference | None = None,
) -> None:
    """Prompts have the same text whether a filler with these settings computes them or not, and
    the owner's pages hold the entries of a head, if there is one.
    """
    clock, one = ManualClock(), {"num_threads": 1}
    pair = EnginePair(
        make_engine(model_dir, "decode", clock, **owner, **one),
        [make_engine(model_dir, "prefill", clock, worker_id="p0", **filler, **one)],
        clock,
    )
    try:
        published = PublishedEntries(pair.owner)
        for _ in range(3):
            prompt = new_prompt(6)
            pair.check_shipped(prompt, 6)
            if reference is not None:
                assert published.check(prompt, reference) == 6
            pair.settle()
        if reference is not None:
            assert pair.owner.counters()["drafted_tokens"] > 0
    finally:
        pair.close()


@pytest.mark.parametrize("size", SIZES[1:])
def test_pages_of_all_ranks_come_back_from_host_memory_and_disk(
    model_dir: Path, tmp_path: Path, size: int
) -> None:
    small = {"num_pages": 40, "host_cache_bytes": 1 << 18, "load_back_threshold": 0}
    bench = TierBench(
        model_dir,
        20 * PAGE,
        **small,
        disk_cache_dir=tmp_path,
        prefill_chunk_tokens=4 * PAGE,
        tp=size,
        num_threads=1,
    )
    try:
        bench.check_return(new_prompt(19))
    finally:
        bench.pair.close()
