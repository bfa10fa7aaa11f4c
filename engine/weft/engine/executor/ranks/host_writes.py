"""Pages of an engine on several hosts, each of which writes its share of them to owners itself.

Rank 0 tells the other hosts what to write, over one more TCP connection to each, in JSON:

    read            pages, and the frames that a host must have done before: it answers with digests
                    of its share and the time of its clock
    connect         owner, target: no answer
    write           owner, target, pages here and there, and until when the host may post the
                    write, by its clock: it answers once the bytes have arrived
    close           owner: it answers whether bytes may still arrive
    close_unused    it answers when it has closed its agents

Each host tells first whether it has NIXL. Leases, digests and notifications are those of one
process: digests of shares are added, and rank 0, which alone sends notifications, writes its share
once the other hosts' bytes have arrived.

Clocks of hosts differ. A host says its time when it has read pages, and rank 0 adds what then is
left of the lease. So a message that is late on its way, or a host that was suspended, posts nothing
after the lease.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import ssl
import threading
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
from weft.pages.transfer.source import PageSource, Reading

logger = logging.getLogger(__name__)

_POLL_S = 5e-4
"""Time between two looks at writes that are under way."""
_HELLO_LIMIT_S = 60.0
_MASK = (1 << 64) - 1

Message = dict[str, Any]


def writes_shares(config: EngineConfig) -> bool:
    """Whether the hosts of a worker are to write their shares themselves."""
    is_filler = config.fills_others and config.ships_pages
    return config.hosts > 1 and is_filler and config.transport in ("auto", "nixl")


class HostPool:
    """This host's share of pages: its pool, [num_pages, bytes of the share] uint8."""

    def __init__(self, rows: torch.Tensor, share: PageShare) -> None:
        self._rows = PoolRows(rows, share.pieces)
        self.array: NDArray[np.uint8] = rows.numpy()
        self.region = replace(PoolRegion.of_array(self.array), share=share)

    def check(self, pages: Sequence[int]) -> None:
        """Raises ConnectionError for what is no page."""
        if not all(type(page) is int and 0 <= page < self._rows.num_rows for page in pages):
            raise ConnectionError(f"pages beyond the pool's {self._rows.num_rows}")

    def digests(self, pages: Sequence[int]) -> NDArray[np.uint64]:
        """What the share adds to the digests of whole pages."""
        numbers = torch.tensor(pages, dtype=torch.int64)
        with torch.inference_mode():
            return self._rows.digests(numbers).numpy().view(np.uint64)


# -- rank 0 --------------------------------------------------------------------------------------


