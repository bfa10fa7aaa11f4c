"""Pages travel between workers of any numbers of ranks, and come back from tiers to all ranks."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.tier_bench import TierBench
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.usefixtures("single_thread"), pytest.mark.full]
PAGE, SIZES = 8, (1, 2, 4)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny"), seed, num_attention_heads=8)


def new_prompt(num_pages: int) -> list[int]:
    return [random.randrange(3, 500) for _ in range(num_pages * PAGE + 3)]


@pytest.mark.parametrize(("owner", "filler"), [*itertools.product(SIZES, SIZES)][1:])
def test_a_shipped_prompt_has_the_text_of_one_that_stays(
    model_dir: Path, owner: int, filler: int
) -> None:
    clock = ManualClock()
    with_ranks = {"tp": owner, "num_threads": 1}
    pair = EnginePair(
        make_engine(model_dir, "decode", clock, **with_ranks),
        [make_engine(model_dir, "prefill", clock, worker_id="p0", tp=filler, num_threads=1)],
        clock,
    )
    try:
        for _ in range(3):
            prompt = new_prompt(6)
            pair.owner.memory.flush_cache()
            (alone,) = pair.finish(pair.submit(prompt, candidates=[]))
            pair.owner.memory.flush_cache()
            request_id = pair.submit(prompt)
            assert pair.finish(request_id) == [alone]
            (fill,) = pair.answers[request_id].finished[0].timeline.fills
            assert (fill.accepted_tokens, fill.failure) == (6 * PAGE, "")
            pair.settle()
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
        prompt = new_prompt(19)
        expected = bench.ask(prompt)
        bench.push_out()
        assert bench.ask(prompt) == expected
        assert bench.counters("host")["corrupt_pages"] == 0
        assert sum(bench.counters(tier)["loaded_pages"] for tier in ("host", "disk")) > 0
        bench.settle()
    finally:
        bench.pair.close()
