"""Owner and filler engines in one process, with every message between them in the test's hands."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from weft.contract.fills import FillCommand, FillerEvent, FillStart, LeaseAnswer, LeaseQuery
from weft.contract.handle import FillEvent
from weft.contract.messages import Inbox, Outbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Finished, Submit
from weft.contract.tasks import PooledVectors
from weft.contract.timeline import FillCandidate
from weft.engine.base.config import EngineConfig
from weft.engine.loop.build import load_parts
from weft.engine.loop.engine import Engine

_NEEDS_NIXL = pytest.mark.needs("nixl")
WAYS = [
    pytest.param({"transport": "data"}, id="data"),
    pytest.param({"transport": "shared"}, id="shared"),
    pytest.param({"transport": "nixl"}, id="nixl", marks=_NEEDS_NIXL),
    pytest.param(
        {"transport": "data", "force_staging": True, "staging_memory": "device"}, id="data-staged"
    ),
    pytest.param(
        {"transport": "shared", "force_staging": True}, id="shared-staged", marks=pytest.mark.full
    ),
    pytest.param({"transport": "nixl", "force_staging": True}, id="nixl-staged", marks=_NEEDS_NIXL),
]
"""Settings of engines for each way that pages travel."""


class ManualClock:
    """A clock advanced by the test, plus slowed real time: a busy machine does not time out."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() * 0.02 + self.offset_s


def make_engine(model_dir: Path, role: str, clock: ManualClock, **settings: Any) -> Engine:
    """An engine of a tiny model in float32."""
    values: dict[str, Any] = {
        "page_size": 8,
        "num_pages": 200,
        "dtype": "float32",
        "transport": "data",
        "prefill_chunk_tokens": 8,
        "worker_id": role,
        "local_prefill_max_tokens": 0,
        "poison_free_pages": True,
    }
    config = EngineConfig(model_dir=model_dir, role=role, **(values | settings))  # type: ignore
    return Engine(config, load_parts(config), clock)


def num_quarantined(engine: Engine) -> int:
    """Quarantined pages that peers write to; with a staging area these are not the pool's."""
    staging = engine.parts.transport.staging_counts()
    if staging is None:
        return engine.memory.counts().quarantined
    assert engine.memory.counts().quarantined == 0
    return staging.quarantined


def take_destinations(engine: Engine) -> list[int]:
    """Takes all pages that fills could be given now."""
    area = engine.parts.transport.staging
    if area is None:
        return engine.memory.allocate(engine.memory.num_available_pages)
    taken: list[int] = []
    while page := area.take_landing(1):
        taken += page
    return taken


def give_destinations(engine: Engine, pages: list[int]) -> None:
    """Returns what `take_destinations` took."""
    area = engine.parts.transport.staging
    if area is None:
        engine.memory.release(pages)
    else:
        area.free_landing(pages)