class _Asked:
    """A request to all other hosts, and their answers.

    Args:
        due_at: When all must have answered.
    """

    def __init__(self, count: int, due_at: float) -> None:
        self.answers: list[Message | None] = [None] * count
        self.due_at = due_at

    def settle(self) -> list[Message] | None:
        """The answers; None: some are not here. Raises TransferError if a host has failed."""
        found = [answer for answer in self.answers if answer is not None]
        for host, answer in enumerate(self.answers, 1):
            if answer is not None and "error" in answer:
                late = bool(answer.get("may_still_arrive"))
                raise TransferError(f"host {host}: {answer['error']}", may_still_arrive=late)
        return found if len(found) == len(self.answers) else None


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
        self._asked: dict[int, _Asked] = {}
        self._num_asked = 0

    def __len__(self) -> int:
        return len(self._ends)

    def hellos(self) -> list[Message]:
        """What each host says of its NIXL. Raises RanksLost."""
        found = []
        for end in self._ends:
            try:
                end.settimeout(_HELLO_LIMIT_S)
                found.append(receive_message(end))
            except OSError as error:
                self._lose(error)
                raise RanksLost(self._group.reason) from error
        return found

    def ask_to_read(self, pages: Sequence[int]) -> _Asked:
        values = {"pages": list(pages), "frames": self._memory.num_frames}
        return self.ask("read", [values] * len(self._ends))

    def ask(
        self, kind: str, each: Sequence[Mapping[str, object]], *, may_be_late: bool = False
    ) -> _Asked:
        """Asks each host. The answers come with `poll`.

        Args:
            may_be_late: Whether the answers depend on more than the hosts, so that one that does
                not answer in time need not be lost.
        """
        due_at = math.inf if may_be_late else monotonic() + self._group.limit_s
        asked = _Asked(len(self._ends), due_at)
        with self._lock:
            self._num_asked += 1
            self._asked[self._num_asked] = asked
            self._send({"kind": kind, "number": self._num_asked}, each)
        return asked

    def tell(self, kind: str, **values: object) -> None:
        """Tells all hosts what they do not answer."""
        with self._lock:
            self._send({"kind": kind}, [values] * len(self._ends))

    def poll(self) -> None:
        """Takes the answers that have come."""
        with self._lock:
            self._take(0.0)
            self._check_due()

    def wait(self, asked: _Asked) -> list[Message]:
        """Raises TransferError if a host has failed, or does not answer in time."""
        with self._lock:
            while (found := asked.settle()) is None:
                self._take(max(0.0, asked.due_at - monotonic()))
                self._check_due()
        return found

    def _check_due(self) -> None:
        now = monotonic()
        if any(asked.due_at <= now for asked in self._asked.values()):
            self._lose(TimeoutError(f"no answer within {self._group.limit_s:g} s"))

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def _send(self, head: Message, each: Sequence[Mapping[str, object]]) -> None:
        if self._group.is_stopped:
            self._lose(ConnectionError(self._group.reason))
            return
        try:
            for end, values in zip(self._ends, each, strict=True):
                end.settimeout(self._group.limit_s)
                send_message(end, {**head, **values})
        except OSError as error:
            self._lose(error)

    def _take(self, wait_s: float) -> None:
        try:
            for host in _readable(self._ends, wait_s):
                answer = poll_message(self._ends[host], self._group.limit_s)
                asked = None if answer is None else self._asked.get(answer.get("number", 0))
                if answer is not None and asked is not None:
                    asked.answers[host] = answer
                    if None not in asked.answers:
                        del self._asked[answer["number"]]
        except (OSError, TypeError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Ends the group, and everything that was asked."""
        if not self._group.is_stopped:
            why = f"another host does not write pages: {error}"
            self._group.why = lambda: why
            self._group.stop()
            self._wake()
        lost: Message = {"error": f"lost: {error}", "may_still_arrive": True}
        for asked in self._asked.values():
            asked.answers = [answer or lost for answer in asked.answers]
        self._asked.clear()


class _HostReading(Reading):
    def __init__(
        self, pages: Sequence[int], own: NDArray[np.uint64], asked: _Asked, source: SharesSource
    ) -> None:
        super().__init__(pages)
        self._own, self._asked, self._source = own, asked, source
        self._began_at, self._is_done = monotonic(), False

    def is_done(self) -> bool:
        if self._is_done:
            return True
        answers = self._source.answers(self._asked)
        if answers is None:
            return False
        self._is_done = True
        self._digest_s = monotonic() - self._began_at
        if not len(self._own):
            self._digests = [0] * len(self.pages)
            return True
        every = zip(self._own.tolist(), *(answer["digests"] for answer in answers), strict=True)
        self._digests = [sum(parts) & _MASK for parts in every]
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
        own = np.zeros(0, np.uint64)
        if self._has_digests:
            own = self._pool.digests(pages)
        asked = self._hosts.ask_to_read(pages if self._has_digests else ())
        return _HostReading(pages, own, asked, self)

    def answers(self, asked: _Asked) -> list[Message] | None:
        """None: they are not all here. Raises TransferError."""
        self._hosts.poll()
        found = asked.settle()
        if found is not None:
            self.clocks = [float(answer["clock"]) for answer in found]
        return found


class _SharesHandle:
    """Implements `WriteHandle`: rank 0 posts its own write when those of the others have ended."""

    def __init__(
        self, hosts: OtherWriters, asked: _Asked, post: Callable[[], TransferHandle]
    ) -> None:
        self._hosts, self._asked, self._post = hosts, asked, post
        self._own: TransferHandle | None = None

    def poll(self) -> Literal["pending", "done"]:
        if self._own is None:
            self._hosts.poll()
            if self._asked.settle() is None:
                return "pending"
            self._own = self._post()
        return self._own.poll()


class HostSenders:
    """Implements `Senders`: writes pages of which each host has a share.

    Args:
        own: Writes rank 0's share.
        source: Its readings precede the writes.
    """

    def __init__(self, own: SendAgents, source: SharesSource, hosts: OtherWriters) -> None:
        self._own, self._hosts = own, hosts
        self.source = source

    def connect(self, peer_key: PeerKey, target: NixlTargetInfo) -> None:
        self._own.check(target)
        self._hosts.tell("connect", owner=peer_key, target=_target_to_json(target))
        self._own.connect(peer_key, target)

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
        self._own.check(target)
        term.check(peer_key[0])
        values = {
            "owner": peer_key,
            "target": _target_to_json(target),
            "pages": list(local_pages),
            "remote_pages": list(remote_pages),
        }
        left_s = term.left_s
        each = [values | {"until": clock + left_s} for clock in self.source.clocks]
        post = partial(
            self._own.write, peer_key, target, local_pages, remote_pages, notification, term
        )
        return _SharesHandle(self._hosts, self._hosts.ask("write", each, may_be_late=True), post)

    def close_peer(self, peer_key: PeerKey) -> bool:
        """As `SendAgents.close_peer`, of the agents of all hosts."""
        asked = self._hosts.ask("close", [{"owner": peer_key}] * len(self._hosts))
        try:
            is_open = self._own.close_peer(peer_key)
        finally:
            answers = self._hosts.wait(asked)
        return is_open or any(answer["may_still_arrive"] for answer in answers)

    def close_unused(self) -> None:
        asked = self._hosts.ask("close_unused", [{}] * len(self._hosts))
        self._own.close_unused()
        self._hosts.wait(asked)

    def describe(self) -> str:
        return f"{self._own.describe()}, each of {1 + len(self._hosts)} hosts its share"

    def close(self) -> None:
        """Closes rank 0's agents. Those of the others end with the connections to them."""
        self._own.close()


def open_senders(config: EngineConfig, pool: HostPool, hosts: OtherWriters) -> HostSenders | None:
    """What writes pages over NIXL from all hosts. None: one of them has no NIXL or another one, so
    host 0 sends all pages, and the log says why. Raises RanksLost.
    """
    here = _hello()
    told = hosts.hellos()
    for number, hello in enumerate((here, *told)):
        if hello != here or "problem" in hello:
            problem = hello.get("problem") or f"it has {hello.get('version')}, host 0 another one"
            logger.warning("pages of all hosts travel through host 0: host %d: %s", number, problem)
            return None
    own = SendAgents(_name(config), pool.region)
    source = SharesSource(pool, hosts, has_digests=config.page_digests)
    return HostSenders(own, source, hosts)


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

    def run(self) -> None:
        try:
            while True:
                self._turn()
        except (OSError, RanksLost, TypeError, ValueError, KeyError) as error:
            logger.info("writing pages ends: %s", error)
        finally:
            self._end.close()  # Rank 0 is gone, or notices that this host is.
            if self._agents is not None:
                with contextlib.suppress(TransferError):  # The process ends with the connection.
                    self._agents.close()

    def _turn(self) -> None:
        """Raises OSError, also for what is no request."""
        if _readable([self._end], _POLL_S if self._writes else None):
            message = poll_message(self._end, self._group.limit_s)
            if self._agents is None:
                raise ConnectionError("this host has no NIXL")
            answer = None if message is None else self._answer(message, self._agents)
            if message is not None and answer is not None:
                self._say(message["number"], answer)
        self._writes = [one for one in self._writes if not self._has_ended(*one)]

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
                self._connect(message, agents)
            case "close_unused":
                return _close_unused(agents)
            case kind:
                raise ConnectionError(f"no request {kind}")
        return None

    def _write(self, message: Message, agents: SendAgents) -> Message | None:
        """None: the answer follows when the write ends."""
        term = LeaseTerm(0.0, monotonic)
        term.expires_at = float(message["until"])
        target, pages = _target_of_json(message["target"]), message["pages"]
        try:
            handle = agents.write(
                _owner(message), target, pages, message["remote_pages"], b"", term
            )
        except TransferError as error:
            return _failure(error)
        self._writes.append((message["number"], handle))
        return None

    def _connect(self, message: Message, agents: SendAgents) -> None:
        try:
            agents.connect(_owner(message), _target_of_json(message["target"]))
        except TransferError as error:
            logger.warning("cannot connect to %s yet: %s", message["owner"][0], error)

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
    return {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in asdict(target).items()
    }


def _target_of_json(told: Message) -> NixlTargetInfo:
    names = ("agent_metadata", "agent_metadata_digest")
    return NixlTargetInfo(**told | {name: bytes.fromhex(told[name]) for name in names})


def _readable(ends: Sequence[socket.socket], wait_s: float | None) -> list[int]:
    """Which of the connections have something to read."""
    found = [
        number
        for number, end in enumerate(ends)
        if isinstance(end, ssl.SSLSocket) and end.pending()
    ]
    if found:
        return found
    ready, _, _ = select.select(ends, [], [], wait_s)
    return [number for number, end in enumerate(ends) if end in ready]
