"""An engine with tiers, alone: prompts of random tokens, and what became of their pages."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from weft.contract.timeline import FillRecord
from weft.engine.loop.engine import Engine
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine

VOCAB = 517
"""Vocabulary size of the model."""
NUM_NEW = 6
"""Tokens of every answer."""


def prompt_of(length: int) -> list[int]:
    """Random tokens."""
    return [random.randrange(3, VOCAB) for _ in range(length)]


class TierBench:
    """Runs requests on the engine, one at a time.

    Args:
        model_dir: Of a model with `VOCAB` tokens.
        length: Of prompts, of which three fill the pool.
        **settings: Of the engine.
    """

    def __init__(self, model_dir: Path, length: int, **settings: Any) -> None:
        clock = ManualClock()
        self._length = length
        self.engine: Engine = make_engine(model_dir, "decode", clock, **settings)
        self.pair = EnginePair(self.engine, [], clock)

    def ask(self, prompt: list[int]) -> list[int]:
        """The answer's tokens."""
        (tokens,) = self.pair.finish(self.pair.submit(prompt, max_tokens=NUM_NEW))
        return tokens

    def await_moves(self) -> None:
        """Takes no turn until no page is on its way between tiers."""
        tiers, deadline = self.engine.tiers, time.monotonic() + 60.0
        assert tiers is not None
        while tiers.num_open:
            assert time.monotonic() < deadline, tiers.sizes()
            time.sleep(1e-3)
            tiers.take()

    def settle(self) -> None:
        """Runs until nothing moves; no page is lost in any tier."""
        self.pair.settle()
        tiers = self.engine.tiers
        assert tiers is not None
        for tier in (tiers.host, tiers.disk):
            if tier is not None:
                tier.pages.check_integrity()
                counts = tier.counts()
                assert counts.used == counts.quarantined == 0
                assert counts.free + counts.cached == counts.total

    def push_out(self) -> None:
        """Fills the whole pool with other prompts."""
        for _ in range(3):
            self.ask(prompt_of(self._length))
        self.settle()

    def check_return(self, prompt: list[int]) -> None:
        """Pages that were pushed out come back from the tiers, and the answer is the same."""
        expected = self.ask(prompt)
        self.push_out()
        assert self.ask(prompt) == expected
        tiers = [self.counters(name) for name in ("host", "disk")]
        assert tiers[0]["corrupt_pages"] == 0
        assert sum(tier["loaded_pages"] for tier in tiers) > 0
        self.settle()

    def fills(self) -> list[FillRecord]:
        """Fills of the request that finished last."""
        return list(self.pair.answers.values())[-1].finished[-1].timeline.fills

    def counters(self, name: str) -> dict[str, int]:
        """Counters of one tier."""
        assert self.engine.tiers is not None
        (report,) = (tier for tier in self.engine.tiers.report() if tier.name == name)
        return report.counters

    def close(self) -> None:
        """Ends the engine, once nothing moves."""
        self.settle()
        self.pair.close()
