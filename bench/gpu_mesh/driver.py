"""Requests to a decode worker, with or without a prefill worker beside it; times of every token."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from weft.contract.fills import FillCommand, FillerEvent, FillStart, LeaseAnswer, LeaseQuery
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Cancel, Finished, Submit
from weft.contract.timeline import FillCandidate

from gpu_mesh.worker import FromWorker, run_worker

TIMEOUT_S = 300.0
NO_TIMEOUT_S = 1e6


@dataclass
class Sent:
    """One request."""

    sent_at: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Times at which tokens left the engine, by the host's monotonic clock."""
    finished: Finished | None = None

    @property
    def first_token_s(self) -> float:
        """Time from submit to the first token."""
        return self.times[0] - self.sent_at


class Worker:
    """A worker's process.

    Args:
        config: Fields of `EngineConfig`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=run_worker, args=(other, config), daemon=True)
        self.process.start()
        other.close()
        self.epoch = 0

    def tell(self, kind: str, content: object = ()) -> None:
        """Adds an item to the worker's next inbox."""
        self.connection.send((kind, content))


class Mesh:
    """A decode worker, and perhaps a prefill worker.

    Args:
        decode: Fields of the decode worker's `EngineConfig`.
        prefill: Fields of the prefill worker's; None: the decode worker is alone.
    """

    def __init__(self, decode: dict[str, Any], prefill: dict[str, Any] | None) -> None:
        self.decode = Worker(decode | {"role": "decode", "worker_id": "decode"})
        self.prefill: Worker | None = None
        if prefill is not None:
            config = prefill | {"role": "prefill", "worker_id": "prefill"}
            self.prefill = Worker(config)
        self._workers = [worker for worker in (self.decode, self.prefill) if worker is not None]
        self._streams: dict[int, bytes] = {}
        self._ids = itertools.count()
        self.requests: dict[str, Sent] = {}
        self._counters: dict[str, int] = {}
        self.transport = ""
        """How pages reach the decode worker, by its own description."""
        self.turn_until(lambda: all(worker.epoch for worker in self._workers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.tell("close")
        for worker in self._workers:
            worker.process.join(30)
            worker.process.kill()

    def submit(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Sends a request; returns its id."""
        request_id = str(next(self._ids))
        candidates = []
        if self.prefill is not None:
            candidates = [
                FillCandidate(worker_id="prefill", address="prefill", epoch=self.prefill.epoch)
            ]
        submit = Submit(
            gateway=1,
            request_id=request_id,
            attempt=1,
            prompt=list(prompt),
            sampling=SamplingParams(temperature=0.0),
            stop=StopCriteria(max_tokens=max_tokens, ignore_eos=True),
            candidates=candidates,
            first_token_timeout_s=NO_TIMEOUT_S,
            total_timeout_s=NO_TIMEOUT_S,
        )
        self.requests[request_id] = Sent(time.monotonic())
        self.decode.tell("submits", [submit])
        return request_id

    def cancel(self, request_id: str) -> None:
        """Cancels a request."""
        self.decode.tell("cancels", [Cancel(gateway=1, request_id=request_id, attempt=1)])

    def finish(self, *request_ids: str) -> list[Sent]:
        """Waits for the end of requests."""
        sent = [self.requests[request_id] for request_id in request_ids]
        self.turn_until(lambda: all(request.finished for request in sent))
        return sent

    def flush_decode(self) -> None:
        """Empties the decode worker's prefix cache."""
        self.decode.tell("flush_cache", [0])

    def counters(self) -> dict[str, int]:
        """Counters of the decode worker."""
        self._counters = {}
        self.decode.tell("counters")
        self.turn_until(lambda: bool(self._counters))
        return self._counters

    def turn_until(self, is_over: Callable[[], bool]) -> None:
        """Passes messages on until a condition holds.

        Raises:
            TimeoutError: The condition did not become true in time.
        """
        deadline = time.monotonic() + TIMEOUT_S
        connections: dict[Any, Worker] = {worker.connection: worker for worker in self._workers}
        while not is_over():
            if time.monotonic() > deadline:
                raise TimeoutError("the engines do not answer")
            for connection in wait(list(connections), 1.0):
                assert isinstance(connection, Connection)
                self._take(connections[connection], connection.recv())

    def _take(self, worker: Worker, message: FromWorker) -> None:
        worker.epoch = worker.epoch or message.epoch
        if worker is self.decode:
            self.transport = message.transport or self.transport
        self._counters = self._counters or message.counters
        for command in message.fill_commands:
            self._command(command)
        for reply in message.fill_replies:
            lease_id = self._streams[reply.stream]
            event = FillerEvent(lease_id=lease_id, event=reply.event)
            self.decode.tell("filler_events", [event])
        for lease in message.lease_replies:
            answer = LeaseAnswer(
                lease_id=self._streams[lease.query],
                worker_id="prefill",
                filler_epoch=worker.epoch,
                state=lease.state,
            )
            self.decode.tell("lease_answers", [answer])
        for batch in message.sessions:
            assert not batch.failed, batch.failed
            for tokens in batch.all_tokens():
                sent = self.requests[tokens.request_id]
                sent.tokens += tokens.ids
                sent.times += [message.at] * len(tokens.ids)
            for finished in batch.finished:
                self.requests[finished.request_id].finished = finished

    def _command(self, command: FillCommand) -> None:
        assert self.prefill is not None
        stream = int.from_bytes(command.lease_id[:6], "little")
        self._streams[stream] = command.lease_id
        if command.action == "start":
            assert command.handle is not None
            start = FillStart(stream=stream, handle=command.handle)
            self.prefill.tell("fill_starts", [start])
        elif command.action == "renew":
            self.prefill.tell("fill_renewals", [command.lease_id])
        elif command.action == "stop":
            self.prefill.tell("fill_stops", [command.lease_id])
        else:
            query = LeaseQuery(query=stream, lease_id=command.lease_id)
            self.prefill.tell("lease_queries", [query])
