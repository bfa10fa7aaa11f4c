"""Pages of an engine on several hosts, each of which writes its share of them to owners itself.

Rank 0 tells the other hosts what to write, over one more TCP connection to each, in JSON:

    read            pages, and the frames that a host must have done before: it answers with digests
                    of its share and the time of its clock
    connect         owner, target: it answers when it has tried
    write           owner, target, pages here and there, and until when the host may post the
                    write, by its clock: it answers once the bytes have arrived
    close           owner: it answers whether bytes may still arrive
    close_unused    it answers when it has closed its agents

Each host tells first whether it has NIXL. Leases, digests and notifications are those of one
process: digests of shares are added, and rank 0, which alone sends notifications, writes its share
once the other hosts' bytes have arrived.

Clocks of hosts differ. A host sends its clock's time with each answer to `read`. Rank 0 adds the
time left of the lease and sends the sum with `write`. So a host never posts after the lease, even
if the message is late or its process was stopped meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from weft.contract.clock import monotonic
from weft.contract.errors import ConfigError, RanksLost
from weft.contract.handle import NixlTargetInfo
from weft.contract.layout import PageShare
from weft.engine.base.config import EngineConfig
from weft.engine.executor.ranks.host_memory import OtherHosts, PoolRows
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.host_sockets import poll_message, receive_message, send_message
from weft.pages.marks import WorkMark
from weft.pages.transfer.chunks import LeaseTerm
from weft.pages.transfer.nixl import (
    PeerKey,
    PoolRegion,
    SendAgents,
    TransferError,
    TransferHandle,
    nixl_available,
)
from weft.pages.transfer.shared import WriteHandle
from weft.pages.transfer.ship import poll_pause_s
from weft.pages.transfer.source import PageSource, Reading

logger = logging.getLogger(__name__)

_HELLO_LIMIT_S = 60.0
"""Longest wait for a host to say whether it has NIXL."""
_MASK = (1 << 64) - 1
_BYTES_FIELDS = ("agent_metadata", "agent_metadata_digest")
"""Fields of a target that are sent in hexadecimal."""

Message = dict[str, Any]


def writes_shares(config: EngineConfig) -> bool:
    """Whether the hosts of a worker are to write their shares themselves; GPUs do not."""
    if config.is_on_gpu:
        return False
    is_filler = config.fills_others and config.ships_pages
    return config.hosts > 1 and is_filler and config.transport in ("auto", "nixl")


class HostPool:
    """This host's share of pages: its pool, [num_pages, bytes of the share] uint8."""

    def __init__(self, rows: torch.Tensor, share: PageShare) -> None:
        self._rows = PoolRows(rows, share.pieces)
        self.array: NDArray[np.uint8] = rows.numpy()
        self.region = replace(PoolRegion.of_array(self.array), share=share)

    def check(self, pages: Sequence[int]) -> None:
        """Raises ConnectionError unless all are page numbers of the pool."""
        if not all(type(page) is int and 0 <= page < self._rows.num_rows for page in pages):
            raise ConnectionError(f"pages beyond the pool's {self._rows.num_rows}")

    def digests(self, pages: Sequence[int]) -> NDArray[np.uint64]:
        """What the share adds to the digests of whole pages."""
        numbers = torch.tensor(pages, dtype=torch.int64)
        with torch.inference_mode():
            return self._rows.digests(numbers).numpy().view(np.uint64)


# -- rank 0 --------------------------------------------------------------------------------------


class _Query:
    """A request to all other hosts, and their answers.

    Args:
        due_at: When all must have answered.
        depends_on_owner: Whether an owner may keep a host from answering.
    """

    def __init__(self, count: int, due_at: float, *, depends_on_owner: bool) -> None:
        self.answers: list[Message | None] = [None] * count
        self.due_at = due_at
        self.depends_on_owner = depends_on_owner

    def settle(self) -> list[Message] | None:
        """The answers; None: some are not here. Raises TransferError if a host has failed, once all
        have answered or at once if bytes may still arrive.
        """
        answers = [answer for answer in self.answers if answer is not None]
        is_complete = len(answers) == len(self.answers)
        failures = {
            host: answer
            for host, answer in enumerate(self.answers, 1)
            if answer is not None and "error" in answer
        }
        may_still_arrive = any(answer.get("may_still_arrive") for answer in failures.values())
        if failures and (is_complete or may_still_arrive):
            texts = (f"host {host}: {answer['error']}" for host, answer in failures.items())
            raise TransferError("; ".join(texts), may_still_arrive=may_still_arrive)
        return answers if is_complete else None


