"""Makes the engine hold the adapters that the registry lists for this worker's model."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from weft.common.adapters.manifest import Manifest
from weft.common.adapters.registry import Registry, Stamp
from weft.common.worker.change_log import ChangeLog
from weft.contract.adapters import AdapterOrder, AdapterState
from weft.contract.codec.pairs import ADAPTER, ADAPTER_STATES
from weft.contract.errors import PeerUnavailable, WeftError
from weft.contract.messages import Inbox, Outbox
from weft.contract.reports import LoadReport
from weft.contract.submits import Failure
from weft.contract.wire import MAX_MESSAGE_BYTES, cut
from weft.v1 import worker_pb2

logger = logging.getLogger(__name__)

POLL_S = 0.2
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 60.0
"""Longest time between attempts to load a failing adapter; doubled from the first to the last."""


class WantedAdapters(NamedTuple):
    """A content listed in the registry."""

    name: str
    """Name of its newest entry."""
    is_pinned: bool
    is_lenient: bool
    generation: int
    """Generation of that entry. A content that is registered again is loaded again after a failure.
    """


@dataclass(slots=True)
class _Ordered:
    """An order to the engine about a content, and the answer to it."""

    wanted: WantedAdapters
    query: int
    """Query number of the unanswered order; 0: all are answered."""
    is_held: bool = False
    """Whether requests may name the content, by the engine's last report."""
    error: str = ""
    """Why the engine does not hold the content; if it does, what failed of the last order."""
    retry_at: float = 0.0
    retry_s: float = field(default_factory=lambda: FIRST_RETRY_S)


class AdapterNews(NamedTuple):
    """Changes of a worker's adapters to report."""

    statuses: Sequence[worker_pb2.AdapterStatus]
    gone: Sequence[bytes]
    """Digests of contents that no longer exist."""
    sequence: int
    """Sequence number to ask from the next time."""
    is_all: bool
    """Whether this replaces everything reported before."""


