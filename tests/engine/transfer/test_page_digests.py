"""What happens where pages are not checked on their way."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from weft.contract.errors import ConfigError
from weft.engine.base.config import EngineConfig
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.tiny_models import make_tiny


@pytest.mark.parametrize(
    ("owner_checks", "filler_checks"), [(False, False), (True, False), (False, True)]
)
def test_a_page_without_a_digest_is_taken_only_where_that_was_asked_for(
    tmp_path: Path, owner_checks: bool, filler_checks: bool
) -> None:
    model_dir = make_tiny("llama", tmp_path, seed=random.randrange(2**31))
    clock = ManualClock()
    owner = make_engine(model_dir, "decode", clock, page_digests=owner_checks)
    filler = make_engine(model_dir, "prefill", clock, page_digests=filler_checks)
    pair = EnginePair(owner, [filler], clock)
    try:
        prompt = [random.randrange(3, 500) for _ in range(51)]
        (wanted,) = pair.finish(pair.submit(prompt, candidates=[]))
        owner.memory.flush_cache()
        request = pair.submit(prompt)
        assert pair.finish(request) == [wanted]
        counters = owner.counters()
        is_refused = owner_checks and not filler_checks
        assert counters["digest_mismatches"] == int(is_refused)
        (fill,) = pair.answers[request].finished[0].timeline.fills
        assert fill.accepted_tokens == (0 if is_refused else 48)
        pair.settle()
    finally:
        pair.close()


def test_a_store_takes_no_unchecked_pages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="page_digests"):
        EngineConfig(model_dir=tmp_path, page_digests=False, has_store=True)
