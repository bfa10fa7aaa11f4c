"""Whole experts on ranks with GPUs, with adapters and draft heads: the tokens of one GPU.

Ranks may have the same GPU, which they then use in turns.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d
from weft.contract.request import StopCriteria
from weft.testing.engine.ranked_texts import (
    GREEDY,
    VOCAB,
    adapted_texts,
    greedy_texts,
    make_llm,
    ranked,
)
from weft.testing.models.tiny_adapters import make_expert_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_mtp import make_cycle, make_tiny_mtp

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of two ranks."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    count = torch.cuda.device_count()
    return {"tp": 2, "ep": 2, "device": ",".join(f"cuda:{rank % count}" for rank in range(2))}


def make_model(folder: Path) -> Path:
    sizes = {"num_attention_heads": 8, "moe_intermediate_size": 64, "head_dim": 64}
    sizes |= {"num_experts": 8, "num_hidden_layers": 4, "vocab_size": VOCAB}
    return make_tiny("qwen3_moe", folder, random.randrange(1 << 30), tokenizer=True, **sizes)


def random_prompts() -> list[list[int]]:
    lengths = (5, 90, 41, 177, 12, 63)
    return [[random.randrange(3, 250) for _ in range(length)] for length in lengths]


def texts_of_one(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    stop = StopCriteria(max_tokens=40, ignore_eos=True)
    with make_llm(folder, drafter="none") as llm:
        return [one.token_ids for one in llm.generate(prompts, GREEDY, stop)]


def test_the_link_of_gpus_is_named() -> None:
    from weft.engine.parallel.device_peers import link_of

    count = torch.cuda.device_count()
    assert link_of([0, 0]) == "which is one GPU's"
    if count > 1:
        assert link_of(range(count)) in ("over NVLink", "over PCIe")
    # What it is told by is there on a machine with one GPU too.
    assert _distributed_c10d._detect_dma_connectivity(  # type: ignore[attr-defined]
        torch._C._autograd.DeviceType.CUDA, "nvlink"
    ).matrix


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_tokens_while_experts_move(
    cuda_graphs: bool, divided: dict[str, Any], tmp_path: Path
) -> None:
    folder, prompts = make_model(tmp_path / "model"), random_prompts()
    with make_llm(folder, drafter="none") as llm:
        right = [one["tokens"] for one in greedy_texts(llm, prompts)]
    divided |= {"balance_experts": "order", "redundant_experts": 2, "cuda_graphs": cuda_graphs}
    found = ranked("moved", folder, prompts, drafter="none", **divided)["texts"]
    for number, one in enumerate(found):
        assert one["tokens"] == right[number % len(right)]


@pytest.mark.parametrize("is_shared", [False, True])
def test_tokens_with_adapters_of_experts(
    is_shared: bool, divided: dict[str, Any], tmp_path: Path
) -> None:
    folder, prompts = make_model(tmp_path / "model"), random_prompts()
    folders = [
        make_expert_adapter(
            tmp_path / f"a{rank}", folder, random.randrange(1 << 30), rank, is_shared=is_shared
        )
        for rank in (8, 12)
    ]
    names = ("q", "v", "o", "shared_experts" if is_shared else "experts", "router")
    settings = {"enable_lora": True, "max_loras": 2, "lora_projections": names}
    settings |= {"drafter": "none", "num_pages": 120}
    with make_llm(folder, **settings) as llm:
        alone = adapted_texts(llm, prompts, folders)
    assert ranked("adapted", folder, prompts, folders, **divided, **settings)["tokens"] == alone


def test_tokens_with_an_eagle_head(divided: dict[str, Any], tmp_path: Path) -> None:
    folder, prompts = make_model(tmp_path / "model"), random_prompts()
    head = make_tiny_draft(tmp_path / "head", folder, random.randrange(1 << 30))
    settings = {"drafter": "eagle3", "draft_dir": head}
    found = ranked("drafted", folder, prompts, **divided, **settings)
    assert found["tokens"] == texts_of_one(folder, prompts)
    assert found["counters"]["drafted_tokens"] > 0


def test_drafts_of_an_mtp_head_with_experts_are_accepted(
    divided: dict[str, Any], tmp_path: Path
) -> None:
    folder, prompts, seed = tmp_path / "model", random_prompts(), random.randrange(1 << 30)
    make_tiny_mtp("glm", folder, seed, n_routed_experts=8)
    make_cycle(folder, seed)
    found = ranked("drafted", folder, prompts, drafter="mtp", **divided)
    assert found["tokens"] == texts_of_one(folder, prompts)
    counters = found["counters"]
    assert counters["accepted_tokens"] > counters["drafted_tokens"] / 4