class AdapterFollower:
    """Follows a registry and sends orders to the engine.

    Args:
        model: Served name: adapters of other models are not for this worker.
        send: Sends the engine an inbox; raises PeerUnavailable once the engine is gone.
        poll_s: Seconds between two looks at the registry.
    """

    def __init__(
        self,
        registry: Registry,
        model: str,
        send: Callable[[Inbox], None],
        poll_s: float = POLL_S,
    ) -> None:
        self._registry = registry
        self._model = model
        self._send = send
        self._poll_s = poll_s
        self._queries = itertools.count(1)
        self._ordered: dict[bytes, _Ordered] = {}
        self._open: dict[int, bytes] = {}
        """Unanswered orders."""
        self._states: dict[bytes, AdapterState] = {}
        self._log = ChangeLog(self._is_known)
        self._stamp: Stamp | None = None
        self._wanted: dict[bytes, WantedAdapters] = {}
        self._is_broken = False
        self.generation = 0
        """Generation of the registry that was applied last; 0: it was not read yet."""

    async def run(self) -> None:
        """Follows until cancelled, or until the engine is gone."""
        while True:
            try:
                await self._look()
            except PeerUnavailable:
                return
            except WeftError as error:
                if not self._is_broken:
                    logger.error(
                        "the registry cannot be read, known adapters are kept: %s", error.message
                    )
                self._is_broken = True
            except Exception:
                # An error of one look must not end the following ones.
                if not self._is_broken:
                    logger.exception("following the adapters failed")
                self._is_broken = True
            await asyncio.sleep(self._poll_s)

    async def _look(self) -> None:
        # The stamp is read first, so that a change in between shows at the next look.
        stamp = await asyncio.to_thread(self._registry.stamp)
        generation = self.generation
        if stamp != self._stamp:
            manifest = await asyncio.to_thread(self._registry.read)
            self._stamp = stamp
            self._wanted = wanted_of(manifest, self._model)
            generation = manifest.generation
        self._order(asyncio.get_running_loop().time())
        self.generation, self._is_broken = generation, False

    def _order(self, now: float) -> None:
        for digest in [one for one in self._ordered if one not in self._wanted]:
            del self._ordered[digest]
            self._log.touch(digest)
            order = AdapterOrder(query=next(self._queries), action="unload", digest=digest)
            self._send(Inbox(adapter_orders=[order]))
        for digest, wanted in self._wanted.items():
            ordered = self._ordered.get(digest)
            if ordered is not None and ordered.wanted == wanted and not _is_due(ordered, now):
                continue
            query = next(self._queries)
            if ordered is None:
                self._ordered[digest] = _Ordered(wanted, query)
            else:
                if ordered.wanted != wanted:
                    ordered.retry_s = FIRST_RETRY_S
                ordered.wanted, ordered.query = wanted, query
            self._open[query] = digest
            self._log.touch(digest)
            self._send(Inbox(adapter_orders=[self._load(query, digest, wanted)]))

    def _load(self, query: int, digest: bytes, wanted: WantedAdapters) -> AdapterOrder:
        return AdapterOrder(
            query=query,
            action="load",
            digest=digest,
            name=wanted.name,
            directory=str(self._registry.directory(digest)),
            is_pinned=wanted.is_pinned,
            is_lenient=wanted.is_lenient,
        )

    def on_outbox(self, outbox: Outbox) -> None:
        """Takes the engine's answers and its reports of adapters."""
        for reply in outbox.adapter_replies:
            digest = self._open.pop(reply.query, b"")
            ordered = self._ordered.get(digest)
            if ordered is not None and ordered.query == reply.query:
                self._answered(digest, ordered, reply.failure)
        if outbox.load is not None:
            self._take_report(outbox.load)

    def _take_report(self, load: LoadReport) -> None:
        for digest in load.gone_adapters:
            self._states.pop(digest, None)
            self._log.touch(digest)
        for state in load.adapters:
            self._states[state.digest] = state
            self._log.touch(state.digest)
            held = self._ordered.get(state.digest)
            if held is not None and held.is_held and not held.query and state.state == "failed":
                self._failed(state.digest, held, state.error)

    def _answered(self, digest: bytes, ordered: _Ordered, failure: Failure | None) -> None:
        ordered.query = 0
        ordered.error = ""
        self._log.touch(digest)
        if failure is None:
            ordered.is_held = True
            state = self._states.get(digest)
            if state is not None and state.state == "failed":
                # The state is of an earlier attempt; the next report has the present one.
                del self._states[digest]
        elif ordered.is_held:
            # The content stays held. What failed is the rest of the order, such as a pin.
            ordered.error = self._told(digest, failure.message)
        else:
            self._failed(digest, ordered, failure.message)

    def _told(self, digest: bytes, message: str) -> str:
        """Removes the paths of copies from an error's message."""
        directory = str(self._registry.directory(digest))
        message = message.replace(f" ({directory})", "")
        message = message.replace(f"adapter {directory}", "its copy").replace(directory, "its copy")
        return cut(message, MAX_MESSAGE_BYTES)

    def _failed(self, digest: bytes, ordered: _Ordered, message: str) -> None:
        ordered.is_held = False
        ordered.error = self._told(digest, message)
        ordered.retry_at = asyncio.get_running_loop().time() + ordered.retry_s
        ordered.retry_s = min(LAST_RETRY_S, 2 * ordered.retry_s)
        logger.error("adapter %s: %s", ordered.wanted.name, ordered.error)

    @property
    def states(self) -> Collection[AdapterState]:
        """States of the adapters as reported by the engine; for any thread."""
        return tuple(self._states.values())

    @property
    def version(self) -> tuple[int, int]:
        """A value that changes whenever `news` or `generation` does."""
        return self._log.sequence, self.generation

    def statuses(self) -> list[worker_pb2.AdapterStatus]:
        """States of this worker's adapters, for the wire."""
        leaving = [digest for digest in self._states if digest not in self._ordered]
        found = [self._status(digest) for digest in (*self._ordered, *leaving)]
        return [status for status in found if status is not None]

    def news(self, sequence: int | None) -> AdapterNews:
        """Changes since a watcher's last report, whose sequence number is `sequence`; None: there
        was none.
        """
        changed = None if sequence is None else self._log.since(sequence)
        if changed is None:
            return AdapterNews(self.statuses(), (), self._log.sequence, is_all=True)
        statuses = {digest: self._status(digest) for digest in changed}
        return AdapterNews(
            [status for status in statuses.values() if status is not None],
            [digest for digest, status in statuses.items() if status is None],
            self._log.sequence,
            is_all=False,
        )

    def _is_known(self, digest: bytes) -> bool:
        return digest in self._ordered or digest in self._states

    def _status(self, digest: bytes) -> worker_pb2.AdapterStatus | None:
        ordered, engine = self._ordered.get(digest), self._states.get(digest)
        if ordered is not None:
            return _status(digest, ordered, engine)
        return None if engine is None else _leaving(engine)


def wanted_of(manifest: Manifest, model: str) -> dict[bytes, WantedAdapters]:
    """The contents that a model's workers must hold, oldest first."""
    found: dict[bytes, WantedAdapters] = {}
    for entry in sorted(manifest.entries, key=lambda entry: entry.generation):
        if entry.model == model:
            before = found.get(entry.digest_bytes)
            # A retired content stays for its requests, without a pin that would keep others out.
            is_pinned = entry.is_pinned and entry.state != "retired"
            is_pinned |= before is not None and before.is_pinned
            found[entry.digest_bytes] = WantedAdapters(
                entry.name, is_pinned, entry.is_lenient, entry.generation
            )
    return found


def _is_due(ordered: _Ordered, now: float) -> bool:
    return not ordered.query and not ordered.is_held and now >= ordered.retry_at


def open_registry(root: Path | None) -> Registry | None:
    """Opens the registry in a folder; None: no folder is set.

    Raises:
        ConfigError: The folder does not exist.
    """
    return None if root is None else Registry(root)


def _status(
    digest: bytes, ordered: _Ordered, engine: AdapterState | None
) -> worker_pb2.AdapterStatus:
    reported = engine if ordered.is_held else None
    status = worker_pb2.AdapterStatus() if reported is None else ADAPTER.encode(reported)
    status.adapter.name, status.adapter.digest = ordered.wanted.name, digest
    # While a new order is open, the failure of an earlier one does not count.
    error = "" if ordered.query else ordered.error
    status.error = error
    if reported is None:
        state = "host" if ordered.is_held else "failed" if error else "loading"
        status.state = ADAPTER_STATES.numbers[state]
    return status


def _leaving(engine: AdapterState) -> worker_pb2.AdapterStatus:
    """An adapter that is no longer listed is unloaded with its last request."""
    status = ADAPTER.encode(engine)
    status.unloading = True
    return status
