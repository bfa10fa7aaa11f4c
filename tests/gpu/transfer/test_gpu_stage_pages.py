"""Pages of stages on GPUs travel between workers, and come back from tiers and stores to all
stages.
"""

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

NIXL = pytest.mark.needs("nixl")
WAYS = [
    ("data", "host", True),
    ("data", "host", False),
    pytest.param("nixl", "host", True, marks=NIXL),
    pytest.param("nixl", "device", True, marks=NIXL),
    pytest.param("nixl", "device", False, marks=NIXL),
]
"""How pages travel, where they are staged, and whether the owner has the stages, or the filler."""


def stages(tp: int = 1) -> dict[str, Any]:
    return {"pp": 2, "tp": tp, "device": gpus_of_ranks(2 * tp)}


@pytest.fixture(scope="module", params=[4, 5])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With five layers the stages have pools of different sizes."""
    sizes = {"num_attention_heads": 8, "num_hidden_layers": request.param, "head_dim": 64}
    seed = random.randrange(1 << 30)
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), seed, **sizes)


def check_shipped(
    folder: Path,
    transport: str,
    staging: str,
    owns: bool,
    head: Path | None = None,
    tp: int = 1,
    **settings: Any,
) -> None:
    """Texts of prompts that a filler computes are those of prompts that stay with their owner."""
    settings |= {"transport": transport, "staging_memory": staging, "draft_dir": head}
    one, two = settings | {"device": "cuda:0"}, settings | stages(tp)
    owner, filler = (two, one) if owns else (one, two)
    if head is not None:
        owner["drafter"] = "eagle3"
    found = ranked_pages("shipped", folder, owner, filler)
    assert found["failures"] == ["", "", ""]
    assert found["tokens"] == [6 * PAGE] * 3
    assert found["shipped"] == found["alone"]
    assert found["after"] == found["longer"]


@pytest.mark.parametrize(("transport", "staging", "owns"), WAYS)
def test_a_shipped_prompt_has_the_text_of_one_that_stays(
    transport: str, staging: str, owns: bool, model_dir: Path
) -> None:
    check_shipped(model_dir, transport, staging, owns)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(("transport", "staging", "owns"), WAYS[:3])
def test_a_prompt_is_shipped_to_and_from_stages_of_two_ranks(
    transport: str, staging: str, owns: bool, kv_heads: int, tmp_path: Path
) -> None:
    """Ranks of a stage have different heads, or copies of one."""
    sizes = {"num_attention_heads": 8, "num_hidden_layers": 5, "head_dim": 64}
    seed = random.randrange(1 << 30)
    folder = make_tiny("llama", tmp_path, seed, num_key_value_heads=kv_heads, **sizes)
    check_shipped(folder, transport, staging, owns, tp=2)


def test_pages_of_stages_of_two_ranks_come_back_from_host_memory_and_disk(
    model_dir: Path,
) -> None:
    check_tiers(ranked_pages("tiers", model_dir, stages(tp=2)))


@pytest.mark.parametrize("owns", [True, False])
def test_pages_with_entries_of_a_draft_head_are_shipped(owns: bool, tmp_path: Path) -> None:
    seed, sizes = random.randrange(1 << 30), {"num_hidden_layers": 4, "head_dim": 64}
    folder = make_tiny("llama", tmp_path / "model", seed, **sizes)
    head = make_tiny_draft(tmp_path / "head", folder, seed + 1)
    check_shipped(folder, "data", "host", owns, head)


def make_hybrid(folder: Path) -> Path:
    """A model with layers of both kinds in each stage."""
    fields = {"vocab_size": VOCAB, "max_position_embeddings": 1024}
    seed = random.randrange(1 << 30)
    return make_family("nemotron_h", folder, seed, hybrid_override_pattern="M*M-M-M*", **fields)


@pytest.mark.parametrize("owns", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_pages_and_states_of_a_hybrid_are_shipped(tp: int, owns: bool, tmp_path: Path) -> None:
    folder = make_hybrid(tmp_path / "model")
    check_shipped(folder, "data", "host", owns, tp=tp, checkpoint_tokens=4 * PAGE)


def test_pages_and_states_of_a_hybrid_come_back_from_tiers(tmp_path: Path) -> None:
    settings = stages() | {"checkpoint_tokens": 4 * PAGE}
    check_tiers(ranked_pages("tiers", make_hybrid(tmp_path / "model"), settings))


def test_pages_of_latents_are_shipped(tmp_path: Path) -> None:
    """They have one head, so each stage has one range of a page."""
    kind, fields = MOE_FAMILIES["deepseek-v3"]
    folder = tmp_path / "model"
    make_reference(kind, folder, random.randrange(1 << 30), vocab_size=VOCAB, **fields)
    check_shipped(folder, "data", "host", True)


def check_tiers(found: dict[str, Any]) -> None:
    assert found["again"] == found["alone"]
    assert found["after"] == found["longer"]
    assert found["corrupt"] == 0
    assert sum(found["loaded"]) > 0


def test_pages_of_all_stages_come_back_from_host_memory_and_disk(model_dir: Path) -> None:
    check_tiers(ranked_pages("tiers", model_dir, stages()))


def test_pages_of_all_stages_come_back_from_a_kv_store(model_dir: Path) -> None:
    found = ranked_pages("stored", model_dir, stages())
    assert found["again"] == found["alone"]
    assert found["sources"] == ["kvstore"] * 2
