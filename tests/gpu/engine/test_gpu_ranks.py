"""Ranks with a GPU each make the tokens of one GPU, and end together."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from weft.testing.engine.ranked_texts import VOCAB, make_llm, ranked, texts_of
from weft.testing.models.float32_reference import ties_of
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.int_models import LAYOUTS, SIZES, packed_models
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.mxfp4_models import as_mxfp4
from weft.testing.models.quantised_models import quantised_copy
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]

LIMIT_S = 3.0


def needs_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"cuda: {torch.cuda.device_count()} GPUs, of which this needs {count}")


def make_model(kind: str, folder: Path) -> Path:
    sizes = {"num_attention_heads": 8, "moe_intermediate_size": 64, "head_dim": 64}
    sizes |= {"num_experts": 8} if kind == "qwen3_moe" else {}
    seed = random.randrange(1 << 30)
    return make_tiny(kind, folder, seed, tokenizer=True, vocab_size=VOCAB, **sizes)


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    shared = [random.randrange(3, VOCAB) for _ in range(40)]
    return [(shared + [random.randrange(3, VOCAB) for _ in range(n)])[-n:] for n in lengths]


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
    needs_gpus(size)
    folder = make_model(kind, tmp_path / "model")
    prompts = random_prompts((5, 90, 41, 177, 12, 63, 100, 33, 54))
    with make_llm(folder) as llm:
        alone = texts_of(llm, prompts)
    found = ranked("texts", folder, prompts, tp=size, ep=ep)
    assert any(f"{size} ranks" in notice for notice in found["notices"])
    for name in ("accepted_tokens", "prefix_hit_tokens"):
        assert found["counters"][name] > 0, name
    for one, other in zip(alone, found["texts"], strict=True):
        assert other["tokens"] == one["tokens"]
        assert other["reason"] == one["reason"]
        assert other["logprobs"] == pytest.approx(one["logprobs"], abs=1e-3)


def test_bfloat16_tokens_differ_from_float32_at_near_ties_only(tmp_path: Path) -> None:
    needs_gpus(2)
    folder = make_model("llama", tmp_path / "model")
    prompts = random_prompts((1, 30, 150, 64, 9, 200))
    found = ranked("texts", folder, prompts, tp=2, dtype="bfloat16", drafter="none")
    greedy = [one["tokens"] for one in found["texts"][2 * len(prompts) :][: len(prompts)]]
    ties_of(folder, prompts, greedy).check(is_moe=False)


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
    needs_gpus(2)
    folder, floats = make_of(name, tmp_path)
    prompts = [[random.randrange(3, 250) for _ in range(n)] for n in (1, 30, 150, 64, 9, 70)]
    found = ranked("greedy", folder, prompts, tp=2, ep=ep, dtype="bfloat16", drafter="none")
    ties = ties_of(floats, prompts, [one["tokens"] for one in found["texts"]])
    # Where two experts are equally likely, rounding decides which one is asked.
    assert ties.num_far <= (0 if name == "int4" else 0.1 * ties.num_tokens), ties


@pytest.mark.parametrize("ep", [1, 2])
def test_tokens_of_latents_are_those_of_one_gpu(ep: int, tmp_path: Path) -> None:
    needs_gpus(2)
    kind, fields = MOE_FAMILIES["deepseek-v3"]
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 12}
    folder = tmp_path / "model"
    make_reference(kind, folder, random.randrange(1 << 30), **{**fields, **sizes})
    prompts = [[random.randrange(3, 250) for _ in range(n)] for n in (1, 30, 150, 64, 9, 70)]
    alone = ranked("greedy", folder, prompts, drafter="none")["texts"]
    together = ranked("greedy", folder, prompts, tp=2, ep=ep, drafter="none")["texts"]
    assert [one["tokens"] for one in together] == [one["tokens"] for one in alone]


def test_first_tokens_of_int8_are_as_probable_as_on_one_gpu(tmp_path: Path) -> None:
    needs_gpus(2)
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


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_lost_ends_the_engine_in_time(how: str, tmp_path: Path) -> None:
    needs_gpus(2)
    folder = make_model("llama", tmp_path / "model")
    # With as many pages as the memory has room for.
    settings = {"num_pages": None, "device_memory_share": 0.1, "rank_timeout_s": LIMIT_S}
    found = ranked(how, folder, [], tp=2, **settings)
    assert found["error"].startswith("rank 1")
    assert {"killed": "signal 9", "stopped": "has not come"}[how] in found["error"]
    assert "step" in found["error"]
    assert found["seconds"] < LIMIT_S + 5
