"""Log-probabilities as trainers use them: of the temperature's distribution, finite, and exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")
VOCABULARY = 517
STOP = StopCriteria(max_tokens=40, ignore_eos=True)
PROMPTS = [[random.randrange(3, VOCABULARY) for _ in range(count)] for count in (5, 31, 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m") / "m"
    return make_tiny("llama", path, random.randrange(10**6), vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", num_pages=64, page_size=8) as made:
        yield made


def reference(folder: Path, prompt: list[int], drawn: list[int], heat: float) -> torch.Tensor:
    """[tokens, vocabulary] of transformers: log-probabilities at each drawn token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *drawn]]), use_cache=False).logits[0]
    return (logits[len(prompt) - 1 : -1] / heat).log_softmax(-1)


@pytest.mark.parametrize(("heat", "is_scaled"), [(0.6, True), (0.6, False), (2.5, True), (0, True)])
def test_the_importance_ratio_is_one(folder: Path, llm: LLM, heat: float, is_scaled: bool) -> None:
    """Filters, penalties and biases do not count, and a greedy sample is not scaled."""
    kinds = [
        SamplingParams(temperature=heat, seed=random.getrandbits(63)),
        SamplingParams(temperature=heat, top_p=0.8, top_k=50),
        SamplingParams(temperature=heat, repetition_penalty=1.3, logit_bias={7: 5.0}),
    ]
    found = llm.generate(PROMPTS, kinds, STOP, 3, scales_logprobs=is_scaled)
    for prompt, sample in zip(PROMPTS, found, strict=True):
        right = reference(folder, prompt, sample.token_ids, heat if heat and is_scaled else 1.0)
        assert [one.token_id for one in sample.logprobs] == sample.token_ids
        own = torch.tensor([one.logprob for one in sample.logprobs])
        assert own.isfinite().all()
        assert own.max() <= 0
        drawn = right.gather(1, torch.tensor(sample.token_ids).unsqueeze(1)).squeeze(1)
        ratios = (drawn.double() - own.double()).exp()
        assert (ratios - 1).abs().max() < 1e-3
        for entry, row in zip(sample.logprobs, right, strict=True):
            for token_id, logprob in entry.top:
                assert logprob == pytest.approx(float(row[token_id]), abs=1e-3)


def test_a_token_that_hardly_could_be_drawn_has_a_finite_log_probability(llm: LLM) -> None:
    """A constraint of one token, or a cold temperature, may draw what the model never would."""
    bias = SamplingParams(temperature=0.01, logit_bias={9: 100.0}, seed=1)
    (sample,) = llm.generate(PROMPTS[:1], bias, STOP, 0, scales_logprobs=True)
    assert len(sample.logprobs) == len(sample.token_ids)
    for one in sample.logprobs:
        assert -1e30 < one.logprob <= 0
