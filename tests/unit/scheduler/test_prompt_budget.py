"""What prompts get of a step beside running requests: first tokens weighed against next ones."""

from __future__ import annotations

import random
from dataclasses import dataclass

from weft.engine.scheduler.prompt_budget import PromptBudget

STEP_TOKENS = 8192


@dataclass
class Rates:
    tokens_per_s_beside: float
    decode_s: float

    def tokens_within(self, duration_s: float) -> int:
        return int(self.tokens_per_s_beside * duration_s) // 16 * 16


def budget(
    rates: Rates, weight: float = 1.0, target_s: float = 0.1, *, spares_running: bool = True
) -> PromptBudget:
    return PromptBudget(rates, target_s, weight, STEP_TOKENS, spares_running=spares_running)


def test_a_burst_beside_few_running_requests_takes_whole_steps() -> None:
    rates = Rates(tokens_per_s_beside=40_000, decode_s=0.005)
    assert budget(rates).tokens(num_running=2, num_waiting=250) == STEP_TOKENS
    assert budget(rates).tokens(num_running=100, num_waiting=250) == 4000
    assert budget(rates).tokens(num_running=2, num_waiting=1) == 4000


def test_the_cheaper_delay_is_chosen() -> None:
    """Against the rule as its two costs read."""
    for _ in range(300):
        rates = Rates(random.uniform(1e3, 1e6), random.uniform(1e-4, 0.1))
        weight, target_s = random.uniform(0, 20), random.uniform(0.005, 0.3)
        running, waiting = random.randint(1, 256), random.randint(0, 1000)
        first_s = weight * waiting * rates.decode_s
        next_s = running * (STEP_TOKENS / rates.tokens_per_s_beside - target_s)
        kept = rates.tokens_within(target_s)
        expected = STEP_TOKENS if first_s >= next_s or kept >= STEP_TOKENS else kept
        found = budget(rates, weight, target_s).tokens(running, waiting)
        assert min(found, STEP_TOKENS) == expected


def test_without_weight_or_measurements_the_target_is_kept() -> None:
    rates = Rates(tokens_per_s_beside=40_000, decode_s=0.005)
    assert budget(rates, weight=0.0).tokens(1, 10_000) == 4000
    assert budget(Rates(0.0, 0.005)).tokens(1, 10_000) == 0
    assert budget(Rates(40_000, 0.0)).tokens(1, 10_000) == 4000


def test_prompts_that_could_be_shipped_add_little_to_a_step() -> None:
    """They may add the time of a step of decodes, and at least 12 ms, below which a GPU idles."""
    rates = Rates(tokens_per_s_beside=40_000, decode_s=0.02)
    assert budget(rates).tokens(20, 1, is_overflow=True) == 800
    assert budget(rates, spares_running=False).tokens(20, 1, is_overflow=True) == 4000
    assert budget(rates).tokens(20, 1) == 4000
    assert budget(Rates(40_000, 0.005)).tokens(20, 1, is_overflow=True) == 480
    assert budget(rates, target_s=0.01).tokens(20, 1, is_overflow=True) == 400
    assert budget(rates).tokens(2, 250, is_overflow=True) == STEP_TOKENS
