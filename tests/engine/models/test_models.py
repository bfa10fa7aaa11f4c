"""Logits and greedy tokens of every architecture against transformers, in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.engine.model.interface import Model
from weft.engine.model.loader import load_model
from weft.testing.models.choices import Choices, are_clear, asks_surely, check_choices
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-sharded": ("llama", {"shards": 3}),
    "llama-mha-bias": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
    ),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-odd": (
        "llama",
        {"head_dim": 80, "num_hidden_layers": 5, "num_attention_heads": 3,
         "num_key_value_heads": 1, "vocab_size": 391, "rope_parameters": LLAMA3_ROPE},
    ),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-mixed": (
        "qwen2",
        {"num_hidden_layers": 4, "sliding_window": 20, "use_sliding_window": True,
         "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "full", "sliding")]},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "head_dim": 128}),
    "qwen3-moe": ("qwen3_moe", {"sliding_window": 30, "use_sliding_window": True}),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1],
         "norm_topk_prob": False, "num_experts": 16, "num_experts_per_tok": 16},
    ),
    "qwen3-moe-dense-end": ("qwen3_moe", {"mlp_only_layers": [2], "num_experts_per_tok": 1}),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


class Pair:
    """One model, loaded by Weft and by transformers."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.ours: Model = load_model(path, "float32").model
        self.reference, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
        assert not any(info.values()), info

    def reference_logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] of one request alone, without any cache."""
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens]), use_cache=False).logits[0]

    def tokens(self, count: int, num_new: int = 0) -> list[int]:
        """Random ordinary tokens, which ask their experts surely, as so many behind them do."""
        while True:
            tokens = [random.randrange(3, self.ours.config.vocab_size) for _ in range(count)]
            if not hasattr(self.reference.config, "num_experts"):
                return tokens
            behind = Choices(self.reference_logits, tokens, num_new)
            if asks_surely(self.reference, tokens + behind):
                return tokens


@pytest.fixture(params=CASES, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    kind, overrides = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    return Pair(make_tiny(kind, path, random.randrange(10**6), **overrides))


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.shape == reference.shape
    assert ours.dtype == torch.float32
    error = (ours - reference).abs().max() / reference.abs().max()
    assert error < 3e-5, float(error)


def test_ragged_steps_over_random_cuts_give_the_logits_of_whole_prompts(pair: Pair) -> None:
    prompts = [pair.tokens(count) for count in (1, 7, 8, 9, 40, 131)]
    driver = PagedDriver(pair.ours, num_pages=64)
    requests = [PagedRequest() for _ in prompts]
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    while True:
        open_ = [i for i, r in enumerate(requests) if r.num_cached < len(prompts[i])]
        if not open_:
            break
        chosen = random.sample(open_, random.randint(1, len(open_)))
        work = []
        for i in chosen:
            left = prompts[i][requests[i].num_cached :]
            work.append((requests[i], left[: random.choice((1, 3, 8, 24, 64))]))
        count = sum(len(tokens) for _, tokens in work)
        rows = torch.split(driver.step(work, range(count)), [len(tokens) for _, tokens in work])
        for i, logits in zip(chosen, rows, strict=True):
            parts[i].append(logits)
    for prompt, pieces in zip(prompts, parts, strict=True):
        assert_close(torch.cat(pieces), pair.reference_logits(prompt))


def test_greedy_tokens_equal_transformers_generate(pair: Pair) -> None:
    prompts = [pair.tokens(count, 50) for count in (1, 8, 33)]
    ours = PagedDriver(pair.ours, num_pages=64).greedy(prompts, 50)
    clear = []
    for prompt, tokens in zip(prompts, ours, strict=True):
        # One pass over the whole text shows every greedy choice at once.
        logits = pair.reference_logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        check_choices(logits, tokens)
        clear.append(next((at for at in range(50) if not are_clear(logits[at : at + 1])), 50))
    inputs = torch.tensor(prompts[1:2])
    out = pair.reference.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=50,
        do_sample=False,
        eos_token_id=None,
    )
    made = out[0, len(prompts[1]) :].tolist()
    assert ours[1][: clear[1]] == made[: clear[1]]


def test_only_wanted_rows_are_computed_and_equal_those_of_a_full_step(pair: Pair) -> None:
    work_tokens = [pair.tokens(count) for count in (30, 1, 17)]
    wanted = sorted(random.sample(range(48), 5))
    full = PagedDriver(pair.ours, num_pages=16)
    some = PagedDriver(pair.ours, num_pages=16)
    every = full.step([(PagedRequest(), tokens) for tokens in work_tokens], range(48))
    few = some.step([(PagedRequest(), tokens) for tokens in work_tokens], wanted)
    assert_close(few, every[wanted])


def test_without_wanted_rows_the_kv_is_written_and_nothing_returned(pair: Pair) -> None:
    tokens = pair.tokens(21)
    with_rows, without = PagedDriver(pair.ours, 8), PagedDriver(pair.ours, 8)
    with_rows.step([(PagedRequest(), tokens)])
    batch = without.batch([(PagedRequest(), tokens)], [])
    with torch.inference_mode():
        hidden = pair.ours.forward(batch, without.pool)
    assert hidden.shape == (0, pair.ours.config.hidden_size)
    torch.testing.assert_close(without.pool, with_rows.pool, equal_nan=True, rtol=0, atol=0)
    assert pair.ours.logits(hidden).shape == (0, pair.ours.config.vocab_size)


def test_kv_layout_names_the_models_own_shape(pair: Pair) -> None:
    layout, config = pair.ours.kv_layout(8), pair.ours.config
    plane = layout.plane
    assert (plane.layers, plane.heads, plane.dim) == (
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
    )
    assert plane.dtype == "float32"
    assert layout.page_size == 8