@dataclass
class Answer:
    """Outcome of a submit."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    routes: list[NDArray[np.generic]] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    vectors: list[PooledVectors] = field(default_factory=list)
    num_starts: int = 0
    """Batches with its tokens that were said to have first ones."""
    num_told_here: int = 0
    """Times that the owner told that it computes the prompt itself."""


class EnginePair:
    """An owner, its fillers by worker id, and the links between them.

    `on_command` and `on_event` see every message and may replace it by none or several.
    """

    def __init__(self, owner: Engine, fillers: Sequence[Engine], clock: ManualClock) -> None:
        self.owner = owner
        self.clock = clock
        self.fillers = {filler.config.worker_id: filler for filler in fillers}
        self.paused: set[str] = set()
        """Fillers that take no turns."""
        self.commands: list[FillCommand] = []
        self.events: list[FillEvent] = []
        self.on_command: Callable[[FillCommand], list[FillCommand]] = lambda command: [command]
        self.on_event: Callable[[FillEvent], list[FillEvent]] = lambda event: [event]
        self.answers: dict[str, Answer] = {}
        self._ids = itertools.count()
        self._streams: dict[tuple[str, int], bytes] = {}
        self._num_taken: Counter[tuple[str, int]] = Counter()
        self._to_owner = Inbox()
        self._to_filler = {name: Inbox() for name in self.fillers}

    def close(self) -> None:
        """Closes all engines, fillers first: in one process NIXL may abort where an agent connects
        while the one it connects to is destroyed.
        """
        for engine in (*self.fillers.values(), self.owner):
            engine.close()

    def candidate(self, name: str, epoch: int | None = None) -> FillCandidate:
        """A filler as a router would name it."""
        epoch = self.fillers[name].info.epoch if epoch is None else epoch
        return FillCandidate(worker_id=name, address=name, epoch=epoch)

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        candidates: Sequence[FillCandidate] | None = None,
        sampling: SamplingParams | None = None,
        **values: Any,
    ) -> str:
        """Queues a request; the fillers are its candidates unless others are given."""
        if candidates is None:
            candidates = [self.candidate(name) for name in self.fillers]
        request_id = f"r{next(self._ids)}"
        self.answers[request_id] = Answer()
        self._to_owner.submits.append(
            Submit(
                gateway=1,
                request_id=request_id,
                attempt=1,
                prompt=list(prompt),
                sampling=sampling or SamplingParams(temperature=0.0),
                stop=StopCriteria(max_tokens=max_tokens, ignore_eos=True),
                candidates=list(candidates),
                **values,
            )
        )
        return request_id

    def send(self, **kinds: Any) -> None:
        """Puts messages into the owner's next inbox."""
        for name, value in kinds.items():
            getattr(self._to_owner, name).extend(value)

    def turn(self) -> None:
        """Takes one turn of every engine that is not paused."""
        inbox, self._to_owner = self._to_owner, Inbox()
        self._take_owner(self.owner.turn(inbox))
        for name, filler in self.fillers.items():
            if name not in self.paused:
                inbox, self._to_filler[name] = self._to_filler[name], Inbox()
                self._take_filler(name, filler.turn(inbox))

    def run(self, until: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Turns until a condition holds.

        Raises:
            TimeoutError: it did not in time.
        """
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.owner.counters()} {self.owner.memory.counts()}")
            self.turn()
            if not (self.owner.ran_step or any(f.ran_step for f in self.fillers.values())):
                time.sleep(0.0005)

    def finish(self, *request_ids: str, samples: int = 1) -> list[list[int]]:
        """Runs requests to their end; the first sample's tokens of each."""
        self.run(lambda: all(len(self.answers[i].finished) == samples for i in request_ids))
        return [self.answers[i].tokens[0] for i in request_ids]

    def check_shipped(self, prompt: Sequence[int], num_pages: int) -> None:
        """The answer is the one that the owner gives alone, and the first of its fillers brings
        `num_pages` of the prompt's pages.
        """
        self.owner.memory.flush_cache()
        (alone,) = self.finish(self.submit(prompt, candidates=[]))
        self.owner.memory.flush_cache()
        request_id = self.submit(prompt)
        assert self.finish(request_id) == [alone]
        (fill,) = self.answers[request_id].finished[0].timeline.fills
        page_size = self.owner.config.page_size
        assert (fill.accepted_tokens, fill.failure) == (num_pages * page_size, "")

    def stall(self, seconds: float) -> None:
        """Lets pending work arrive, then lets time pass without a turn."""
        before = self.owner.counters()["fills_failed"]
        for _ in range(10):  # what arrives late is progress, and then time has to pass again
            for _ in range(30):
                self.turn()
                time.sleep(0.002)
            self.clock.offset_s += seconds
            self.turn()
            if self.owner.counters()["fills_failed"] > before:
                return

    def settle(self) -> None:
        """Runs until nothing is open anywhere, and checks that no page is lost."""
        engines = (self.owner, *self.fillers.values())
        self.run(lambda: all(engine.is_idle for engine in engines))
        for engine in engines:
            engine.memory.check_integrity()
            assert engine.memory.counts().used == 0
            staging = engine.parts.transport.staging_counts()
            assert staging is None or staging.used == 0, staging

    def _take_owner(self, outbox: Outbox) -> None:
        for batch in outbox.gateways:
            for failed in batch.failed:
                raise failed.failure.to_error()
            for request_id, _ in batch.computed_here:
                self.answers[request_id].num_told_here += 1
            for tokens in batch.all_tokens():
                known = self.answers[tokens.request_id].tokens.setdefault(tokens.sample, [])
                assert tokens.first_index == len(known), "a token came twice or never"
                known += tokens.ids
            if batch.has_first_tokens:
                for request_id in {tokens.request_id for tokens in batch.all_tokens()}:
                    self.answers[request_id].num_starts += 1
            for vectors in batch.vectors:
                self.answers[vectors.request_id].vectors.append(vectors)
            for routes in batch.routes:
                self.answers[routes.request_id].routes.append(routes.array())
            for finished in batch.finished:
                self.answers[finished.request_id].finished.append(finished)
        for command in outbox.fill_commands:
            self.commands.append(command)
            for passed in self.on_command(command):
                self._to_filler_inbox(passed)

    def _to_filler_inbox(self, command: FillCommand) -> None:
        inbox = self._to_filler[command.worker_id]
        stream = int.from_bytes(command.lease_id[:6], "little")
        if command.action == "start":
            assert command.handle is not None
            self._streams[command.worker_id, stream] = command.lease_id
            inbox.fill_starts.append(FillStart(stream=stream, handle=command.handle))
        elif command.action == "renew":
            inbox.fill_renewals.append(command.lease_id)
        elif command.action == "stop":
            inbox.fill_stops.append(command.lease_id)
        else:
            inbox.lease_queries.append(LeaseQuery(query=stream, lease_id=command.lease_id))
            self._streams[command.worker_id, stream] = command.lease_id

    def _take_filler(self, name: str, outbox: Outbox) -> None:
        for reply in outbox.fill_replies:
            self.events.append(reply.event)
            self._num_taken[name, reply.stream] += 1
            taken = (reply.stream, self._num_taken[name, reply.stream])
            self._to_filler[name].taken_fill_events.append(taken)
            for event in self.on_event(reply.event):
                lease_id = self._streams[name, reply.stream]
                self._to_owner.filler_events.append(FillerEvent(lease_id=lease_id, event=event))
        for lease in outbox.lease_replies:
            self._to_owner.lease_answers.append(
                LeaseAnswer(
                    lease_id=self._streams[name, lease.query],
                    worker_id=name,
                    filler_epoch=self.fillers[name].info.epoch,
                    state=lease.state,
                )
            )