class OtherWriters:
    """Rank 0's connections to the other hosts, over which it tells them what to write. Any thread
    may use it.

    Args:
        ends: In the order of the stages.
        wake: Called after a host was lost.
        memory: Knows which frames a host must have done before it reads pages.
    """

    def __init__(
        self,
        ends: Sequence[socket.socket],
        group: HostGroup,
        wake: Callable[[], None],
        memory: OtherHosts,
    ) -> None:
        self._ends, self._group, self._wake = ends, group, wake
        self._memory = memory
        self._lock = threading.Lock()
        self._queries: dict[int, _Query] = {}
        self._num_queries = 0

    def __len__(self) -> int:
        return len(self._ends)

    def hellos(self) -> list[Message]:
        """What each host says of its NIXL. Raises RanksLost."""
        with self._lock:
            try:
                for end in self._ends:
                    end.settimeout(_HELLO_LIMIT_S)
                return [receive_message(end) for end in self._ends]
            except OSError as error:
                self._lose(error)
                raise RanksLost(self._group.reason) from error

    def ask_to_read(self, pages: Sequence[int]) -> _Query:
        values = {"pages": list(pages), "frames": self._memory.num_frames}
        return self.ask("read", [values] * len(self._ends), depends_on_owner=False)

    def ask(
        self,
        kind: str,
        host_values: Sequence[Mapping[str, object]],
        *,
        depends_on_owner: bool = True,
    ) -> _Query:
        """Asks each host. The answers come with `poll`.

        Args:
            depends_on_owner: Whether an owner may keep a host from answering. A host that does not
                answer such a query in time is not lost.
        """
        due_at = monotonic() + self._group.limit_s
        query = _Query(len(self._ends), due_at, depends_on_owner=depends_on_owner)
        with self._lock:
            self._num_queries += 1
            self._queries[self._num_queries] = query
            self._send({"kind": kind, "number": self._num_queries}, host_values)
        return query

    def poll(self) -> None:
        """Takes the answers that have come."""
        with self._lock:
            self._take(0.0)
            self._check_due()

    def wait(self, query: _Query) -> list[Message]:
        """Raises TransferError if a host has failed, or does not answer in time."""
        limit_s = self._group.limit_s
        deadline = monotonic() + limit_s
        with self._lock:
            while (answers := query.settle()) is None:
                left_s = deadline - monotonic()
                self._take(max(0.0, left_s))
                self._check_due()
                if left_s <= 0 and query.settle() is None:
                    raise TransferError(f"no answer within {limit_s:g} s", may_still_arrive=True)
        return answers

    def reject(self, why: str) -> None:
        """Ends the group because of what a host has answered."""
        with self._lock:
            self._lose(ConnectionError(why))

    def _check_due(self) -> None:
        now = monotonic()
        if self._group.is_stopped:
            self._lose(ConnectionError(self._group.reason))
        elif any(query.depends_on_owner for query in self._queries.values()):
            self._renew_due()
        elif any(query.due_at <= now for query in self._queries.values()):
            self._lose(TimeoutError(f"no answer within {self._group.limit_s:g} s"))

    def _renew_due(self) -> None:
        """One thread of a host does all, so an owner may have kept it from any answer until now."""
        due_at = monotonic() + self._group.limit_s
        for query in self._queries.values():
            query.due_at = due_at

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def _send(self, head: Message, host_values: Sequence[Mapping[str, object]]) -> None:
        if self._group.is_stopped:
            self._lose(ConnectionError(self._group.reason))
            return
        try:
            for end, values in zip(self._ends, host_values, strict=True):
                end.settimeout(self._group.limit_s)
                send_message(end, {**head, **values})
        except OSError as error:
            self._lose(error)

    def _take(self, wait_s: float) -> None:
        """Takes all answers that have come, and waits for the first one."""
        try:
            while hosts := _readable(self._ends, wait_s):
                wait_s = 0.0
                for host in hosts:
                    answer = poll_message(self._ends[host], self._group.limit_s)
                    if answer is not None:
                        self._keep(host, answer)
        except (OSError, TypeError, ValueError) as error:
            self._lose(error)

    def _keep(self, host: int, answer: Message) -> None:
        query = self._queries.get(answer.get("number", 0))
        if query is None or query.answers[host] is not None:
            raise ConnectionError("an answer to no query")
        if query.depends_on_owner:
            self._renew_due()
        query.answers[host] = answer
        if None not in query.answers:
            del self._queries[answer["number"]]

    def _lose(self, error: Exception) -> None:
        """Ends the group, and all queries."""
        self._group.lose(f"another host does not write pages: {error}", self._wake)
        lost: Message = {"error": f"lost: {error}", "may_still_arrive": True}
        for query in self._queries.values():
            query.answers = [answer or lost for answer in query.answers]
        self._queries.clear()


