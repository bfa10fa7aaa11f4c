"""A worker says why requests have fewer tokens than its model takes, or than was asked for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from weft.contract.errors import ContextTooLong
from weft.engine.loop.llm import LLM
from weft.testing.models.tiny_models import make_tiny

LONGEST, PAGE_SIZE = 512, 16


@pytest.mark.parametrize("limit", ["pool", "model", "settings", "nothing"])
def test_what_limits_requests_is_told(tmp_path: Path, seed: int, limit: str) -> None:
    folder = make_tiny("llama", tmp_path / "tiny", seed=1, max_position_embeddings=LONGEST)
    rng = random.Random(seed)
    num_pages = rng.randrange(8, 30) if limit == "pool" else 64
    asked = {"model": rng.randrange(LONGEST + 1, 4 * LONGEST), "settings": rng.randrange(64, 500)}
    with LLM(
        folder,
        dtype="float32",
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_context_tokens=asked.get(limit),
        num_threads=1,
    ) as llm:
        info = llm.engine.info
        told = [notice for notice in info.notices if notice.startswith("a request has at most")]
        most = {"pool": (num_pages - 1) * PAGE_SIZE, "settings": asked["settings"]}
        assert info.max_context_tokens == most.get(limit, LONGEST)
        assert len(told) == (limit in ("pool", "model"))
        for notice in told:
            wanted = asked["model"] if limit == "model" else LONGEST
            assert f"{info.max_context_tokens:,} tokens" in notice
            assert f"instead of {wanted:,}" in notice
            assert ("KV pool" if limit == "pool" else "model") in notice
        with pytest.raises(ContextTooLong):
            llm.generate([[5] * info.max_context_tokens])
