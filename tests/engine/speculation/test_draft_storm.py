"""Drafts in a storm of random cancels, pre-emptions, fills and faults: no page and no text is lost.

Three ways of drafting: n-grams of the text so far, a head whose drafts follow from what the host
knows, and drafts behind steps whose outcome only the device knows; of a head chains, and trees.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from weft.engine.base.drafts import tree_shapes
from weft.engine.loop.engine import Engine
from weft.testing.engine.draft_storm import check_storm, draft_storm, known_of, samplings_of
from weft.testing.engine.drafters import KnownDrafter, KnownGraphs, RandomGate
from weft.testing.engine.eagle3_cases import (
    HeadReference,
    PublishedEntries,
    WatchedHead,
    check_chains,
)
from weft.testing.engine.engine_storm import Storm
from weft.testing.engine.tree_drafters import KnownTreeGraphs, TreeDrafter, WatchedTrees
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

VOCAB = 517
NUM_NEW = 30
REPEATED = {5: 100.0, 6: 100.0, 7: 100.0}
"""A bias: texts of three tokens, whose runs come again."""
COUNTS = pytest.mark.parametrize("count", [120, pytest.param(3000, marks=pytest.mark.full)])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    path = tmp_path_factory.mktemp("t")
    return make_tiny("llama", path, seed, vocab_size=VOCAB, num_hidden_layers=4)


@pytest.fixture(scope="module")
def draft_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("d"), model_dir, seed + 1)


def flip_depths(engine: Engine) -> None:
    engine.scheduler.running_plans.gate = RandomGate((0, 1, 2, 3, 5))


def check_entries(storm: Storm, published: PublishedEntries, reference: HeadReference) -> None:
    """What is left in the owner's cache is what the head makes of the texts, run at once."""
    num_pages = 0
    for text in storm.texts:
        for sample in text.samples:
            num_pages += published.check([*text.prompt, *sample], reference)
    assert num_pages > 0


@COUNTS
def test_ngram_drafts(model_dir: Path, count: int) -> None:
    overlap = random.choice(["off", "on"])
    samplings = samplings_of((0.0, 1.0), logit_bias=REPEATED)
    storm = draft_storm(model_dir, samplings, NUM_NEW, overlap=overlap, drafter="ngram")
    try:
        flip_depths(storm.owner)
        check_storm(storm, count)
    finally:
        storm.close()


@COUNTS
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_drafts_of_a_head(model_dir: Path, draft_dir: Path, overlap: str, count: int) -> None:
    """Whatever happened to a request, its drafts are those of the head for its text."""
    settings: dict[str, Any] = {"overlap": overlap, "drafter": "eagle3", "draft_dir": draft_dir}
    tier = random.choice(({}, {"host_cache_bytes": 200 << 10, "load_back_threshold": 0}))
    print(f"tier {tier}")
    settings |= tier
    storm = draft_storm(model_dir, samplings_of((0.0, 1.0)), NUM_NEW, **settings)
    try:
        published = PublishedEntries(storm.owner)
        watched = WatchedHead(storm.owner, KnownDrafter(known_of(storm.texts), VOCAB, 0.6))
        check_storm(storm, count)
        check_entries(storm, published, HeadReference(model_dir, draft_dir))
    finally:
        storm.close()
    check_chains(watched, model_dir, draft_dir)


@COUNTS
def test_drafts_behind_steps_under_way(model_dir: Path, draft_dir: Path, count: int) -> None:
    """Requests leave, and others take their slots and pages, while steps of theirs that verify
    drafts are still to come."""
    settings: dict[str, Any] = {"overlap": "on", "drafter": "eagle3", "draft_dir": draft_dir}
    storm = draft_storm(model_dir, samplings_of((0.0,)), NUM_NEW, **settings)
    try:
        published = PublishedEntries(storm.owner)
        graphs = KnownGraphs(storm.owner, known_of(storm.texts), VOCAB, 0.7)
        check_storm(storm, count)
        assert graphs.num_late > count
        check_entries(storm, published, HeadReference(model_dir, draft_dir))
    finally:
        storm.close()


@COUNTS
def test_trees_of_a_head(model_dir: Path, draft_dir: Path, count: int) -> None:
    settings: dict[str, Any] = {"drafter": "eagle3", "draft_width": 4, "draft_dir": draft_dir}
    settings["overlap"] = random.choice(["off", "on"])
    storm = draft_storm(model_dir, samplings_of((0.0, 1.0)), NUM_NEW, **settings)
    reference = HeadReference(model_dir, draft_dir)
    try:
        published = PublishedEntries(storm.owner)
        watched = WatchedTrees(storm.owner, TreeDrafter(known_of(storm.texts), VOCAB, 0.6))
        check_storm(storm, count)
        check_entries(storm, published, reference)
    finally:
        storm.close()
    watched.check(reference, 4)


@COUNTS
def test_trees_behind_steps_under_way(model_dir: Path, draft_dir: Path, count: int) -> None:
    settings: dict[str, Any] = {"drafter": "eagle3", "draft_width": 4, "draft_dir": draft_dir}
    storm = draft_storm(model_dir, samplings_of((0.0,)), NUM_NEW, overlap="on", **settings)
    try:
        published = PublishedEntries(storm.owner)
        texts = known_of(storm.texts)
        KnownGraphs(storm.owner, texts, VOCAB, 0.7)
        trees = KnownTreeGraphs(storm.owner, texts, VOCAB, 0.7)
        gate = RandomGate((0, 3, *tree_shapes(4)))
        storm.owner.scheduler.running_plans.gate = gate
        check_storm(storm, count)
        assert trees.num_late > count // 4
        check_entries(storm, published, HeadReference(model_dir, draft_dir))
    finally:
        storm.close()