class _HostReading(Reading):
    def __init__(
        self,
        pages: Sequence[int],
        own_digests: NDArray[np.uint64],
        query: _Query,
        source: SharesSource,
        began_at: float,
    ) -> None:
        super().__init__(pages)
        self._own_digests, self._query, self._source = own_digests, query, source
        self._began_at, self._is_done = began_at, False

    def is_done(self) -> bool:
        if self._is_done:
            return True
        others = self._source.take_digests(self._query, len(self._own_digests))
        if others is None:
            return False
        self._digest_s = monotonic() - self._began_at
        if len(self._own_digests):
            shares = zip(self._own_digests.tolist(), *others, strict=True)
            self._digests = [sum(parts) & _MASK for parts in shares]
        else:
            self._digests = [0] * len(self.pages)
        self._is_done = True
        return True


class SharesSource(PageSource):
    """The pools of all hosts, whose shares of pages make whole pages."""

    def __init__(self, pool: HostPool, hosts: OtherWriters, *, has_digests: bool) -> None:
        super().__init__(pool.array, has_digests=has_digests)
        self._pool, self._hosts = pool, hosts
        self.clocks: list[float] = [0.0] * len(hosts)
        """Time of each host's clock when it had read the newest pages."""

    def begin(
        self,
        pages: Sequence[int],
        digests: Sequence[int] | None,
        after: WorkMark | None = None,
    ) -> Reading:
        assert after is None, "the step that computes the pages is under way"
        began_at = monotonic()
        digested = pages if self._has_digests else ()
        query = self._hosts.ask_to_read(digested)
        return _HostReading(pages, self._pool.digests(digested), query, self, began_at)

    def take_digests(self, query: _Query, num_pages: int) -> list[list[int]] | None:
        """What each other host adds to the digests of pages; None: some have not answered. Raises
        TransferError.
        """
        self._hosts.poll()
        answers = query.settle()
        if answers is None:
            return None
        if not all(_is_reading(answer, num_pages) for answer in answers):
            why = f"an answer has no digests of {num_pages} pages or no time"
            self._hosts.reject(why)
            raise TransferError(why)
        self.clocks = [answer["clock"] for answer in answers]
        return [answer["digests"] for answer in answers]


def _is_reading(answer: Message, num_pages: int) -> bool:
    clock, digests = answer.get("clock"), answer.get("digests")
    if not isinstance(clock, float) or not math.isfinite(clock) or not isinstance(digests, list):
        return False
    are_digests = all(type(digest) is int and 0 <= digest <= _MASK for digest in digests)
    return are_digests and len(digests) == num_pages


class _SharesHandle:
    """Implements `WriteHandle`: rank 0 posts its own write when those of the others have ended."""

    def __init__(
        self, hosts: OtherWriters, query: _Query, post: Callable[[], TransferHandle]
    ) -> None:
        self._hosts, self._query, self._post = hosts, query, post
        self._own_write: TransferHandle | None = None

    def poll(self) -> Literal["pending", "done"]:
        if self._own_write is None:
            self._hosts.poll()
            if self._query.settle() is None:
                return "pending"
            self._own_write = self._post()
        return self._own_write.poll()


