"""The least time that steps of a model can take on a device, by rates measured in the same run.

Every step must read its weights and the KV that it attends to once, and multiply what it must; it
takes at least the longer of the two. The embedding is left out, and so is all that is small beside
these: norms, activations, drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from clocks import median_s
from harness import Run
from weft.checkpoint.config import ModelConfig

ELEMENT_BYTES = 2
"""Size of bfloat16."""
MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of one device."""

    bytes_per_s: float
    """Bytes read and written per second by a large copy."""
    flop_per_s: float
    """FLOP/s of a large product of bfloat16 matrices."""


@dataclass(frozen=True, slots=True)
class Work:
    """Minimum work of a step."""

    num_bytes: float
    flop: float

    def seconds(self, rates: Rates) -> float:
        """Minimum time at these rates."""
        return max(self.num_bytes / rates.bytes_per_s, self.flop / rates.flop_per_s)


def measure_rates() -> Rates:
    """Measures the rates of the current device."""
    return Rates(copy_rate(), matmul_rate())


def kept_rates(run: Run) -> Rates:
    """Measures the rates, and keeps them with the run's figures."""
    rates = measure_rates()
    torch.cuda.empty_cache()
    run.keep(copy_tb_s=rates.bytes_per_s / 1e12, matmul_tflop_s=rates.flop_per_s / 1e12)
    run.note(
        f"copy {rates.bytes_per_s / 1e12:.2f} TB/s, products {rates.flop_per_s / 1e12:.0f} TFLOP/s"
    )
    return rates


def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.randint(0, 99, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: torch.add(source, 1, out=target))


def matmul_rate() -> float:
    """Floating-point operations a second of a product of bfloat16 matrices."""
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * MATMUL_SIZE**3 / median_s(lambda: torch.matmul(a, b, out=out))


class WeightBytes(NamedTuple):
    """Sizes of a number in the weights of linear layers; the LM head is in bfloat16."""

    attention: float = ELEMENT_BYTES
    feed_forward: float = ELEMENT_BYTES


IN_BFLOAT16 = WeightBytes()


def step_work(
    config: ModelConfig,
    tokens: int,
    logits: int,
    attended: float,
    kv_tokens: float,
    sizes: WeightBytes = IN_BFLOAT16,
) -> Work:
    """Work of one forward pass.

    Args:
        config: Of the model.
        tokens: New tokens, which choose experts uniformly. Random weights choose less evenly, so
            steps of many tokens may take less time.
        logits: Rows of logits.
        attended: Positions, summed over the new tokens.
        kv_tokens: Positions whose K and V are read or written.
        sizes: Of the weights.
    """
    attention, kept, of_scores = _attention(config)
    feeds = [_feed(config, layer, tokens) for layer in range(config.num_layers)]
    read, used = (sum(part) for part in zip(*feeds, strict=True))
    head, layers = config.vocab_size * config.hidden_size, config.num_layers
    flop = 2 * tokens * (layers * attention + used) + 2 * logits * head
    flop += 2 * layers * of_scores * attended
    weights = layers * attention * sizes.attention + read * sizes.feed_forward
    others = (head if logits else 0) + layers * kept * kv_tokens
    return Work(weights + ELEMENT_BYTES * others, flop)


def _attention(config: ModelConfig) -> tuple[float, float, float]:
    """Weights of a layer's attention; what it keeps of a position; products of a row with it."""
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    if config.latent is None:
        weights = (2 * heads + 2 * config.num_kv_heads) * dim * hidden
        return weights, 2 * config.num_kv_heads * dim, 2 * heads * dim
    sizes = config.latent
    kept = sizes.kv_rank + sizes.rope_dim
    to_q = hidden * heads * dim
    if sizes.q_rank is not None:
        to_q = sizes.q_rank * (hidden + heads * dim)
    absorbed = heads * (sizes.nope_dim + sizes.value_dim) * sizes.kv_rank
    weights = to_q + hidden * kept + absorbed + heads * sizes.value_dim * hidden
    return weights, kept, heads * (kept + sizes.kv_rank)


def _feed(config: ModelConfig, layer: int, tokens: int) -> tuple[float, float]:
    """Weights of a layer's feed-forward block that are read, and those that one row uses."""
    hidden, moe = config.hidden_size, config.moe
    if moe is None or not moe.is_sparse(layer):
        dense = 3.0 * hidden * config.intermediate_size
        return dense, dense
    count, chosen = moe.num_experts, moe.num_experts_per_tok
    expert = 3 * hidden * moe.intermediate_size
    always = hidden * count + 3 * hidden * moe.shared_size
    read = expert * count * (1 - (1 - chosen / count) ** tokens)
    return read + always, expert * chosen + always


def decode_work(
    config: ModelConfig, batch: int, context: float, sizes: WeightBytes = IN_BFLOAT16
) -> Work:
    """Work of a step in which each request of a batch brings one token."""
    return step_work(config, batch, batch, batch * context, batch * context, sizes)


def bytes_per_step(config: ModelConfig, batch: int, context: float) -> float:
    """Weights and KV that a decode step must read, in bfloat16."""
    return decode_work(config, batch, context).num_bytes


def prompt_work(config: ModelConfig, lengths: Sequence[int]) -> Work:
    """Work of whole prompts up to their first tokens, in one step."""
    attended = sum(length * (length + 1) / 2 for length in lengths)
    return step_work(config, sum(lengths), len(lengths), attended, sum(lengths))


def mixed_seconds(config: ModelConfig, sizes: Sequence[tuple[int, int]], rates: Rates) -> float:
    """Minimum time of requests that arrive at once: all prompts, then steps with one token of each
    running request.

    Args:
        config: Of the model.
        sizes: Tokens in and out of each request.
        rates: Rates of the device.
    """
    total = prompt_work(config, [length for length, _ in sizes]).seconds(rates)
    for step in range(1, max(out for _, out in sizes)):
        contexts = [length + step for length, out in sizes if out > step]
        work = step_work(config, len(contexts), len(contexts), sum(contexts), sum(contexts))
        total += work.seconds(rates)
    return total
