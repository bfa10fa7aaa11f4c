"""Requests and their times as numbers, of which each client process makes its own prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FIRST_ID = 10
"""Smallest token id in made-up prompts; lower ones are often special."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    seed: int
    """Seed of the request's new tokens."""
    new_tokens: int
    """Prompt tokens after the history."""
    output_tokens: int
    pause_s: float = 0.0
    """Time after the previous turn's end at which it is sent, in a session."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request, or the turns of a session, each sent when the previous one is answered."""

    at_s: float
    """Time of the first turn, which waits for nothing; seconds from the start."""
    turns: tuple[Turn, ...]


def arrivals(rate: float, count: int, kind: str, rng: random.Random) -> Iterator[float]:
    """Times of arrival.

    Args:
        rate: Arrivals per second; not used for `burst`.
        count: Number of arrivals.
        kind: poisson, uniform, or burst (all at once).
        rng: Source of random numbers.
    """
    at_s = 0.0
    for _ in range(count):
        yield at_s
        if kind == "poisson":
            at_s += rng.expovariate(rate)
        elif kind == "uniform":
            at_s += 1 / rate


def single_requests(
    times_s: Sequence[float], prompt: Sequence[int], output: Sequence[int], rng: random.Random
) -> list[Visit]:
    """Requests without a common prefix.

    Args:
        times_s: Times of arrival.
        prompt: Least and most prompt tokens.
        output: Least and most new tokens.
        rng: Source of lengths and seeds.
    """
    return [
        Visit(
            at_s,
            (Turn(rng.getrandbits(48), rng.randint(*prompt), rng.randint(*output)),),
        )
        for at_s in times_s
    ]


def sessions(
    times_s: Sequence[float],
    history: Sequence[int],
    turns: int,
    added: Sequence[int],
    output: Sequence[int],
    pause_s: float,
    rng: random.Random,
) -> list[Visit]:
    """Sessions as agents have them: a long first prompt, then short additions and short answers.

    Args:
        times_s: Times of arrival of the sessions.
        history: Least and most tokens of the first prompt.
        turns: Turns of each session, the first included.
        added: Least and most prompt tokens that each further turn adds after the last answer.
        output: Least and most new tokens.
        pause_s: Mean time between an answer and the next turn.
        rng: Source of random numbers.
    """
    visits = []
    for at_s in times_s:
        made = [Turn(rng.getrandbits(48), rng.randint(*history), rng.randint(*output))]
        for _ in range(turns - 1):
            pause = rng.expovariate(1 / pause_s) if pause_s else 0.0
            made.append(Turn(rng.getrandbits(48), rng.randint(*added), rng.randint(*output), pause))
        visits.append(Visit(at_s, tuple(made)))
    return visits


def prompt_of(turn: Turn, vocabulary: int) -> list[int]:
    """The new tokens of a turn."""
    rng = random.Random(turn.seed)
    return [rng.randrange(FIRST_ID, vocabulary) for _ in range(turn.new_tokens)]
