"""Two stages of two ranks each, on GPUs of one host and of two, which are processes of this
machine, make the tokens of one GPU. On two GPUs each has a rank of both stages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weft.testing.engine.eagle3_cases import check_chains
from weft.testing.engine.other_hosts import other_hosts
from weft.testing.engine.ranked_texts import (
    adapted_texts,
    check_texts,
    gpus_of_ranks,
    make_llm,
    make_model,
    random_prompts,
    ranked,
    texts_of,
)
from weft.testing.models.float32_reference import Ties, ties_of
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.lora_reference import PeftModels
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]

SIZES: dict[str, Any] = {"drafter": "none", "num_pages": 90}
LENGTHS = 5, 90, 41, 177, 12, 63, 100, 33, 54
LIMIT_S = 3.0


@contextmanager
def ranks_of(folder: Path, hosts: int) -> Iterator[dict[str, Any]]:
    """Settings of two stages of two ranks."""
    if hosts == 1:
        yield {"pp": 2, "tp": 2, "device": gpus_of_ranks(4)}
        return
    with other_hosts(folder, 2, devices=[gpus_of_ranks(2)] * 2, tp=2) as settings:
        yield settings


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("llama", {}),
        ("llama", {"cuda_graphs": False, "drafter": "ngram"}),
        ("llama", {"drafter": "ngram", "num_pages": None, "device_memory_share": 0.1}),
        ("qwen3_moe", {"drafter": "ngram", "ep": 2}),
    ],
)
def test_texts_are_those_of_one_gpu(
    kind: str, own: dict[str, Any], hosts: int, tmp_path: Path
) -> None:
    """With prompts in chunks, prefix hits, constraints, and too few pages for all."""
    folder = make_model(kind, tmp_path / "model")
    prompts = random_prompts(LENGTHS)
    with make_llm(folder, device="cuda:0", **SIZES) as llm:
        alone = texts_of(llm, prompts)
    with ranks_of(folder, hosts) as settings:
        found = ranked("texts", folder, prompts, **SIZES | settings | own)
    assert any("2 stages" in notice for notice in found["notices"])
    assert found["counters"]["prefix_hit_tokens"] > 0
    check_texts(found["texts"], alone)


@pytest.mark.parametrize("hosts", [1, 2])
def test_bfloat16_tokens_of_weights_in_fp8(hosts: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    source = make_tiny("llama", tmp_path / "tiny", seed, **sizes, **heads)
    folder, floats = fp8_copy(source, tmp_path / "packed", "blocks")
    prompts = [[random.randrange(3, 250) for _ in range(n)] for n in (1, 30, 150, 64, 9, 70)]

    def ties(**settings: Any) -> Ties:
        found = ranked("greedy", folder, prompts, dtype="bfloat16", drafter="none", **settings)
        return ties_of(floats, prompts, [one["tokens"] for one in found["texts"]])

    with ranks_of(folder, hosts) as settings:
        together = ties(**settings)
    alone = ties()
    assert together.num_far <= 2 * alone.num_far + 0.02 * together.num_tokens, (together, alone)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_drafts_of_a_divided_head_are_the_heads(
    cuda_graphs: bool, hosts: int, tmp_path: Path
) -> None:
    """Of an EAGLE-3 head that reads layers of both stages."""
    folder = make_model("llama", tmp_path / "model", num_hidden_layers=4)
    directory = make_tiny_draft(tmp_path / "head", folder, random.randrange(1 << 30))
    head = {"drafter": "eagle3", "draft_dir": directory, "cuda_graphs": cuda_graphs}
    prompts = random_prompts((5, 90, 41, 177, 12, 63))
    with make_llm(folder, device="cuda:0", **SIZES) as llm:
        alone = texts_of(llm, prompts)
    with ranks_of(folder, hosts) as settings:
        found = ranked("drafted-texts", folder, prompts, **SIZES | settings | head)
    noted = SimpleNamespace(chains=[(tokens, chain) for tokens, chain in found["chains"]])
    check_chains(noted, folder, directory, allowed=1)
    check_texts(found["texts"], alone)


def test_tokens_with_adapters_are_those_of_one_gpu(tmp_path: Path) -> None:
    """More adapters than the devices have room for."""
    folder = make_model("llama", tmp_path / "model")
    models = PeftModels(folder, tmp_path)
    for kind in ({"r": 8}, {"r": 24, "target_modules": ["k_proj", "o_proj"]}, {"r": 5}):
        models.add(random.randrange(1 << 30), **kind)
    folders, prompts = list(models.directories.values()), random_prompts(LENGTHS)
    settings = {"enable_lora": True, "max_loras": 2, "lora_memory_bytes": 8 << 20}
    settings |= SIZES | {"num_pages": 120}
    found = ranked("adapted", folder, prompts, folders, tp=2, pp=2, **settings)["tokens"]
    with make_llm(folder, device="cuda:0", **settings) as llm:
        assert found == adapted_texts(llm, prompts, folders)


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_that_is_lost_ends_the_engine_in_time(how: str, hosts: int, tmp_path: Path) -> None:
    """The last rank of the first stage, or the second rank of host 0."""
    folder = make_model("llama", tmp_path / "model")
    with ranks_of(folder, hosts) as settings:
        found = ranked(how, folder, [], **SIZES | settings | {"rank_timeout_s": LIMIT_S})
    assert "rank" in found["error"]
    assert {"killed": "signal 9", "stopped": "within"}[how] in found["error"]
    assert found["seconds"] < LIMIT_S + 5
