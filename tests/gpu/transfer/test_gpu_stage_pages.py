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
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import make_reference
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


def stages() -> dict[str, Any]:
    return {"pp": 2, "device": gpus_of_ranks(2)}


@pytest.fixture(scope="module", params=[4, 5])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With five layers the stages have pools of different sizes."""
    sizes = {"num_attention_heads": 8, "num_hidden_layers": request.param, "head_dim": 64}
    seed = random.randrange(1 << 30)
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), seed, **sizes)


def check_shipped(folder: Path, transport: str, staging: str, owns: bool) -> None:
    """Texts of prompts that a filler computes are those of prompts that stay with their owner."""
    settings = {"transport": transport, "staging_memory": staging}
    one, two = settings | {"device": "cuda:0"}, settings | stages()
    found = ranked_pages("shipped", folder, *((two, one) if owns else (one, two)))
    assert found["failures"] == ["", "", ""]
    assert found["tokens"] == [6 * PAGE] * 3
    assert found["shipped"] == found["alone"]
    assert found["after"] == found["longer"]


@pytest.mark.parametrize(("transport", "staging", "owns"), WAYS)
def test_a_shipped_prompt_has_the_text_of_one_that_stays(
    transport: str, staging: str, owns: bool, model_dir: Path
) -> None:
    check_shipped(model_dir, transport, staging, owns)


def test_pages_of_latents_are_shipped(tmp_path: Path) -> None:
    """They have one head, so each stage has one range of a page."""
    kind, fields = MOE_FAMILIES["deepseek-v3"]
    folder = tmp_path / "model"
    make_reference(kind, folder, random.randrange(1 << 30), vocab_size=VOCAB, **fields)
    check_shipped(folder, "data", "host", True)


def test_pages_of_all_stages_come_back_from_host_memory_and_disk(model_dir: Path) -> None:
    found = ranked_pages("tiers", model_dir, stages())
    assert found["again"] == found["alone"]
    assert found["after"] == found["longer"]
    assert found["corrupt"] == 0
    assert sum(found["loaded"]) > 0


def test_pages_of_all_stages_come_back_from_a_kv_store(model_dir: Path) -> None:
    found = ranked_pages("stored", model_dir, stages())
    assert found["again"] == found["alone"]
    assert found["sources"] == ["kvstore"] * 2