class HostSenders:
    """Implements `Senders`: writes pages of which each host has a share.

    Args:
        own_agents: Write rank 0's share.
        source: Its readings precede the writes.
    """

    def __init__(self, own_agents: SendAgents, source: SharesSource, hosts: OtherWriters) -> None:
        self._own_agents, self._hosts = own_agents, hosts
        self.source = source

    def connect(self, peer_key: PeerKey, target: NixlTargetInfo) -> None:
        self._own_agents.check(target)
        values = {"owner": peer_key, "target": _target_to_json(target)}
        self._hosts.ask("connect", [values] * len(self._hosts))
        self._own_agents.connect(peer_key, target)

    def write(
        self,
        peer_key: PeerKey,
        target: NixlTargetInfo,
        local_pages: Sequence[int],
        remote_pages: Sequence[int],
        notification: bytes,
        term: LeaseTerm | None = None,
    ) -> WriteHandle:
        assert term is not None, "a write of several hosts has a lease"
        self._own_agents.check(target)
        term.check(peer_key[0])
        values = {
            "owner": peer_key,
            "target": _target_to_json(target),
            "pages": list(local_pages),
            "remote_pages": list(remote_pages),
        }
        left_s = term.left_s
        host_values = [values | {"until": clock + left_s} for clock in self.source.clocks]
        post = partial(
            self._own_agents.write, peer_key, target, local_pages, remote_pages, notification, term
        )
        return _SharesHandle(self._hosts, self._hosts.ask("write", host_values), post)

    def close_peer(self, peer_key: PeerKey) -> bool:
        """As `SendAgents.close_peer`, of the agents of all hosts."""
        query = self._hosts.ask("close", [{"owner": peer_key}] * len(self._hosts))
        try:
            may_still_arrive = self._own_agents.close_peer(peer_key)
        finally:
            answers = self._hosts.wait(query)
        return may_still_arrive or any(answer.get("may_still_arrive", True) for answer in answers)

    def close_unused(self) -> None:
        query = self._hosts.ask("close_unused", [{}] * len(self._hosts))
        try:
            self._own_agents.close_unused()
        finally:
            self._hosts.wait(query)

    def describe(self) -> str:
        return f"{self._own_agents.describe()}, each of {1 + len(self._hosts)} hosts its share"

    def close(self) -> None:
        """Closes rank 0's agents. Those of the others end with the connections to them."""
        self._own_agents.close()


def open_senders(
    config: EngineConfig, pool: HostPool, hosts: OtherWriters, notices: list[str]
) -> HostSenders | None:
    """What writes pages over NIXL from all hosts. None: one of them has no NIXL or another version
    of it, so host 0 sends all pages; `notices` and the log say why. Raises RanksLost.
    """
    own_hello = _hello()
    for number, hello in enumerate((own_hello, *hosts.hellos())):
        if hello != own_hello or "problem" in hello:
            problem = hello.get("problem") or f"it has {hello.get('version')}, host 0 another one"
            notice = f"pages of all hosts travel through host 0: host {number}: {problem}"
            notices.append(notice)
            logger.warning(notice)
            return None
    own_agents = SendAgents(_name(config), pool.region)
    source = SharesSource(pool, hosts, has_digests=config.page_digests)
    return HostSenders(own_agents, source, hosts)


def _hello() -> Message:
    is_available, text = nixl_available()
    return {"version": text} if is_available else {"problem": text}


def _name(config: EngineConfig) -> str:
    return f"{config.role}-{config.worker_id}-{config.host_rank}"


# -- the other hosts -----------------------------------------------------------------------------


