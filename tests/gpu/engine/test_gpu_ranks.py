"""Ranks on GPUs make the tokens of one GPU, and end together."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.contract.request import StopCriteria
from weft.testing.engine.eagle3_cases import check_chains
from weft.testing.engine.ranked_texts import (
    GREEDY,
    VOCAB,
    adapted_texts,
    check_texts,
    make_llm,
    make_model,
    random_prompts,
    ranked,
    texts_of,
)
from weft.testing.models.float32_reference import Ties, ties_of
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.int_models import LAYOUTS, SIZES, packed_models
from weft.testing.models.lora_reference import PeftModels
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.mxfp4_models import as_mxfp4
from weft.testing.models.quantised_models import quantised_copy
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_adapters import make_expert_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_mtp import make_cycle, make_tiny_mtp

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]

LIMIT_S = 3.0


@pytest.mark.parametrize(
    ("kind", "size", "ep"),
    [
        ("llama", 2, 1),
        ("qwen3_moe", 2, 1),
        ("qwen3_moe", 2, 2),
        ("llama", 4, 1),
        ("qwen3_moe", 4, 1),
        ("qwen3_moe", 4, 4),
    ],
)
def test_texts_are_those_of_one_rank(kind: str, size: int, ep: int, tmp_path: Path) -> None:
    folder = make_model(kind, tmp_path / "model")
    prompts = random_prompts((5, 90, 41, 177, 12, 63, 100, 33, 54))
    with make_llm(folder) as llm:
        alone = texts_of(llm, prompts)
    found = ranked("texts", folder, prompts, tp=size, ep=ep)
    assert any(f"{size} ranks" in notice for notice in found["notices"])
    for name in ("accepted_tokens", "prefix_hit_tokens"):
        assert found["counters"][name] > 0, name
    check_texts(found["texts"], alone)


def test_bfloat16_tokens_differ_from_float32_at_near_ties_only(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model")
    prompts = random_prompts((1, 30, 150, 64, 9, 200))
    found = ranked("texts", folder, prompts, tp=2, dtype="bfloat16", drafter="none")
    greedy = [one["tokens"] for one in found["texts"][2 * len(prompts) :][: len(prompts)]]
    ties_of(folder, prompts, greedy).check(is_moe=False)


@pytest.mark.parametrize(
    ("kind", "size", "ep"),
    [
        ("llama", 2, 1),
        ("qwen3_moe", 2, 1),
        ("qwen3_moe", 2, 2),
        ("llama", 4, 1),
        ("qwen3_moe", 4, 4),
    ],
)
def test_deterministic_results_are_the_same_bits_in_any_company(
    kind: str, size: int, ep: int, tmp_path: Path
) -> None:
    folder = make_model(kind, tmp_path / "model")
    prompts = random_prompts((1, 30, 150, 64, 9, 200))
    settings = {"drafter": "none", "prefix_cache": False, "deterministic": True}
    found = ranked("company", folder, prompts, tp=size, ep=ep, dtype="bfloat16", **settings)
    assert found["texts"][: len(prompts)] == found["texts"][len(prompts) :]


def make_of(name: str, folder: Path) -> tuple[Path, Path]:
    """A model in some format, and the same in floats."""
    seed, packed = random.randrange(1 << 30), folder / "packed"
    match name:
        case "fp8 blocks":
            sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
            sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
            source = make_tiny("qwen3_moe", folder / "tiny", seed, **sizes, num_experts=8)
            return fp8_copy(source, packed, "blocks")
        case "int4" | "int4 experts":
            kind = "llama" if name == "int4" else "qwen3_moe"
            experts = {} if name == "int4" else {"num_experts": 8}
            source = make_tiny(kind, folder / "tiny", seed, **SIZES, **experts)
            return packed_models(source, packed, LAYOUTS["compressed-tensors"])
        case _:
            heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
            sizes = {"hidden_size": 96, "intermediate_size": 64, "num_local_experts": 8}
            for path in (packed, folder / "floats"):
                fields = {**MOE_FAMILIES["gpt-oss"][1], **heads, **sizes}
                make_reference("gpt_oss", path, seed, **fields)
            as_mxfp4(packed, folder / "floats")
            return packed, folder / "floats"


@pytest.mark.parametrize(
    ("name", "ep"),
    [
        ("int4", 1),
        ("mxfp4", 1),
        ("mxfp4", 2),
        ("fp8 blocks", 1),
        ("fp8 blocks", 2),
        ("int4 experts", 2),
    ],
)
def test_bfloat16_tokens_of_formats(name: str, ep: int, tmp_path: Path) -> None:
    folder, floats = make_of(name, tmp_path)
    prompts = [[random.randrange(3, 250) for _ in range(n)] for n in (1, 30, 150, 64, 9, 70)]

    def ties(**settings: int) -> Ties:
        found = ranked("greedy", folder, prompts, dtype="bfloat16", drafter="none", **settings)
        return ties_of(floats, prompts, [one["tokens"] for one in found["texts"]])

    together = ties(tp=2, ep=ep)
    if name in ("int4", "mxfp4"):
        together.check(is_moe=name == "mxfp4")
        return
    # Where two experts are equally likely, rounding decides which one is asked. Here it does so in
    # more places than elsewhere, on one GPU too.
    alone = ties()
    assert together.num_far <= 2 * alone.num_far + 0.02 * together.num_tokens, (together, alone)


@pytest.mark.parametrize("ep", [1, 2])
def test_tokens_of_latents_are_those_of_one_gpu(ep: int, tmp_path: Path) -> None:
    kind, fields = MOE_FAMILIES["deepseek-v3"]
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 12}
    folder = tmp_path / "model"
    make_reference(kind, folder, random.randrange(1 << 30), **{**fields, **sizes})
    prompts = [[random.randrange(3, 250) for _ in range(n)] for n in (1, 30, 150, 64, 9, 70)]
    alone = ranked("greedy", folder, prompts, drafter="none")["texts"]
    together = ranked("greedy", folder, prompts, tp=2, ep=ep, drafter="none")["texts"]
    assert [one["tokens"] for one in together] == [one["tokens"] for one in alone]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(
            (kind, {"cuda_graphs": graphs})
            for kind, graphs in product(("latents", "heads"), (True, False))
        ),
        ("latents", {"cuda_graphs": False, "kv_dtype": "fp8_e4m3"}),
        ("heads", {"cuda_graphs": False, "kv_dtype": "int8"}),
    ],
)
def test_tokens_of_divided_pages_are_those_of_one_gpu(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """In chunks, after prefix hits that end within a page, and with drafts."""
    if kind == "latents":
        name, fields = MOE_FAMILIES["deepseek-v3"]
        sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 12}
        folder = tmp_path / "model"
        make_reference(name, folder, random.randrange(1 << 30), **{**fields, **sizes})
    else:
        folder = make_model("llama", tmp_path / "model", num_key_value_heads=1)
    prompts = [[random.randrange(3, 250) for _ in range(n)] for n in (1, 30, 150, 64, 9, 70)]
    prompts += [prompts[2][:101] + prompts[3][:20]]
    alone = ranked("greedy", folder, prompts, **settings)["texts"]
    together = ranked("greedy", folder, prompts, tp=2, dcp=2, **settings)["texts"]
    assert [one["tokens"] for one in together] == [one["tokens"] for one in alone]


def test_first_tokens_of_int8_are_as_probable_as_on_one_gpu(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "tiny", random.randrange(1 << 30), **SIZES)
    folder = quantised_copy(source, tmp_path / "int8")
    prompts = [[random.randrange(3, 250) for _ in range(n)] for n in (1, 30, 150, 64, 9, 70)]
    settings = {"dtype": "bfloat16", "drafter": "none"}
    alone, together = (
        [
            one["logprobs"][0]
            for one in ranked("greedy", folder, prompts, tp=tp, **settings)["texts"]
        ]
        for tp in (1, 2)
    )
    assert together == pytest.approx(alone, abs=0.2)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_tokens_from_pages_in_8_bits_are_as_probable_as_on_one_gpu(
    kv_dtype: str, tmp_path: Path
) -> None:
    folder, prompts = make_model("llama", tmp_path / "model"), random_prompts((1, 30, 150, 64, 200))
    settings = {"kv_dtype": kv_dtype, "drafter": "none"}
    alone, together = (
        ranked("greedy", folder, prompts, tp=tp, **settings)["texts"] for tp in (1, 2)
    )
    for one, other in zip(alone, together, strict=True):
        pairs = zip(one["tokens"], other["tokens"], strict=True)
        same = [mine == theirs for mine, theirs in pairs]
        # Behind another token, which roundings may choose where two are equally likely, others are.
        count = same.index(False) + 1 if False in same else len(same)
        assert other["logprobs"][:count] == pytest.approx(one["logprobs"][:count], abs=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_with_adapters_are_those_of_one_rank(dtype: str, tmp_path: Path) -> None:
    """More adapters than the device has room for; in float32 also PEFT's."""
    folder = make_model("llama", tmp_path / "model")
    models = PeftModels(folder, tmp_path)
    kinds = ({"r": 8}, {"r": 24, "target_modules": ["k_proj", "o_proj"]}, {"r": 5}, {"r": 64})
    for kind in kinds:
        models.add(random.randrange(1 << 30), **kind)
    folders = list(models.directories.values())
    prompts = random_prompts((5, 90, 41, 177, 12, 63, 100, 33, 54))
    settings = {"enable_lora": True, "max_loras": 2, "lora_memory_bytes": 8 << 20}
    settings |= {"dtype": dtype, "drafter": "none", "num_pages": 120}
    found = ranked("adapted", folder, prompts, folders, tp=2, **settings)["tokens"]
    names = [b"", *models.digests]
    of_rows = [names[row % len(names)] for row in range(len(prompts))]
    if dtype == "float32":
        with make_llm(folder, **settings) as llm:
            assert found == adapted_texts(llm, prompts, folders)
    for row in range(3):
        right = models.logits(of_rows[row], [*prompts[row], *found[row]])[len(prompts[row]) - 1 :]
        best = right[:-1].max(dim=1).values
        got = right[:-1].gather(1, torch.tensor(found[row])[:, None])[:, 0]
        near = 1e-3 if dtype == "float32" else 0.05
        assert bool((best - got <= near * right.abs().max()).all()), (row, best - got)


