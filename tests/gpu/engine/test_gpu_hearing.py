"""Prompts with clips of audio on a GPU, against transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.tiny_hearing import load_hearing

pytestmark = pytest.mark.needs("cuda")

NEAR_TIE = 1e-3
"""Products on a GPU are summed in other orders."""


@pytest.mark.parametrize("chunk", [256, 16])
@pytest.mark.parametrize("kind", ["voxtral", "qwen2_audio"])
def test_tokens_are_those_of_transformers(kind: str, chunk: int, tmp_path: Path) -> None:
    """In a batch, with chunks that hold whole prompts, or end inside of clips."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    model = load_hearing(kind, tmp_path / "model", seed)
    prompts = [model.prompt([model.clip() for _ in range(count)]) for count in (1, 2, 3)]
    stop = StopCriteria(max_tokens=10, ignore_eos=True)
    settings = {"dtype": "float32", "num_pages": 400, "prefill_chunk_tokens": chunk}
    with LLM(model.folder, device="cuda", **settings) as llm:
        llm.put([one.media for prompt in prompts for one in prompt.clips])
        ids, spans = [prompt.ids for prompt in prompts], [prompt.spans for prompt in prompts]
        samples = llm.generate(ids, stop=stop, spans=spans)
    for prompt, sample in zip(prompts, samples, strict=True):
        assert len(sample.token_ids) == stop.max_tokens
        model.check(prompt, sample.token_ids, NEAR_TIE)
