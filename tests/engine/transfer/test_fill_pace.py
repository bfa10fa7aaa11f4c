"""Steps of running requests leave cores to prefill workers of their host, if they share them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.tiny_models import make_tiny

NUM_TURNS = 20
LONG_S = 3600.0


@pytest.mark.parametrize("on_host", [True, False])
def test_running_requests_wait_for_a_prompt_that_is_filled_on_their_cores(
    tmp_path: Path, on_host: bool
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng, clock = random.Random(seed), ManualClock()
    model_dir = make_tiny("llama", tmp_path, seed=seed)
    owner = make_engine(
        model_dir, "decode", clock, fillers_on_host=on_host, inter_token_target_s=LONG_S
    )
    pair = EnginePair(owner, [make_engine(model_dir, "prefill", clock, worker_id="p")], clock)
    prompts = [[rng.randrange(3, 500) for _ in range(51)] for _ in range(2)]
    try:
        alone = [pair.finish(pair.submit(one, 64, candidates=[]))[0] for one in prompts]
        owner.memory.flush_cache()
        running = pair.submit(prompts[0], 64)
        tokens = pair.answers[running].tokens
        pair.run(lambda: bool(tokens))
        pair.paused.add("p")
        filled = pair.submit(prompts[1], 64)
        pair.run(lambda: bool(owner.scheduler.filling))
        num_before = len(tokens[0])
        assert num_before < 64 - NUM_TURNS
        for _ in range(NUM_TURNS):
            pair.turn()
            assert owner.ran_step != on_host
        assert len(tokens[0]) == num_before + (0 if on_host else NUM_TURNS)
        assert owner.rest_s() > 0 or not on_host
        pair.paused.clear()
        assert pair.finish(running, filled) == alone
        (fill,) = pair.answers[filled].finished[0].timeline.fills
        assert not fill.failure
    finally:
        pair.close()
