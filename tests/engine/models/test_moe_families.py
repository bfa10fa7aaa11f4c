"""Families with experts against transformers, in float32: whole, in chunks, and from the cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.testing.draws import draw_until
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import Choices, asks_surely
from weft.testing.models.every_family import assert_logits
from weft.testing.models.lora_reference import BASE, PeftModels
from weft.testing.models.moe_families import MOE_FAMILIES as FAMILIES
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.reference_models import VOCAB, make_reference

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
NUM_NEW = 16
FULL = (
    *("exaone-moe", "hy3", "laguna", "solar", "olmoe"),
    *("ling2", "flex-olmo", "granite-shared", "cohere2-moe", "cohere2-moe-softmax"),
    *("sarvam", "sarvam-mla", "flint"),
)
"""Those whose parts others have too; they run behind --full."""


def marked() -> list[object]:
    return [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in FAMILIES]


class Family(NamedTuple):
    """A model of both."""

    path: Path
    reference: Any
    prompts: list[list[int]]
    tokens: list[list[int]]
    """What the reference goes on with."""


@pytest.fixture(params=marked(), scope="module")
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Family:
    kind, overrides = FAMILIES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    reference = make_reference(kind, path, seed, **overrides)
    made = [prompt_of(reference, count) for count in (5, 21, 90)]
    return Family(path, reference, *map(list, zip(*made, strict=True)))


def prompt_of(reference: Any, length: int) -> tuple[list[int], list[int]]:
    """A random prompt and its greedy continuation, drawn anew until rounding cannot change which
    experts they ask.
    """

    def draw() -> tuple[list[int], list[int]]:
        prompt = [random.randrange(3, VOCAB) for _ in range(length)]
        return prompt, greedy(reference, prompt)

    return draw_until(draw, lambda drawn: asks_surely(reference, [*drawn[0], *drawn[1]]))


def greedy(reference: Any, prompt: list[int]) -> list[int]:
    return Choices(
        lambda tokens: reference(torch.tensor([tokens]), use_cache=False).logits[0], prompt, NUM_NEW
    )


def test_logits_of_steps_over_random_cuts(family: Family) -> None:
    driver = PagedDriver(load_model(family.path, "float32").model, num_pages=40)
    requests = [PagedRequest() for _ in family.prompts]
    parts: list[list[torch.Tensor]] = [[] for _ in family.prompts]
    left = dict(enumerate(family.prompts))
    while left:
        work = []
        for i in random.sample(sorted(left), random.randint(1, len(left))):
            cut = random.choice((1, 3, 8, 24, 64))
            work.append((i, left[i][:cut]))
            left[i] = left[i][cut:]
            if not left[i]:
                del left[i]
        counts = [len(tokens) for _, tokens in work]
        logits = driver.step([(requests[i], tokens) for i, tokens in work], range(sum(counts)))
        for (i, _), rows in zip(work, torch.split(logits, counts), strict=True):
            parts[i].append(rows)
    for prompt, pieces in zip(family.prompts, parts, strict=True):
        assert_logits(torch.cat(pieces), family.reference, prompt, 5e-5)


def test_whole_and_in_chunks_and_from_the_cache(family: Family) -> None:
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    for settings in ({}, {"prefill_chunk_tokens": 2 * PAGE}):
        with LLM(family.path, dtype="float32", page_size=PAGE, num_pages=100, **settings) as llm:
            for _ in range(2):
                samples = llm.generate(family.prompts, stop=stop)
                assert [sample.token_ids for sample in samples] == family.tokens
            assert llm.engine.counters()["prefix_hit_tokens"] > 0


def test_prefill_apart(family: Family) -> None:
    clock = ManualClock()
    owner, filler = (make_engine(family.path, role, clock) for role in ("decode", "prefill"))
    pair = EnginePair(owner, [filler], clock)
    try:
        asked = [pair.submit(prompt, NUM_NEW) for prompt in family.prompts]
        assert pair.finish(*asked) == family.tokens
        (fill,) = pair.answers[asked[-1]].finished[0].timeline.fills
        assert (fill.accepted_tokens, fill.failure) == (89 // PAGE * PAGE, "")
        pair.settle()
    finally:
        pair.close()


def test_dummy_weights_need_no_checkpoint(family: Family, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((family.path / "config.json").read_bytes())
    model = load_model(tmp_path, "float32", dummy=True).model
    assert PagedDriver(model, 4).step([(PagedRequest(), [1, 2, 3])]).isfinite().all()


def adapted() -> list[object]:
    """All families that can have adapters, of which two run by default. Layers of Laguna and MiMo
    have products of different shapes.
    """
    by_default, names = ("qwen2-moe", "deepseek-v3"), set(FAMILIES) - {"laguna", "mimo"}
    marks = {name: () if name in by_default else (pytest.mark.full,) for name in sorted(names)}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.mark.parametrize("name", adapted())
def test_adapters_of_attention_compute_what_pefts_do(name: str, tmp_path: Path, seed: int) -> None:
    kind, overrides = FAMILIES[name]
    make_reference(kind, tmp_path / "model", seed, **overrides)
    models = PeftModels(tmp_path / "model", tmp_path)
    targets = (
        ["o_proj"] if "kv_lora_rank" in overrides else ["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    digest = models.add(seed + 1, r=5, target_modules=targets)
    prompts = [[random.randrange(3, VOCAB) for _ in range(count)] for count in (33, 18)]
    settings = {"dtype": "float32", "page_size": PAGE, "num_pages": 64}
    with LLM(models.model_dir, enable_lora=True, **settings) as llm:
        assert llm.load_adapter(models.directories[digest]) == digest
        stop, adapters = StopCriteria(max_tokens=8, ignore_eos=True), [digest, BASE]
        samples = llm.generate(prompts, stop=stop, top_logprobs=5, adapters=adapters)
        for prompt, adapter, sample in zip(prompts, adapters, samples, strict=True):
            models.check(adapter, prompt, sample)
