"""Families with experts against transformers, in float32: whole, in chunks, and from the cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from weft.engine.base.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.lora_reference import BASE, PeftModels
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.reference_models import VOCAB, make_reference

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
NUM_NEW = 16
MOE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
LOCAL = {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 44}
DEEPSEEK = {
    "head_dim": None, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 20, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
    "n_shared_experts": 2, "n_routed_experts": 7, "first_k_dense_replace": 1,
    "num_key_value_heads": 6,
}  # fmt: skip
GLM = {
    "n_routed_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
    "n_shared_experts": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", LOCAL),
    "qwen2-moe": (
        "qwen2_moe",
        {**MOE, "head_dim": None, "num_hidden_layers": 4, "shared_expert_intermediate_size": 60,
         "decoder_sparse_step": 2, "hidden_size": 144},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "n_routed_experts": 8,
         "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5},
    ),
    "deepseek-v2-lite": ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": "none"}),
    "deepseek-v3": (
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": 40, "n_group": 3, "topk_group": 2, "n_routed_experts": 9,
         "routed_scaling_factor": 2.5, "num_hidden_layers": 4, "first_k_dense_replace": 2,
         "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.9,
                             "mscale_all_dim": 0.7, "original_max_position_embeddings": 128}},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", {**DEEPSEEK, "q_lora_rank": 40, "n_routed_experts": 6}),
    "gpt-oss": (
        "gpt_oss",
        {**LOCAL, "sliding_window": 20, "num_hidden_layers": 4, "max_position_embeddings": 512,
         "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                             "original_max_position_embeddings": 128}},
    ),
    "glm4-moe": (
        "glm4_moe",
        {**GLM, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1},
    ),
    "dots1": ("dots1", {**GLM, "n_group": 3, "topk_group": 2, "norm_topk_prob": True,
                        "sliding_window": 20, "max_window_layers": 2}),
    "minimax-m2": (
        "minimax_m2",
        {**LOCAL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                      "partial_rotary_factor": 0.5}},
    ),
    "olmoe": ("olmoe", {**MOE, "intermediate_size": 44, "head_dim": None}),
    "ernie": (
        "ernie4_5_moe",
        {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 44, "num_hidden_layers": 4,
         "moe_layer_end_index": 2},
    ),
    "granite-moe": (
        "granitemoe",
        {**LOCAL, "head_dim": None, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
         "attention_multiplier": 0.3, "logits_scaling": 4.0},
    ),
    "hy3": (
        "hy_v3",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 44,
         "router_scaling_factor": 2.8},
    ),
    "llama4": (
        "llama4_text",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 44,
         "intermediate_size_mlp": 100, "interleave_moe_layer_step": 2, "num_hidden_layers": 4,
         "no_rope_layer_interval": 3, "attention_chunk_size": 20, "floor_scale": 16,
         "attn_scale": 0.3},
    ),
    "mimo": (
        "mimo_v2_flash",
        {**MOE, "n_routed_experts": 7, "head_dim": 24, "v_head_dim": 16, "sliding_window": 20,
         "num_hidden_layers": 4, "num_key_value_heads": 1, "attention_value_scale": 0.7},
    ),
    "laguna": (
        "laguna",
        {**MOE, "shared_expert_intermediate_size": 60, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20,
         "num_attention_heads_per_layer": [6, 4, 6, 4], "moe_routed_scaling_factor": 2.0,
         "moe_router_logit_softcapping": 1.5},
    ),
    "solar": ("solar_open", {**GLM, "n_group": 3, "topk_group": 2, "norm_topk_prob": True}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 7, "moe_topk": 3, "intermediate_size": 44}),
}  # fmt: skip


FULL = ("hy3", "laguna", "solar", "olmoe")
"""Those whose parts others have too; they run behind --full."""


def marked() -> list[object]:
    return [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in FAMILIES]


class Family(NamedTuple):
    """A model of both."""

    path: Path
    reference: Any
    prompts: list[list[int]]
    tokens: list[list[int]]
    """What the reference goes on with."""


@pytest.fixture(params=marked(), scope="module")
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Family:
    kind, overrides = FAMILIES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    reference = make_reference(kind, path, seed, **overrides)
    prompts = [[random.randrange(3, VOCAB) for _ in range(count)] for count in (5, 21, 90)]
    return Family(path, reference, prompts, [greedy(reference, prompt) for prompt in prompts])


@torch.inference_mode()
def greedy(reference: Any, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    for _ in range(NUM_NEW):
        best = reference(tokens, use_cache=False).logits[0, -1].argmax().view(1, 1)
        tokens = torch.cat([tokens, best], dim=1)
    return tokens[0, len(prompt) :].tolist()


def test_logits_of_steps_over_random_cuts(family: Family) -> None:
    driver = PagedDriver(load_model(family.path, "float32").model, num_pages=40)
    requests = [PagedRequest() for _ in family.prompts]
    parts: list[list[torch.Tensor]] = [[] for _ in family.prompts]
    left = dict(enumerate(family.prompts))
    while left:
        work = []
        for i in random.sample(sorted(left), random.randint(1, len(left))):
            cut = random.choice((1, 3, 8, 24, 64))
            work.append((i, left[i][:cut]))
            left[i] = left[i][cut:]
            if not left[i]:
                del left[i]
        counts = [len(tokens) for _, tokens in work]
        logits = driver.step([(requests[i], tokens) for i, tokens in work], range(sum(counts)))
        for (i, _), rows in zip(work, torch.split(logits, counts), strict=True):
            parts[i].append(rows)
    for prompt, pieces in zip(family.prompts, parts, strict=True):
        with torch.inference_mode():
            expected = family.reference(torch.tensor([prompt]), use_cache=False).logits[0]
        error = (torch.cat(pieces) - expected).abs().max() / expected.abs().max()
        assert error < 5e-5, float(error)


def test_whole_and_in_chunks_and_from_the_cache(family: Family) -> None:
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    for settings in ({}, {"prefill_chunk_tokens": 2 * PAGE}):
        with LLM(family.path, dtype="float32", page_size=PAGE, num_pages=100, **settings) as llm:
            for _ in range(2):
                samples = llm.generate(family.prompts, stop=stop)
                assert [sample.token_ids for sample in samples] == family.tokens
            assert llm.engine.counters()["prefix_hit_tokens"] > 0


def test_prefill_apart(family: Family) -> None:
    clock = ManualClock()
    owner, filler = (make_engine(family.path, role, clock) for role in ("decode", "prefill"))
    pair = EnginePair(owner, [filler], clock)
    try:
        asked = [pair.submit(prompt, NUM_NEW) for prompt in family.prompts]
        assert pair.finish(*asked) == family.tokens
        (fill,) = pair.answers[asked[-1]].finished[0].timeline.fills
        assert (fill.accepted_tokens, fill.failure) == (89 // PAGE * PAGE, "")
        pair.settle()
    finally:
        pair.close()


def test_dummy_weights_need_no_checkpoint(family: Family, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((family.path / "config.json").read_bytes())
    model = load_model(tmp_path, "float32", dummy=True).model
    assert PagedDriver(model, 4).step([(PagedRequest(), [1, 2, 3])]).isfinite().all()


def adapted() -> list[object]:
    """All families, of which two run by default."""
    by_default = ("qwen2-moe", "deepseek-v3")
    marks = {name: () if name in by_default else (pytest.mark.full,) for name in FAMILIES}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.mark.parametrize("name", adapted())
def test_adapters_of_attention_compute_what_pefts_do(name: str, tmp_path: Path, seed: int) -> None:
    kind, overrides = FAMILIES[name]
    make_reference(kind, tmp_path / "model", seed, **overrides)
    models = PeftModels(tmp_path / "model", tmp_path)
    targets = (
        ["o_proj"] if "kv_lora_rank" in overrides else ["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    digest = models.add(seed + 1, r=5, target_modules=targets)
    prompts = [[random.randrange(3, VOCAB) for _ in range(count)] for count in (33, 18)]
    settings = {"dtype": "float32", "page_size": PAGE, "num_pages": 64}
    with LLM(models.model_dir, enable_lora=True, **settings) as llm:
        assert llm.load_adapter(models.directories[digest]) == digest
        stop, adapters = StopCriteria(max_tokens=8, ignore_eos=True), [digest, BASE]
        samples = llm.generate(prompts, stop=stop, top_logprobs=5, adapters=adapters)
        for prompt, adapter, sample in zip(prompts, adapters, samples, strict=True):
            models.check(adapter, prompt, sample)
