"""The project's goals for a CPU that multiplies bfloat16 in hardware."""

from __future__ import annotations

from serving.first_token import LOCAL, STORE
from serving.llama import LLAMA
from serving.sections import FIRST_TOKEN, GRPC, PROMPTS, REST, SHIPPING, THROUGHPUT
from serving.series import Goal, Ledger
from serving.shipping import WEFT
from serving.systems import EngineSystem

ENGINE = EngineSystem.name
OVER_TRANSFORMERS = {
    (REST, "1"): 1.6,
    (REST, "16"): 2.2,
    (ENGINE, "1"): 1.8,
    (ENGINE, "16"): 3.0,
}
PROMPT_TOKENS_PER_S = 2500.0
PROMPTS_OVER_LLAMA = 5.0
LLAMA_STREAMS = ("4", "16", "32")
"""Numbers of streams at which the mesh should be ahead of llama.cpp."""
OVER_COLD = {LOCAL: 5.0, STORE: 3.0}
OVER_NIXL = 0.9


def set_goals(ledger: Ledger) -> None:
    """Adds to each row the goals that it is held to, where there are figures."""
    for (system, case), least in OVER_TRANSFORMERS.items():
        row = ledger.find(THROUGHPUT, system, case)
        if row is not None and row.ratios:
            row.goals.append(Goal("x transformers", least, row.ratio))
    for row in ledger.of(PROMPTS):
        if row.system == ENGINE and row.values:
            row.goals.append(Goal("tokens/s", PROMPT_TOKENS_PER_S, row.median))
    for kind, least in OVER_COLD.items():
        row = ledger.find(FIRST_TOKEN, GRPC, kind)
        if row is not None and row.ratios:
            row.goals.append(Goal("x cold", least, row.ratio))
    for row in ledger.of(SHIPPING):
        if row.system == WEFT and row.ratios:
            row.goals.append(Goal("x NIXL", OVER_NIXL, row.ratio))
    _set_goals_over_llama(ledger)


def _set_goals_over_llama(ledger: Ledger) -> None:
    """Sets the goals relative to llama.cpp on its own rows, since the compared rows may have
    others.
    """
    for section, system, cases, least in (
        (THROUGHPUT, REST, LLAMA_STREAMS, 1.0),
        (PROMPTS, ENGINE, None, PROMPTS_OVER_LLAMA),
    ):
        for row in ledger.of(section):
            if row.system != LLAMA or not row.values or (cases and row.case not in cases):
                continue
            ours = ledger.find(section, system, row.case)
            if ours is not None and ours.values:
                value = ours.median / row.median
                row.goals.append(Goal(f"{system} over it", least, value))
