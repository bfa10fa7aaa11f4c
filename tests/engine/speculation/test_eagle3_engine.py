"""An engine with an EAGLE head: its text is the target's, its drafts are the head's."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from weft.contract.errors import ConfigError, ModelError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.config import EngineConfig
from weft.engine.loop.llm import LLM
from weft.testing.engine.drafters import KnownDrafter, speculate, texts_of
from weft.testing.engine.eagle3_cases import WatchedHead, check_chains
from weft.testing.models.choices import check_same_groups
from weft.testing.models.every_family import load_reference
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft, make_tiny_eagle
from weft.testing.models.tiny_models import make_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
VOCAB = 517
LAYERS = 4
PARAMS = SamplingParams(temperature=1.0, seed=5)
STOP = StopCriteria(max_tokens=3 * PAGE, ignore_eos=True)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny(
        "llama", tmp_path_factory.mktemp("t"), seed, vocab_size=VOCAB, num_hidden_layers=LAYERS
    )


@pytest.fixture(scope="module")
def draft_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("d"), target_dir, seed + 1)


@pytest.fixture(scope="module")
def eagle_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """An EAGLE-1 head."""
    return make_tiny_eagle(tmp_path_factory.mktemp("e"), target_dir, seed + 1)


def llm(target_dir: Path, **settings: object) -> LLM:
    return LLM(
        target_dir, dtype="float32", page_size=PAGE, prefill_chunk_tokens=2 * PAGE, **settings
    )


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("num_pages", [None, 20], ids=["room", "few-pages"])
def test_drafts_are_the_heads_whatever_happened_to_a_request(
    target_dir: Path, draft_dir: Path, overlap: str, num_pages: int | None
) -> None:
    """Chunks, prefix hits that end inside a page, samples of one prompt, pre-emption."""
    check_drafts(target_dir, draft_dir, num_pages, drafter="eagle3", overlap=overlap)


def test_drafts_of_an_eagle_1_head(target_dir: Path, eagle_dir: Path) -> None:
    overlap, num_pages = random.choice(["off", "on"]), random.choice([None, 20])
    check_drafts(target_dir, eagle_dir, num_pages, drafter="eagle", overlap=overlap)


def check_drafts(target_dir: Path, draft_dir: Path, num_pages: int | None, **settings: str) -> None:
    print(f"{settings}, pages {num_pages}")
    shared = [random.randrange(3, VOCAB) for _ in range(3 * PAGE + 3)]
    prompts = [
        shared[: random.randint(1, len(shared))]
        + [random.randrange(3, VOCAB) for _ in range(random.randint(1, 2 * PAGE))]
        for _ in range(6)
    ]
    params = SamplingParams(temperature=1.0, seed=5, n=1 if num_pages else 2)
    # Longer texts with few pages: short ones may end in time for the next, without pre-emption.
    stop = replace(STOP, max_tokens=6 * PAGE) if num_pages else STOP
    with llm(target_dir) as plain:
        expected = plain.generate_all(prompts, params, stop)
    known = KnownDrafter(texts_of(prompts, expected, 5), VOCAB, 0.6)
    given = {"draft_dir": draft_dir, "num_pages": num_pages, "poison_free_pages": True}
    with llm(target_dir, **given, **settings) as drafting:
        watched = WatchedHead(drafting.engine, known)
        for _ in range(2):  # The second time on a warm cache.
            groups = drafting.generate_all(prompts, params, stop)
            check_same_groups(
                partial(load_reference, target_dir), prompts, groups, expected, params
            )
        counters = drafting.engine.counters()
    assert counters["accepted_tokens"] > 0
    if num_pages:
        assert counters["preemptions"] > 0
    check_chains(watched, target_dir, draft_dir)


def test_the_text_is_the_same_when_the_head_drafts_itself(
    target_dir: Path, draft_dir: Path
) -> None:
    prompts = [[random.randrange(3, VOCAB) for _ in range(n)] for n in (1, PAGE, 30)]
    with llm(target_dir) as plain:
        expected = plain.generate_all(prompts, PARAMS, STOP)
    # What the gate measures on a busy machine may be no reason for drafts.
    drafts = {"draft_dir": draft_dir, "drafter": "eagle3", "draft_gate": "fixed"}
    with llm(target_dir, **drafts) as drafting:
        groups = drafting.generate_all(prompts, PARAMS, STOP)
        check_same_groups(partial(load_reference, target_dir), prompts, groups, expected, PARAMS)
        counters = drafting.engine.counters()
        assert counters["drafted_tokens"] > 0
    with llm(target_dir, draft_dir=draft_dir) as filler:  # Loaded, for others' sake.
        groups = filler.generate_all(prompts, PARAMS, STOP)
        check_same_groups(partial(load_reference, target_dir), prompts, groups, expected, PARAMS)


def test_pages_with_and_without_a_head_are_not_exchanged(
    target_dir: Path, draft_dir: Path, tmp_path: Path
) -> None:
    other = make_tiny_draft(tmp_path, target_dir, 99)
    namespaces, sizes = set(), []
    for directory in (None, draft_dir, other):
        with llm(target_dir, draft_dir=directory) as model:
            namespaces.add(model.engine._intake.namespace(""))
            sizes.append(model.engine.parts.info.page_bytes)
    assert len(namespaces) == 3
    assert sizes[1] == sizes[2] == sizes[0] * (LAYERS + 1) // LAYERS


def test_settings_that_cannot_be_are_refused(
    target_dir: Path, draft_dir: Path, eagle_dir: Path, tmp_path: Path
) -> None:
    for wrong, drafter in ((draft_dir, "eagle"), (eagle_dir, "eagle3")):
        with pytest.raises(ConfigError, match=f"drafter = {drafter}"):
            llm(target_dir, draft_dir=wrong, drafter=drafter)
    with pytest.raises(ConfigError, match="drafter"):
        EngineConfig(model_dir=target_dir, drafter="eagle3")
    with pytest.raises(ModelError, match=str(tmp_path)):
        llm(target_dir, draft_dir=tmp_path)


def test_requests_with_adapters_are_drafted_for(
    target_dir: Path, draft_dir: Path, tmp_path: Path, seed: int
) -> None:
    """In one batch with others; twice, the second time from cached pages of each adapter's own."""
    config = tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS)
    folders = [make_adapter(tmp_path / name, config, seed + i) for i, name in enumerate("ab")]
    length = 3 * PAGE + 3
    prompts = [[random.randrange(3, VOCAB) for _ in range(length)] for _ in range(6)]

    def run(model: LLM) -> list[list[int]]:
        adapters = [*(model.load_adapter(folder) for folder in folders), b""] * 2
        found = model.generate(prompts, PARAMS, STOP, adapters=adapters)
        again = model.generate(prompts, PARAMS, STOP, adapters=adapters)
        assert [sample.token_ids for sample in again] == [sample.token_ids for sample in found]
        return [sample.token_ids for sample in found]

    with llm(target_dir, enable_lora=True) as plain:
        expected = run(plain)
    texts = {
        (tuple(prompt), PARAMS.seed): prompt + ids
        for prompt, ids in zip(prompts, expected, strict=True)
    }
    drafts = {"draft_dir": draft_dir, "drafter": "eagle3", "draft_gate": "fixed"}
    with llm(target_dir, enable_lora=True, **drafts) as drafting:
        assert run(drafting) == expected
        assert drafting.engine.counters()["drafted_tokens"] > 0
        speculate(drafting.engine, KnownDrafter(texts, VOCAB, 0.6), (0, 1, 3))
        assert run(drafting) == expected
        assert drafting.engine.counters()["accepted_tokens"] > 0
