"""Owners without an image tower whose model has recurrent layers: pages of KV are not all that they
need. They compute a prompt's last tokens themselves, with rows of images that a prefill worker
sends.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from weft.contract.errors import MediaMissing
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams
from weft.contract.spans import spans_from
from weft.engine.base.config import EngineConfig
from weft.engine.executor.memory_plan import MemoryNeeds
from weft.engine.executor.ranks.share import with_media_rows
from weft.engine.model.loader import load_model
from weft.testing.engine.engine_pair import WAYS, EnginePair, ManualClock, make_engine
from weft.testing.models.choices import check_choices
from weft.testing.models.image_families import Prompt, text
from weft.testing.models.tiny_qwen_vl import QWEN_FAMILIES

pytestmark = pytest.mark.usefixtures("single_thread")

NEAR_TIE = 1e-4
COUNT = 10


def in_full(way: Any) -> Any:
    return pytest.param(*way.values, id=way.id, marks=[*way.marks, pytest.mark.full])


class Case:
    """A model, and transformers' reading of it in float32."""

    def __init__(self, folder: Path) -> None:
        self.family = QWEN_FAMILIES["qwen3_5"]()
        self.folder = self.family.make(folder, random.randrange(1 << 30))
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)

    def prompt(self, count: int, begin: list[int] | None = None) -> Prompt:
        return self.family.prompt([self.family.picture() for _ in range(count)], begin)

    def check(self, prompt: Prompt, tokens: list[int], count: int = COUNT) -> None:
        assert len(tokens) == count
        check_choices(self.family.logits(self._model, prompt, tokens), tokens, NEAR_TIE)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("filled"))


@pytest.fixture
def make_pair(case: Case) -> Iterator[Any]:
    pairs = []

    def make(**settings: Any) -> EnginePair:
        clock = ManualClock()
        owner = make_engine(case.folder, "decode", clock, language_model_only=True, **settings)
        filler = make_engine(case.folder, "prefill", clock, **settings)
        pairs.append(EnginePair(owner, [filler], clock))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def ask(pair: EnginePair, prompt: Prompt, count: int = COUNT, **values: Any) -> list[list[int]]:
    pair.fillers["prefill"].turn(Inbox(media=list(prompt.media)))
    return pair.finish(pair.submit(prompt.ids, count, spans=list(prompt.spans), **values))


def cut(prompt: Prompt, num_after: int) -> Prompt:
    """The prompt with so many tokens after its last image."""
    end = prompt.spans[-1].end
    return Prompt([*prompt.ids[:end], *(text(1)[0] for _ in range(num_after))], *prompt[1:])


@pytest.mark.parametrize("way", [WAYS[0], *map(in_full, WAYS[1:])])
def test_prompts_may_end_anywhere_after_an_image(
    case: Case, make_pair: Any, way: dict[str, str]
) -> None:
    """In its page, in the next one, or in that of the text before it. The second time all pages are
    cached on both sides, and rows alone travel.
    """
    pair = make_pair(**way)
    for num_after in (2, 7, 9):
        prompt = cut(case.prompt(random.randint(1, 3)), num_after)
        for _ in range(2):
            before = pair.owner.counters()["fills_done"]
            (tokens,) = ask(pair, prompt)
            case.check(prompt, tokens)
            page = (len(prompt.ids) - 1) // 8 * 8
            needs_rows = bool(spans_from(prompt.spans, max(0, page - 1)))
            assert pair.owner.counters()["fills_done"] >= before + needs_rows
    pair.settle()


def test_a_prompt_may_be_shorter_than_a_page(case: Case, make_pair: Any) -> None:
    """Nothing but rows travels."""
    pair = make_pair(page_size=32, prefill_chunk_tokens=32)
    prompts = (cut(case.prompt(1, [5]), 3) for _ in itertools.count())
    prompt = next(prompt for prompt in prompts if len(prompt.ids) < 32)
    (tokens,) = ask(pair, prompt)
    case.check(prompt, tokens)
    pair.settle()


def test_samples_share_the_rows(case: Case, make_pair: Any) -> None:
    pair = make_pair()
    prompt = cut(case.prompt(2), 4)
    pair.fillers["prefill"].turn(Inbox(media=list(prompt.media)))
    sampling = SamplingParams(temperature=0.0, n=3)
    name = pair.submit(prompt.ids, COUNT, spans=list(prompt.spans), sampling=sampling)
    pair.finish(name, samples=3)
    for tokens in pair.answers[name].tokens.values():
        case.check(prompt, tokens)
    pair.settle()


@pytest.mark.parametrize("is_cached", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_preempted_request_goes_on_with_its_rows(
    case: Case, make_pair: Any, is_cached: bool
) -> None:
    """Unless the pages of its images are gone. It then fails, and its gateway begins it anew with a
    filler.
    """
    pair = make_pair()
    prompt, owner = cut(case.prompt(2), 4), pair.owner
    pair.fillers["prefill"].turn(Inbox(media=list(prompt.media)))
    name = pair.submit(prompt.ids, 60, spans=list(prompt.spans))
    pair.run(lambda: len(pair.answers[name].tokens.get(0, ())) > 9)
    owner.scheduler.preempt(owner.scheduler.running[0])
    if is_cached:
        (tokens,) = pair.finish(name)
        case.check(prompt, tokens, 60)
    else:
        owner.memory.flush_cache()
        with pytest.raises(MediaMissing):
            pair.finish(name)
    pair.settle()


@pytest.mark.full
def test_ranks_of_both_workers_have_the_rows(case: Case, make_pair: Any) -> None:
    limits = {"rank_timeout_s": 60.0, "check_ranks": True, "poison_free_pages": False}
    pair = make_pair(tp=2, **limits)
    for num_after in (2, 5):
        prompt = cut(case.prompt(2), num_after)
        (tokens,) = ask(pair, prompt)
        case.check(prompt, tokens)
    pair.settle()


def test_without_a_filler_the_request_fails(case: Case, make_pair: Any) -> None:
    pair = make_pair()
    prompt = cut(case.prompt(1), 3)
    name = pair.submit(prompt.ids, COUNT, candidates=[], spans=list(prompt.spans))
    with pytest.raises(MediaMissing):
        pair.finish(name)
    # The filler was not brought the image.
    name = pair.submit(prompt.ids, COUNT, spans=list(prompt.spans))
    with pytest.raises(MediaMissing):
        pair.finish(name)
    (tokens,) = ask(pair, prompt)
    case.check(prompt, tokens)


def test_no_memory_is_planned_for_captured_steps_with_images(case: Case) -> None:
    """Steps with prompts of recurrent layers are not captured."""
    config = EngineConfig(model_dir=case.folder, role="decode", language_model_only=True)
    loaded = load_model(case.folder, "float32")
    layout, device = loaded.model.kv_layout(config.page_size), torch.device("cpu")
    before = MemoryNeeds(total=0, free=0, weights=0, step=0, graphs=0, sampling=0)
    needs = with_media_rows(before, config, loaded, layout, device)
    row_bytes = 4 * loaded.config.hidden_size
    num_rows = (1 + config.page_size) * config.max_running_requests
    assert replace(needs, media=0) == before
    assert needs.media == num_rows * row_bytes
