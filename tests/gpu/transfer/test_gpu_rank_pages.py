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
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import make_reference
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
    check_shipped(ranked_pages("shipped", model_dir, of_owner, of_filler))


def check_shipped(found: dict[str, Any]) -> None:
    """All pages came, and both their texts and those of prompts after them are right."""
    assert found["failures"] == ["", "", ""]
    assert found["tokens"] == [6 * PAGE] * 3
    assert found["shipped"] == found["alone"]
    assert found["after"] == found["longer"]


def check_tiers(found: dict[str, Any]) -> None:
    """Pages came back from tiers as they went there, to all ranks."""
    assert found["again"] == found["alone"]
    assert found["after"] == found["longer"]
    assert found["corrupt"] == 0
    assert sum(found["loaded"]) > 0


def test_pages_of_all_ranks_come_back_from_host_memory_and_disk(model_dir: Path) -> None:
    check_tiers(ranked_pages("tiers", model_dir, {"tp": 2, "device": gpus_of_ranks(2)}))


PLAIN: dict[str, Any] = {}
DIVIDED = {"tp": 2, "dcp": 2}
DIVIDES_PROMPTS = {"cp": 2, "cp_least_tokens": 64, "prefill_chunk_tokens": 8 * PAGE}


def placed(settings: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Settings of an engine on one GPU, or with two ranks."""
    device = "cuda:0" if settings == PLAIN else gpus_of_ranks(2)
    return {"device": device, "cuda_graphs": False, **settings, **others}


@pytest.fixture(scope="module", params=["latents", "one KV head"])
def same_heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of whose KV heads all ranks have the same."""
    path, seed = tmp_path_factory.mktemp("same") / "model", random.randrange(1 << 30)
    if request.param == "latents":
        kind, fields = MOE_FAMILIES["deepseek-v3"]
        sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 12}
        sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 1024}
        make_reference(kind, path, seed, **{**fields, **sizes})
        return path
    sizes = {"num_attention_heads": 8, "num_hidden_layers": 4, "head_dim": 64}
    return make_tiny("llama", path, seed, num_key_value_heads=1, **sizes)


@pytest.mark.parametrize(
    ("transport", "owner", "filler"),
    [
        ("data", DIVIDED, PLAIN),
        ("data", PLAIN, DIVIDED),
        pytest.param("nixl", DIVIDED, PLAIN, marks=NIXL),
        pytest.param("nixl", PLAIN, DIVIDED, marks=NIXL),
    ],
)
def test_pages_that_ranks_divide_are_shipped(
    transport: str, owner: dict[str, Any], filler: dict[str, Any], same_heads: Path
) -> None:
    sides = (placed(one, transport=transport) for one in (owner, filler))
    check_shipped(ranked_pages("shipped", same_heads, *sides))


def test_pages_that_ranks_divide_come_back_from_tiers(same_heads: Path) -> None:
    check_tiers(ranked_pages("tiers", same_heads, placed(DIVIDED)))


@pytest.mark.parametrize("transport", ["data", pytest.param("nixl", marks=NIXL)])
def test_ranks_that_divide_prompts_all_get_the_pages_that_are_shipped(
    transport: str, model_dir: Path
) -> None:
    sides = (placed(one, transport=transport) for one in (DIVIDES_PROMPTS, PLAIN))
    check_shipped(ranked_pages("shipped", model_dir, *sides))


def test_ranks_that_divide_prompts_all_get_the_pages_of_tiers(model_dir: Path) -> None:
    check_tiers(ranked_pages("tiers", model_dir, placed(DIVIDES_PROMPTS)))


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
    check_shipped(ranked_pages("shipped", hybrid, *sides))


def test_states_of_all_ranks_come_back_from_tiers(hybrid: Path) -> None:
    check_tiers(ranked_pages("tiers", hybrid, {"tp": 2, "device": gpus_of_ranks(2), **OF_STATES}))
