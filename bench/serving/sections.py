"""The measurements: each section takes its turn and fills its rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from weft.contract.errors import WeftError

from serving.answers import Answer, Arrivals, Outcome, Streaming, System
from serving.load import LoadError
from serving.series import Ledger, Series
from serving.systems import EngineSystem, TransformersSystem
from serving.workload import NUM_WARMUP_TOKENS, Prompts

FAILURES = (WeftError, LoadError, OSError, RuntimeError)
"""Errors of a system that do not end the benchmark."""

THROUGHPUT = "throughput"
PROMPTS = "prompts"
MIXED = "mixed"
FIRST_TOKEN = "first token"
SHIPPING = "shipping"
TITLES = {
    THROUGHPUT: "output tokens/s by streams; ratio: to transformers",
    PROMPTS: "prompt tokens/s, one prompt at a time, by its tokens; ratio: to transformers",
    MIXED: "output tokens/s of running streams while long prompts arrive; ratio: to before",
    FIRST_TOKEN: "time to the first token of a long prompt, s; ratio: to cold",
    SHIPPING: "pages written to another process, GB/s, by page; ratio: to NIXL",
}

REST, GRPC = "mesh, REST", "mesh, gRPC"
PREFILL = "prefill worker"

T = TypeVar("T")


class Section(Protocol):
    """A part of the benchmark."""

    name: str

    def take(self, turn: int) -> None:
        """Measures once; turn 0 warms up and keeps nothing."""
        ...

    def finish(self) -> None:
        """Computes the ratios."""
        ...


def attempt(row: Series, action: Callable[[], T]) -> T | None:
    """Runs a measurement. A failure is recorded in the row, which is then skipped."""
    if row.failure is not None:
        return None
    try:
        return action()
    except FAILURES as error:
        row.failure = f"{type(error).__name__}: {error}"
        return None


def run_groups(
    system: System, groups: Sequence[Sequence[list[int]]], num_tokens: int
) -> list[Outcome]:
    """Runs one group of prompts after the other."""
    return [system.run(group, num_tokens) for group in groups]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Rotates the order, so that each goes first as often as last."""
    start = turn % len(items) if items else 0
    return [*items[start:], *items[:start]]


@dataclass(slots=True)
class Throughput:
    """Output tokens per second at several numbers of streams.

    At one stream `num_single` requests run one after the other.
    """

    ledger: Ledger
    systems: Sequence[System]
    prompts: Prompts
    stream_counts: Sequence[int]
    num_tokens: int
    num_single: int
    name: str = THROUGHPUT

    def __post_init__(self) -> None:
        for count in self.stream_counts:
            for system in self.systems:
                self.ledger.row(self.name, system.name, str(count))

    def take(self, turn: int) -> None:
        num_tokens = self.num_tokens if turn else NUM_WARMUP_TOKENS
        for count in self.stream_counts:
            prompts = self.prompts.short(self.num_single if count == 1 else count)
            groups = [[prompt] for prompt in prompts] if count == 1 else [prompts]
            for system in rotated(self.systems, turn):
                row = self.ledger.row(self.name, system.name, str(count))
                outcomes = attempt(row, partial(run_groups, system, groups, num_tokens))
                if turn and outcomes:
                    self._note(row, turn, prompts, outcomes)

    def finish(self) -> None:
        for row in self.ledger.of(self.name):
            baseline = self.ledger.find(self.name, TransformersSystem.name, row.case)
            if baseline is not None:
                row.compare(baseline)

    def _note(
        self, row: Series, turn: int, prompts: list[list[int]], outcomes: list[Outcome]
    ) -> None:
        answers = [answer for outcome in outcomes for answer in outcome.answers]
        wall_s = sum(outcome.wall_s for outcome in outcomes)
        row.note(turn, len(answers) * self.num_tokens / wall_s, answers)
        self.ledger.judge_later(row, prompts, answers, self.num_tokens)


