"""Pages of ranks on GPUs travel between workers, and come back from tiers to all ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from weft.testing.engine.ranked_pages import PAGE, ranked_pages
from weft.testing.engine.ranked_texts import gpus_of_ranks
from weft.testing.engine.tier_bench import VOCAB
from weft.testing.models.families import make_family
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 8, "num_hidden_layers": 4, "head_dim": 64}
    seed = random.randrange(1 << 30)
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), seed, **sizes)


NIXL = pytest.mark.needs("nixl")


@pytest.mark.parametrize(
    ("transport", "staging", "owner", "filler", "has_head"),
    [
        ("data", "host", 2, 1, False),
        ("data", "host", 1, 2, True),
        pytest.param("nixl", "host", 2, 1, False, marks=NIXL),
        pytest.param("nixl", "device", 2, 1, True, marks=NIXL),
        pytest.param("nixl", "device", 1, 2, False, marks=NIXL),
    ],
)
def test_a_shipped_prompt_has_the_text_of_one_that_stays(
    transport: str,
    staging: str,
    owner: int,
    filler: int,
    has_head: bool,
    model_dir: Path,
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"transport": transport, "staging_memory": staging}
    if has_head:
        settings["draft_dir"] = make_tiny_draft(tmp_path, model_dir, random.randrange(1 << 30))
    # Both engines are in one process, which has one device of its own.
    devices = {1: "cuda:0", 2: gpus_of_ranks(2)}
    of_owner = {**settings, "tp": owner, "device": devices[owner]}
    of_filler = {**settings, "tp": filler, "device": devices[filler]}
    if has_head:
        of_owner["drafter"] = "eagle3"
    found = ranked_pages("shipped", model_dir, of_owner, of_filler)
    assert found["failures"] == ["", "", ""]
    assert found["tokens"] == [6 * PAGE] * 3
    assert found["shipped"] == found["alone"]


def test_pages_of_all_ranks_come_back_from_host_memory_and_disk(model_dir: Path) -> None:
    found = ranked_pages("tiers", model_dir, {"tp": 2, "device": gpus_of_ranks(2)})
    assert found["again"] == found["alone"]
    assert found["corrupt"] == 0
    assert sum(found["loaded"]) > 0


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_next"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {"vocab_size": VOCAB, "max_position_embeddings": 1024}
    path = tmp_path_factory.mktemp("hybrid") / "model"
    return make_family(request.param, path, random.randrange(1 << 30), **fields)


OF_STATES = {"checkpoint_tokens": 4 * PAGE}


@pytest.mark.parametrize(
    ("transport", "staging", "owner", "filler"),
    [
        ("data", "host", 2, 1),
        pytest.param("nixl", "host", 1, 2, marks=NIXL),
        pytest.param("nixl", "device", 2, 1, marks=NIXL),
    ],
)
def test_states_are_shipped_with_the_pages_before_them(
    transport: str, staging: str, owner: int, filler: int, hybrid: Path
) -> None:
    settings = {"transport": transport, "staging_memory": staging, **OF_STATES}
    devices = {1: "cuda:0", 2: gpus_of_ranks(2)}
    sides = ({**settings, "tp": size, "device": devices[size]} for size in (owner, filler))
    found = ranked_pages("shipped", hybrid, *sides)
    assert found["failures"] == ["", "", ""]
    assert found["tokens"] == [6 * PAGE] * 3
    assert found["shipped"] == found["alone"]


def test_states_of_all_ranks_come_back_from_tiers(hybrid: Path) -> None:
    found = ranked_pages("tiers", hybrid, {"tp": 2, "device": gpus_of_ranks(2), **OF_STATES})
    assert found["again"] == found["alone"]
    assert found["corrupt"] == 0
    assert sum(found["loaded"]) > 0
