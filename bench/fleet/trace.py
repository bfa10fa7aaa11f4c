"""Traces for simulated fleets: made-up conversations, request logs, and files of block hashes."""

from __future__ import annotations

import bisect
import heapq
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, overload

from weft.common.telemetry.request_log import read_log
from weft.contract.keys import ShortKeys

PAGE_SIZE = 16


class PageNames(ShortKeys):
    """Keys of a prompt's pages that need not be computed: the trace has made them up."""

    __slots__ = ()

    def __init__(self, names: list[int]) -> None:
        self._keys = names

    def upto(self, num_pages: int) -> list[int]:
        return self._keys


class MadeUpTokens(Sequence[int]):
    """A prompt of which only the length and the first tokens exist."""

    __slots__ = ("_first", "_length")

    def __init__(self, length: int, first: Sequence[int]) -> None:
        self._length = length
        self._first = first

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self._first[index]


class Arrival(NamedTuple):
    """One request of a trace."""

    time: float
    """Seconds since the trace began."""
    tokens: Sequence[int]
    """Tokens of the prompt."""
    pages: list[int]
    """Names of its full pages; equal names, equal prefixes. May have more than the prompt."""
    num_output: int
    """Number of generated tokens."""
    key: str
    """Conversation that the request belongs to."""


def conversations(
    num_requests: int,
    rate: float,
    seed: int,
    *,
    num_systems: int = 200,
    mean_turns: float = 4.0,
    think_s: float = 20.0,
    message_tokens: float = 60.0,
) -> Iterator[Arrival]:
    """Chats with shared system prompts, in order of arrival.

    System prompts are drawn by Zipf's law (exponent 1) and have 256 to 4,096 tokens; messages and
    answers are log-normal (medians `message_tokens` and 150 tokens). Each turn's prompt is the
    whole conversation so far.

    Args:
        num_requests: Number of requests.
        rate: Mean requests per second.
        seed: Seed of all random numbers.
        num_systems: Number of different system prompts.
        mean_turns: Mean turns of a conversation; geometric distribution.
        think_s: Mean pause between two turns, seconds; exponential distribution.
        message_tokens: Median of what a turn adds to the prompt.
    """
    rng = random.Random(seed)
    names = itertools.count(1)
    shares = list(itertools.accumulate(1 / rank for rank in range(1, num_systems + 1)))
    systems: list[tuple[list[int], list[int]]] = []
    for number in range(num_systems):
        num_pages = rng.randint(16, 256)
        systems.append(([next(names) for _ in range(num_pages)], [number] * 256))
    waiting: list[tuple[float, int, int, list[int], int]] = []
    """Following turns: time, conversation, system prompt, pages, tokens so far."""
    numbers = itertools.count()
    start = rng.expovariate(rate / mean_turns)
    for _ in range(num_requests):
        while not waiting or start <= waiting[0][0]:
            system = bisect.bisect_left(shares, rng.random() * shares[-1])
            pages = [*systems[system][0]]
            turn = (start, next(numbers), system, pages, len(pages) * PAGE_SIZE)
            heapq.heappush(waiting, turn)
            start += rng.expovariate(rate / mean_turns)
        time, chat, system, pages, said = heapq.heappop(waiting)
        said += max(4, int(rng.lognormvariate(math.log(message_tokens), 1.0)))
        num_output = max(1, min(4096, int(rng.lognormvariate(5.0, 0.8))))
        pages += [next(names) for _ in range((said + num_output) // PAGE_SIZE - len(pages))]
        yield Arrival(time, MadeUpTokens(said, systems[system][1]), pages, num_output, str(chat))
        if rng.random() > 1 / mean_turns and said < 30_000:
            again = time + rng.expovariate(1 / think_s)
            heapq.heappush(waiting, (again, chat, system, pages, said + num_output))


def request_log(path: Path) -> Iterator[Arrival]:
    """Reads a gateway's log, written with `--request-log-content tokens` (or text), in order of
    arrival.
    """
    with path.open() as file:
        logged = sorted(read_log(file), key=lambda prompt: prompt.time)
    for prompt in logged:
        ids = prompt.prompt_ids or []
        pages = ShortKeys(ids, PAGE_SIZE, bytes(32)).upto(len(ids) // PAGE_SIZE)
        num_output = sum(sample.num_tokens for sample in prompt.samples)
        yield Arrival(prompt.time - logged[0].time, ids, pages, num_output, prompt.request_id)


def block_hashes(path: Path, speed: float = 1.0, block_tokens: int = 512) -> Iterator[Arrival]:
    """Reads a JSON line per request: timestamp (ms), input_length, output_length, hash_ids.

    That is the form of the traces that the Mooncake project publishes.

    Args:
        path: The file.
        speed: Times faster than recorded.
        block_tokens: Tokens that one hash stands for.
    """
    per_block = block_tokens // PAGE_SIZE
    with path.open() as file:
        for line in file:
            entry = json.loads(line)
            blocks, length = entry["hash_ids"], entry["input_length"]
            pages = [block * per_block + page for block in blocks for page in range(per_block)]
            first = [blocks[0]] * 256
            yield Arrival(
                entry["timestamp"] / 1e3 / speed,
                MadeUpTokens(length, first),
                pages[: length // PAGE_SIZE],
                max(1, entry["output_length"]),
                str(blocks[min(len(blocks) - 1, 1)]),
            )