class HostWriter:
    """Writes the share of a host other than the first as rank 0 tells it, in a thread, until the
    connection to rank 0 ends.
    """

    def __init__(
        self, end: socket.socket, group: HostGroup, pool: HostPool, agents: SendAgents | None
    ) -> None:
        self._end, self._group, self._pool, self._agents = end, group, pool, agents
        self._writes: list[tuple[int, TransferHandle]] = []
        self._moved_at = monotonic()

    def run(self) -> None:
        try:
            while True:
                self._turn()
        except (OSError, RanksLost) as error:
            logger.info("writing pages ends: %s", error)
        except Exception:  # Of what is no request, or of this host's own.
            logger.exception("writing pages ends")
        finally:
            self._end.close()  # Rank 0 is gone, or notices that this host is.
            if self._agents is not None:
                with contextlib.suppress(TransferError):  # The process ends with the connection.
                    self._agents.close()

    def _turn(self) -> None:
        """Raises OSError, also for what is no request."""
        is_moving = bool(_readable([self._end], 0.0 if self._writes else None))
        if is_moving:
            message = poll_message(self._end, self._group.limit_s)
            if self._agents is None:
                raise ConnectionError("this host has no NIXL")
            answer = None if message is None else self._answer(message, self._agents)
            if message is not None and answer is not None:
                self._say(message["number"], answer)
        before = len(self._writes)
        self._writes = [one for one in self._writes if not self._has_ended(*one)]
        if is_moving or len(self._writes) < before:
            self._moved_at = monotonic()
        elif self._writes:
            time.sleep(poll_pause_s(monotonic() - self._moved_at))

    def _answer(self, message: Message, agents: SendAgents) -> Message | None:
        match message["kind"]:
            case "read":
                self._pool.check(message["pages"])
                self._group.await_done(int(message["frames"]))
                digests = self._pool.digests(message["pages"]).tolist()
                return {"digests": digests, "clock": monotonic()}
            case "write":
                return self._write(message, agents)
            case "close":
                return _close(agents, _owner(message))
            case "connect":
                return _connect(message, agents)
            case "close_unused":
                return _close_unused(agents)
            case kind:
                raise ConnectionError(f"no request {kind}")

    def _write(self, message: Message, agents: SendAgents) -> Message | None:
        """None: the answer follows when the write ends."""
        if self._group.is_stopped:
            raise RanksLost(self._group.reason)
        until = message["until"]
        if not isinstance(until, float) or not math.isfinite(until):
            raise ConnectionError(f"a lease until {until}")
        term = LeaseTerm.until(until, monotonic)
        target, pages = _target_of_json(message["target"]), message["pages"]
        try:
            handle = agents.write(
                _owner(message), target, pages, message["remote_pages"], b"", term
            )
        except TransferError as error:
            return _failure(error)
        self._writes.append((message["number"], handle))
        return None

    def _has_ended(self, number: int, handle: TransferHandle) -> bool:
        try:
            if handle.poll() == "pending":
                return False
        except TransferError as error:
            self._say(number, _failure(error))
        else:
            self._say(number, {})
        return True

    def _say(self, number: int, answer: Message) -> None:
        self._end.settimeout(self._group.limit_s)
        send_message(self._end, {"number": number} | answer)


def serve_writes(
    config: EngineConfig, end: socket.socket, group: HostGroup, pool: HostPool
) -> None:
    """Says whether this host has NIXL, and writes its share in a thread."""
    hello = _hello()
    agents = None if "problem" in hello else SendAgents(_name(config), pool.region)
    try:
        send_message(end, hello)
    except OSError as error:
        raise ConfigError(f"host 0 is gone: {error}", param="rendezvous") from error
    writer = HostWriter(end, group, pool, agents)
    threading.Thread(target=writer.run, name="host-writes", daemon=True).start()


def _connect(message: Message, agents: SendAgents) -> Message:
    try:
        agents.connect(_owner(message), _target_of_json(message["target"]))
    except TransferError as error:
        logger.warning("cannot connect to %s yet: %s", message["owner"][0], error)
    return {}


def _close(agents: SendAgents, owner: PeerKey) -> Message:
    try:
        return {"may_still_arrive": agents.close_peer(owner)}
    except TransferError as error:
        return _failure(error)


def _close_unused(agents: SendAgents) -> Message:
    try:
        agents.close_unused()
    except TransferError as error:
        return _failure(error)
    return {}


def _failure(error: TransferError) -> Message:
    return {"error": error.message, "may_still_arrive": error.may_still_arrive}


def _owner(message: Message) -> PeerKey:
    worker_id, epoch = message["owner"]
    return str(worker_id), int(epoch)


def _target_to_json(target: NixlTargetInfo) -> Message:
    fields = asdict(target)
    return fields | {name: fields[name].hex() for name in _BYTES_FIELDS}


def _target_of_json(fields: Message) -> NixlTargetInfo:
    return NixlTargetInfo(**fields | {name: bytes.fromhex(fields[name]) for name in _BYTES_FIELDS})


def _readable(ends: Sequence[socket.socket], wait_s: float | None) -> list[int]:
    """Which of the connections have something to read."""
    buffered = [
        number
        for number, end in enumerate(ends)
        if isinstance(end, ssl.SSLSocket) and end.pending()
    ]
    if buffered:
        return buffered
    poller = select.poll()
    for end in ends:
        poller.register(end, select.POLLIN)
    ready = {descriptor for descriptor, _ in poller.poll(None if wait_s is None else 1e3 * wait_s)}
    return [number for number, end in enumerate(ends) if end.fileno() in ready]
