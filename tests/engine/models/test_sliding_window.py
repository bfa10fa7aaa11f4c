"""Models with sliding windows give transformers' text, wherever their pages come from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.sampling.sampler import derive_seed
from weft.testing.engine.drafters import KnownDrafter, speculate
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import Choices
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

VOCAB = 517
PAGE = 8
NUM_NEW = 30
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2-mixed": (
        "qwen2",
        {"sliding_window": 21, "use_sliding_window": True, "max_window_layers": 1},
    ),
}


class Text:
    """A random prompt and what transformers makes of it, each token clearly the most likely one."""

    def __init__(self, model: torch.nn.Module, length: int) -> None:
        while True:
            self.prompt = [random.randrange(3, VOCAB) for _ in range(length)]
            tokens = Choices(
                lambda tokens: model(torch.tensor([tokens])).logits[0], self.prompt, NUM_NEW
            )
            if tokens.is_clear():
                self.tokens = list(tokens)
                return


@pytest.fixture(params=KINDS, scope="module")
def model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Path:
    kind, overrides = KINDS[request.param]
    return make_tiny(kind, tmp_path_factory.mktemp(request.param), seed, **overrides)


@pytest.fixture(scope="module")
def texts(model_dir: Path) -> list[Text]:
    """Shorter and longer than the window."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [Text(model, length) for length in (6, 24, 90, 203)]


def generate(llm: LLM, texts: Sequence[Text]) -> list[list[int]]:
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    return [s.token_ids for s in llm.generate([text.prompt for text in texts], stop=stop)]


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_tokens": 2 * PAGE}])
def test_whole_and_in_chunks_and_from_the_cache(
    model_dir: Path, texts: list[Text], settings: dict[str, Any]
) -> None:
    expected = [text.tokens for text in texts]
    with LLM(model_dir, dtype="float32", page_size=PAGE, num_pages=200, **settings) as llm:
        assert generate(llm, texts) == expected
        assert generate(llm, texts) == expected
        assert llm.engine.counters()["prefix_hit_tokens"] > 0
        # A turn that goes on behind pages that no row of it sees.
        longer = [text.prompt + text.tokens[:-2] for text in texts]
        stop = StopCriteria(max_tokens=2, ignore_eos=True)
        last = [sample.token_ids for sample in llm.generate(longer, stop=stop)]
        assert last == [tokens[-2:] for tokens in expected]


def test_shipped_pages(model_dir: Path, texts: list[Text]) -> None:
    clock = ManualClock()
    owner, filler = (make_engine(model_dir, role, clock) for role in ("decode", "prefill"))
    pair = EnginePair(owner, [filler], clock)
    ids = [pair.submit(text.prompt, NUM_NEW) for text in texts]
    assert pair.finish(*ids) == [text.tokens for text in texts]
    (fill,) = pair.answers[ids[-1]].finished[0].timeline.fills
    assert (fill.accepted_tokens, fill.failure) == (202 // PAGE * PAGE, "")
    pair.settle()
    pair.close()


def test_verified_drafts(model_dir: Path, texts: list[Text]) -> None:
    """Several rows of a request, of which each has its own window."""
    params = SamplingParams(temperature=0.0, seed=5)
    known = {
        (tuple(text.prompt), derive_seed(5, 0)): [*text.prompt, *text.tokens] for text in texts
    }
    with LLM(model_dir, dtype="float32", page_size=PAGE, drafter="ngram") as llm:
        speculate(llm.engine, KnownDrafter(known, VOCAB, 0.8), (2, 5))
        prompts = [text.prompt for text in texts]
        stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        samples = llm.generate(prompts, params, stop)
        assert [sample.token_ids for sample in samples] == [text.tokens for text in texts]
        assert llm.engine.counters()["accepted_tokens"] > 0
