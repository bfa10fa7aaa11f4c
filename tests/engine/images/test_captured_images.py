"""Steps with images beside other requests, as a GPU's graphs run them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText
from weft.contract.request import StopCriteria
from weft.engine.executor import graphs
from weft.engine.loop.llm import LLM
from weft.kernels.shared import cpu
from weft.testing.engine.captured_steps import RecordedSteps
from weft.testing.models.choices import check_choices
from weft.testing.models.image_families import FAMILIES, Prompt, text
from weft.testing.models.tiny_qwen_vl import QWEN_FAMILIES

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.needs("triton-interpreter"),
]

ALL = {**FAMILIES, **QWEN_FAMILIES}
NEAR_TIE = 1e-4


@pytest.mark.parametrize(
    "name", ["qwen3_vl", *(pytest.param(n, marks=pytest.mark.full) for n in ALL if n != "qwen3_vl")]
)
def test_tokens_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether prompts with images are computed alone, beside text, or in pieces that begin behind
    an image.
    """
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    monkeypatch.setattr(graphs, "MEDIA_SIZES", (24, 48))
    family = ALL[name]()
    folder = family.make(tmp_path, random.randrange(1 << 30))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [
        *(Prompt(text(), [], []) for _ in range(2)),
        *(family.prompt([family.picture() for _ in range(count)]) for count in (1, 2)),
        Prompt(text(), [], []),
        family.prompt([family.picture()]),
    ]
    settings = {"num_pages": 400, "max_running_requests": 4, "max_step_tokens": 48}
    with LLM(folder, dtype="float32", overlap="on", prefill_chunk_tokens=32, **settings) as llm:
        steps = RecordedSteps(llm.engine, 0)
        llm.put([one for prompt in prompts for one in prompt.media])
        ids, spans = [one.ids for one in prompts], [one.spans for one in prompts]
        stop = StopCriteria(max_tokens=10, ignore_eos=True)
        samples = llm.generate(ids, stop=stop, spans=spans)
    has_any = not (family.sees_both_ways or family.has_states)
    assert bool(steps.num_replays.get("media")) == has_any
    for prompt, sample in zip(prompts, samples, strict=True):
        if prompt.media:
            logits = family.logits(model, prompt, sample.token_ids)
        else:
            # Llama 4's own class expects pictures.
            of_text = model.language_model if name == "llama4" else model
            ids = torch.tensor([[*prompt.ids, *sample.token_ids]])
            with torch.no_grad():
                logits = of_text(input_ids=ids).logits[0, len(prompt.ids) - 1 : -1]
        check_choices(logits, sample.token_ids, NEAR_TIE)
