"""A mesh with proxies on its links, and what it answers in peace."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.chaos.load import Known
from weft.chaos.mesh import ChaosMesh
from weft.chaos.requests import BIAS, ChaosRequest, Reply, make_asks
from weft.chaos.run import answers_in_peace
from weft.chaos.tiny import TINY_NAME
from weft.cli.up.settings import UpSettings
from weft.engine.sampling.sampler import derive_seed
from weft.testing.meshes.tiny_mesh import Greedy

_NUM_TRIES = 200
_LONG = 24
"""Tokens of an answer that repeats itself."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """State shared by the tests of tests/chaos."""

    mesh: ChaosMesh
    known: Known
    seed: int
    greedy: Greedy


async def in_peace(mesh: ChaosMesh, model_dir: Path, seed: int) -> Chaos:
    """A mesh with its answers to asks whose tokens float32 can tell: other batches round in other
    ways.
    """
    # Beside the loop, on which the proxies of the mesh run.
    greedy, draw = await asyncio.to_thread(Greedy, model_dir), random.Random(seed)
    for _ in range(_NUM_TRIES):
        asks = make_asks(draw.randrange(1 << 31), 300, 48)[:12]
        # One that repeats itself for long enough, so that drafts are right.
        if not any(ask.choices and ask.max_tokens >= _LONG for ask in asks):
            continue
        answers = await answers_in_peace(mesh, TINY_NAME, asks)
        if await asyncio.to_thread(are_clear, greedy, asks, answers):
            return Chaos(mesh, Known(TINY_NAME, asks, answers), seed, greedy)
    raise AssertionError("the mesh draws other tokens than its definition has")


def are_clear(greedy: Greedy, asks: Sequence[ChaosRequest], answers: Mapping[int, Reply]) -> bool:
    """Whether float32 can tell each token of all answers."""
    return all(
        greedy.is_clear_draw(
            ask.prompt,
            ids,
            bias=dict.fromkeys(ask.choices, BIAS),
            temperature=ask.temperature,
            seed=derive_seed(ask.seed, sample),
        )
        for ask in asks
        for sample, ids in enumerate(answers[ask.number].tokens)
    )


def for_tests(settings: UpSettings) -> UpSettings:
    """A mesh in which no owner ends for its quarantine while a test looks into it, and whose drafts
    are verified: a measured gate may find, in slow steps, that none pay.
    """
    args = f"{settings.decode_args} --max-quarantine-fraction 1 --draft-gate fixed"
    return settings.model_copy(update={"decode_args": args})