def test_tokens_with_adapters_of_experts_are_those_of_one_rank(tmp_path: Path) -> None:
    folder = make_model("qwen3_moe", tmp_path / "model")
    folders = [
        make_expert_adapter(
            tmp_path / f"a{rank}", folder, random.randrange(1 << 30), rank, is_shared=False
        )
        for rank in (8, 12)
    ]
    names = ("v", "experts", "router")
    settings = {"enable_lora": True, "max_loras": 2, "lora_projections": names}
    settings |= {"drafter": "none", "num_pages": 120}
    prompts = random_prompts((5, 90, 41, 177, 12, 63))
    with make_llm(folder, **settings) as llm:
        alone = adapted_texts(llm, prompts, folders)
    assert ranked("adapted", folder, prompts, folders, tp=2, **settings)["tokens"] == alone


def test_chains_of_divided_heads_are_the_heads(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    sizes = {"num_attention_heads": 8, "num_hidden_layers": 4, "head_dim": 64}
    folder = make_tiny("llama", tmp_path / "t", seed, vocab_size=VOCAB, tokenizer=True, **sizes)
    head = make_tiny_draft(tmp_path / "d", folder, seed + 1)
    prompts = random_prompts((5, 90, 41, 177, 12, 63))
    settings = {"drafter": "eagle3", "draft_dir": head, "tp": 2}
    found = ranked("drafted", folder, prompts, **settings)
    with make_llm(folder, drafter="none") as llm:
        stop = StopCriteria(max_tokens=40, ignore_eos=True)
        alone = [one.token_ids for one in llm.generate(prompts, GREEDY, stop)]
    assert found["tokens"] == alone
    noted = SimpleNamespace(chains=[(tokens, chain) for tokens, chain in found["chains"]])
    check_chains(noted, folder, head, allowed=1)
    # With drawn tokens, constraints, prefix hits and log-probabilities too.
    with make_llm(folder) as llm:
        expected = [one["tokens"] for one in texts_of(llm, prompts)]
    drafted = ranked("texts", folder, prompts, **settings)["texts"]
    assert [one["tokens"] for one in drafted] == expected


def test_drafts_of_a_divided_mtp_head_are_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    seed = random.randrange(1 << 30)
    make_tiny_mtp("glm", folder, seed)
    make_cycle(folder, seed)
    prompts = [[random.randrange(3, 250) for _ in range(count)] for count in (1, 30, 90, 17)]
    found = ranked("drafted", folder, prompts, drafter="mtp", tp=2)
    with make_llm(folder, drafter="none") as llm:
        stop = StopCriteria(max_tokens=40, ignore_eos=True)
        alone = [one.token_ids for one in llm.generate(prompts, GREEDY, stop)]
    assert found["tokens"] == alone
    counters = found["counters"]
    assert counters["accepted_tokens"] > counters["drafted_tokens"] / 4


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"tp": 2, "dcp": 2}, {"cp": 2}])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_lost_ends_the_engine_in_time(
    how: str, ranks: dict[str, int], tmp_path: Path
) -> None:
    folder = make_model("llama", tmp_path / "model", num_key_value_heads=1)
    # With as many pages as the memory has room for.
    settings = {"num_pages": None, "device_memory_share": 0.1, "rank_timeout_s": LIMIT_S}
    settings |= {"cp_least_tokens": 64, "drafter": "none"} if "cp" in ranks else {}
    found = ranked(how, folder, [], **ranks, **settings)
    assert found["error"].startswith("rank 1")
    assert {"killed": "signal 9", "stopped": "has not come"}[how] in found["error"]
    assert "step" in found["error"]
    assert found["seconds"] < LIMIT_S + 5