@dataclass(slots=True)
class PromptSpeed:
    """Prompt tokens per second: one prompt at a time, to its first token.

    For the prefill worker it is the time from accepting the fill to the last chunk's end, by its
    own clock; the time to the first token beside it is the client's.
    """

    ledger: Ledger
    prompts: Prompts
    lengths: Sequence[int]
    engine: EngineSystem | None
    mesh: System | None
    transformers: TransformersSystem | None
    name: str = PROMPTS

    def __post_init__(self) -> None:
        for length in self.lengths:
            for name, system in self._systems():
                if system is not None:
                    self.ledger.row(self.name, name, str(length))

    def take(self, turn: int) -> None:
        for length in self.lengths:
            prompt = self.prompts.long(length)
            for name, system in rotated(self._systems(), turn):
                if system is None:
                    continue
                row = self.ledger.row(self.name, name, str(length))
                outcome = attempt(row, partial(self._run, system, prompt))
                if outcome is None or not turn:
                    continue
                rate: float | None = length / outcome.wall_s
                if name == PREFILL:
                    rate = attempt(row, partial(prefill_rate, outcome.answers[0]))
                if rate is not None:
                    row.note(turn, rate, outcome.answers)
                    self.ledger.judge_later(row, [prompt], outcome.answers, 1)

    def finish(self) -> None:
        for row in self.ledger.of(self.name):
            baseline = self.ledger.find(self.name, TransformersSystem.name, row.case)
            if baseline is not None:
                row.compare(baseline)

    def _systems(self) -> list[tuple[str, System | None]]:
        return [
            (EngineSystem.name, self.engine),
            (PREFILL, self.mesh),
            (TransformersSystem.name, self.transformers),
        ]

    @staticmethod
    def _run(system: System, prompt: list[int]) -> Outcome:
        if isinstance(system, TransformersSystem):
            return system.prompt(prompt)
        return system.run([prompt], 1)


def prefill_rate(answer: Answer) -> float:
    """Tokens per second of the prefill worker that filled this request's pages.

    Raises:
        LoadError: None did, or not at once.
    """
    fills = list(answer.timeline.fills)
    took_s = fills[0].last_chunk_computed_time.ToTimedelta().total_seconds() if fills else 0.0
    if len(fills) != 1 or fills[0].failure or not fills[0].computed_tokens or took_s <= 0:
        told = "; ".join(f"{f.worker_id} {f.failure or 'filled'}" for f in fills) or "no fill"
        raise LoadError(f"the prompt was not computed by one prefill worker ({told})")
    return float(fills[0].computed_tokens) / took_s


@dataclass(slots=True)
class Mixed:
    """Running streams while long prompts arrive: their rate and gaps, then beside those before.

    One prompt arrives each `interval_s`, whatever the system has done with those before. The value
    is output tokens per second of the running streams from the first arrival until the last one's
    interval has passed; the ratio is to the same streams before the prompts came. Times to the
    first token are the arriving prompts'.
    """

    ledger: Ledger
    systems: Sequence[Streaming]
    prompts: Prompts
    num_streams: int
    num_tokens: int
    num_arriving: int
    arriving_tokens: int
    interval_s: float
    name: str = MIXED
    num_events_before: int = 48

    def __post_init__(self) -> None:
        for system in self.systems:
            self.ledger.row(self.name, system.name, str(self.num_streams))

    def take(self, turn: int) -> None:
        prompts = self.prompts.short(self.num_streams)
        arriving = [self.prompts.long(self.arriving_tokens) for _ in range(self.num_arriving)]
        if not turn:
            arriving = arriving[:1]
        before = min(self.num_events_before, self.num_tokens // 3)
        for system in rotated(self.systems, turn):
            row = self.ledger.row(self.name, system.name, str(self.num_streams))
            arrivals = Arrivals(arriving, before, self.interval_s)
            work = (prompts, self.num_tokens, arrivals)
            found = attempt(row, partial(system.run_with_arrivals, *work))
            if found is None or not turn:
                continue
            outcome, arrived = found
            attempt(row, partial(self._note, row, turn, outcome, arrived))
            self.ledger.judge_later(row, prompts, outcome.answers, self.num_tokens)
            self.ledger.judge_later(row, arriving[: len(arrived)], arrived, 1)

    def finish(self) -> None:
        """See `Section.finish`."""

    def _note(self, row: Series, turn: int, outcome: Outcome, arrived: list[Answer]) -> None:
        answers = outcome.answers
        if not arrived:
            raise LoadError("the streams ended before a prompt came: give them more tokens")
        all_began_s = max(answer.event_times_s[0] for answer in answers)
        one_ended_s = min(answer.event_times_s[-1] for answer in answers)
        arrived_s = arrived[0].sent_s
        until_s = min(one_ended_s, arrived_s + len(arrived) * self.interval_s)

        def rate(since_s: float, until_s: float) -> float:
            times = [t for answer in answers for t in answer.event_times_s]
            return sum(since_s < time_s <= until_s for time_s in times) / (until_s - since_s)

        row.note(turn, rate(arrived_s, until_s))
        row.ratios[turn] = row.values[turn] / rate(all_began_s, arrived_s)
        row.first_s += [answer.first_s for answer in arrived]
        row.gaps_s += [gap for answer in answers for gap in answer.gaps_s(arrived_s, until_s)]
