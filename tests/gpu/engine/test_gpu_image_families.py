"""Prompts with images on a GPU, against transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from triton import knobs
from weft.contract.request import StopCriteria
from weft.engine.executor.encoder_graphs import capture_encoder
from weft.engine.executor.graphs import GraphBucket, StepGraphs
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.testing.models.choices import check_choices
from weft.testing.models.image_families import FAMILIES, pixels_of, text
from weft.testing.models.tiny_qwen_vl import QWEN_FAMILIES

pytestmark = pytest.mark.needs("cuda")

ALL = {**FAMILIES, **QWEN_FAMILIES}

NEAR_TIE = 1e-3
"""Products on a GPU are summed in other orders."""


@pytest.mark.parametrize("chunk", [256, 16])
@pytest.mark.parametrize("name", ALL)
def test_tokens_are_those_of_transformers(name: str, chunk: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    family = ALL[name]()
    folder = family.make(tmp_path / "model", seed)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [family.prompt([family.picture() for _ in range(count)]) for count in (1, 2, 4)]
    stop = StopCriteria(max_tokens=10, ignore_eos=True)
    settings = {"dtype": "float32", "num_pages": 400, "prefill_chunk_tokens": chunk}
    with LLM(folder, device="cuda", **settings) as llm:
        llm.put([one for prompt in prompts for one in prompt.media])
        ids, spans = [prompt.ids for prompt in prompts], [prompt.spans for prompt in prompts]
        samples = llm.generate(ids, stop=stop, spans=spans)
    for prompt, sample in zip(prompts, samples, strict=True):
        logits = family.logits(model, prompt, sample.token_ids)
        check_choices(logits, sample.token_ids, NEAR_TIE)


@pytest.mark.parametrize("name", ["gemma3", "internvl", "qwen2_5_vl", "qwen3_vl"])
@torch.inference_mode()
def test_captured_passes_make_the_rows_of_others(name: str, tmp_path: Path) -> None:
    """Where products are in one order: the same bits, whatever the padding and earlier pictures."""
    family = ALL[name]()
    folder = family.make(tmp_path / "model", random.randrange(1 << 30))
    encoder = load_model(folder, "bfloat16", "cuda", images=True, is_fixed=True).encoder
    assert encoder is not None
    graphs = capture_encoder(encoder, 1200, torch.device("cuda"))
    assert graphs is not None
    for count in (3, 1, 4, 2):
        pictures = [pixels_of(family.picture()).cuda() for _ in range(count)]
        found = graphs.encode(pictures)
        assert found is not None
        assert torch.equal(found, encoder.encode(pictures))


class Compiled:
    """Names of the Triton kernels that are compiled, or loaded from the cache on disk."""

    def __init__(self) -> None:
        self.names = list[str]()

    def __call__(self, *, fn: Any, **_: Any) -> None:
        self.names.append(str(fn.name))


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_first_images_compile_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start has done it, also for those that come while other requests decode: their steps are
    graphs.
    """
    family = ALL[name]()
    folder = family.make(tmp_path / "model", random.randrange(1 << 30))
    compiled = Compiled()
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", compiled)
    kinds, replay = set[str](), StepGraphs._replay

    def noted(self: StepGraphs, bucket: GraphBucket) -> torch.Tensor:
        kinds.add(bucket.kind)
        return replay(self, bucket)

    monkeypatch.setattr(StepGraphs, "_replay", noted)
    stop = StopCriteria(max_tokens=10, ignore_eos=True)
    with LLM(folder, device="cuda", dtype="bfloat16", num_pages=2000) as llm:
        # What only drawing and steps of text need is not this test's.
        llm.generate([text(40), text(300)], stop=stop)
        llm.generate([text(20 + number) for number in range(24)], stop=stop)
        compiled.names.clear()
        for count in (1, 2, 4):
            prompt = family.prompt([family.picture() for _ in range(count)])
            llm.put(prompt.media)
            llm.generate([prompt.ids], stop=stop, spans=[prompt.spans])
        for count in (3, 11, 24):
            prompt = family.prompt([family.picture() for _ in range(2)])
            llm.put(prompt.media)
            texts = [text(20 + number) for number in range(count)]
            spans = [*([] for _ in texts), prompt.spans]
            llm.generate([*texts, prompt.ids], stop=stop, spans=spans)
        assert not compiled.names
    assert ("media" in kinds) != family.sees_both_ways
