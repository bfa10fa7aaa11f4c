"""Requests of recorded and made-up days."""

from __future__ import annotations

import csv
import datetime
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from weft.contract.errors import ConfigError

DayName = Literal["diurnal", "bursts", "shift", "steady"]
DAYS: tuple[DayName, ...] = ("diurnal", "bursts", "shift", "steady")
_MOONCAKE_BLOCK_TOKENS = 512


class Arrival(NamedTuple):
    time_s: float
    """Since the trace's beginning."""
    prompt_tokens: int
    """That must be computed."""
    output_tokens: int


def read_trace(path: Path) -> list[Arrival]:
    """Reads a trace, in the order of arrival.

    `.jsonl`: Mooncake's, an object a line with `timestamp` (ms), `input_length`, `output_length`
    and `hash_ids` of 512-token blocks; blocks that came before count as cached. `.csv`: Azure's LLM
    inference traces, with the columns TIMESTAMP, ContextTokens, GeneratedTokens.

    Raises:
        ConfigError: The file cannot be read, or has another form; says in which line.
    """
    readers = {".jsonl": _read_mooncake, ".csv": _read_azure}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: give a .jsonl file (Mooncake's form) or a .csv file (Azure's)")
    found: list[Arrival] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = _Lines(file)
            try:
                found.extend(readers[path.suffix](lines))
            except (ValueError, KeyError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise ConfigError(f"{path}, line {lines.number}: {reason}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not found:
        raise ConfigError(f"{path}: it has no requests")
    found.sort(key=lambda one: one.time_s)
    began_s = found[0].time_s
    return [one._replace(time_s=one.time_s - began_s) for one in found]


class _Lines:
    """Lines of a file, counted as they are read."""

    def __init__(self, file: Iterable[str]) -> None:
        self._file = iter(file)
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._file)
        self.number += 1
        return line


def _read_mooncake(lines: Iterator[str]) -> Iterator[Arrival]:
    seen: set[int] = set()
    for line in lines:
        if not line.strip():
            continue
        entry = json.loads(line)
        blocks = [int(block) for block in entry.get("hash_ids", ())]
        held = len(list(itertools.takewhile(seen.__contains__, blocks)))
        seen.update(blocks)
        prompt = int(entry["input_length"])
        to_compute = max(1, prompt - _MOONCAKE_BLOCK_TOKENS * held)
        yield Arrival(float(entry["timestamp"]) / 1000, to_compute, int(entry["output_length"]))


def _read_azure(lines: Iterator[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        # Seven digits of a second, of which Python reads six.
        text, _, fraction = row["TIMESTAMP"].partition(".")
        when = datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC)
        digits = "".join(itertools.takewhile(str.isdigit, fraction))
        part = float(f"0.{digits}") if digits else 0.0
        yield Arrival(
            when.timestamp() + part, int(row["ContextTokens"]), int(row["GeneratedTokens"])
        )


def made_day(
    name: DayName, *, requests_per_s: float, hours: float = 24.0, seed: int = 0
) -> list[Arrival]:
    """A day of Poisson arrivals with log-normal lengths, whose busiest hour has about
    `requests_per_s`.

    diurnal: a wave from a fifth in the night. bursts: twice as many for ten minutes, at a time
    that nobody knows, some eight times a day. shift: prompts of 3,000 tokens with answers of 100
    become, within an hour, prompts of 500 with answers of 500. steady: always the same.
    """
    draw = random.Random(f"{name} {seed}")
    length_s = 3600 * hours
    bursts = _burst_times(draw, length_s)
    found: list[Arrival] = []
    now_s = 0.0
    while True:
        now_s += draw.expovariate(requests_per_s)
        if now_s >= length_s:
            return found
        if draw.random() >= _level(name, now_s / length_s, now_s, bursts):
            continue
        prompt, output = _lengths(name, now_s / length_s)
        found.append(Arrival(now_s, _drawn(draw, prompt, 0.8), _drawn(draw, output, 0.7)))


def _burst_times(draw: random.Random, length_s: float) -> list[float]:
    count = max(1, round(length_s / 10_800))
    return sorted(draw.uniform(0.02, 0.95) * length_s for _ in range(count))


def _level(name: DayName, part: float, now_s: float, bursts: list[float]) -> float:
    """Share of the highest rate."""
    if name == "diurnal":
        return 0.6 - 0.4 * math.cos(2 * math.pi * part)
    if name == "bursts":
        return 1.0 if any(0 <= now_s - at < 600 for at in bursts) else 0.5
    return 1.0


def _lengths(name: DayName, part: float) -> tuple[float, float]:
    if name != "shift":
        return 1500.0, 200.0
    # An hour of a day of 24, in the middle.
    turned = min(1.0, max(0.0, (part - 0.5) * 24 + 0.5))
    return 3000.0 + (500.0 - 3000.0) * turned, 100.0 + (500.0 - 100.0) * turned


def _drawn(draw: random.Random, mean: float, sigma: float) -> int:
    return max(1, round(draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
