"""Ranks on several hosts: how the first ranks of hosts meet, and what rank 0 has of the others.

host i                                   host 0
connects to the rendezvous: a link    -> checks version, role, hosts, number
connects again for each of frames,    -> waits for all hosts
memory, writes and beats
                                      <- settings, and where the next stage listens
connects there: rows of its stage
loads its stage, agrees to each phase -> the same

                                      <- a beat now and then, from then on

With several ranks on each host, its first one starts the others, hands frames and rows on to them,
and answers for them.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.contract.errors import ConfigError, error_class
from weft.contract.version import version
from weft.engine.base.config import EngineConfig
from weft.engine.executor.ranks.host_memory import OtherHosts
from weft.engine.executor.ranks.host_writes import OtherWriters
from weft.engine.executor.ranks.leader import Follower, RankLeader
from weft.engine.executor.ranks.link import LinkClosed, RankLink, config_of_json, config_to_json
from weft.engine.executor.ranks.start import Ranks
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.host_sockets import (
    Address,
    HostTls,
    accept,
    connect,
    end_when_lost,
    listen,
    parse_address,
    receive_message,
    send_message,
)
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.stage_links import SocketStages, StageEnds
from weft.engine.parallel.stages import names_of_neighbours

logger = logging.getLogger(__name__)

START_LIMIT_S = 3600.0
"""Longest wait for another host during the start."""
_LOCAL = (
    *("model_dir", "device", "num_threads", "bindings", "host_rank", "rendezvous", "worker_id"),
    *("tls_cert", "tls_key", "tls_ca", "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "nics"),
    *("hosts", "disk_cache_dir"),
)
"""Settings that each host has of its own. It takes all others from host 0."""
_WATCH_S = 0.5
_REASON_S = 2.0
"""A host that is lost may still say why within this time."""
_LOST_S = 60.0
"""During the start a host that the network does not reach for so long is lost."""
_ACCEPT_S = 10.0
_KIND, _NUMBER, _ROWS_AT = "kind", "host_rank", "rows_at"
_FRAMES, _MEMORY, _WRITES, _BEATS = _ENDS = "frames", "memory", "writes", "beats"


class HostLink(RankLink):
    """A link to a rank of another host. It carries no memory."""

    def send(self, message: Mapping[str, object], memory: int | None = None) -> None:
        assert memory is None, "hosts share no memory"
        try:
            send_message(self._socket, message)
        except OSError as error:
            raise LinkClosed from error

    def receive(self) -> tuple[dict[str, Any], int | None]:
        try:
            return receive_message(self._socket), None
        except OSError as error:
            raise LinkClosed from error

    def last_word(self) -> str:
        """Why the other end has ended, if it says so; waits only for a moment."""
        self._socket.settimeout(_REASON_S)
        try:
            return str(self.receive()[0].get("error", ""))
        except LinkClosed:
            return ""

    def is_gone(self) -> bool:
        """Whether the other end has closed. Call it while that end has nothing to say."""
        return bool(select.select([self._socket], [], [], 0.0)[0])


class _OtherHost(NamedTuple):
    number: int
    rank: int
    """Its first rank."""
    link: HostLink
    address: Address
    """Where its stage takes rows, as it and the others reach it."""


def tls_of(config: EngineConfig) -> HostTls | None:
    """None: the mesh has no TLS."""
    if config.tls_cert is None or config.tls_key is None or config.tls_ca is None:
        return None
    name = f"{config.role}.weft.internal"
    return HostTls(config.tls_cert, config.tls_key, config.tls_ca, name)


class HostRanks(RankLeader):
    """Rank 0's handle on the ranks of the other hosts."""

    def __init__(self, config: EngineConfig, wake: Callable[[], None] = lambda: None) -> None:
        """Waits for the other hosts. Raises ConfigError if they do not come, or this host cannot
        listen at the rendezvous.
        """
        super().__init__(config.num_ranks, config.tp, config.rank_timeout_s, wake)
        self._num_hosts = config.hosts
        self._address = parse_address(config.rendezvous)
        self._local: Ranks | None = None
        self._hosts: list[_OtherHost] = []
        self._group = HostGroup({}, START_LIMIT_S)
        self.memory = OtherHosts((), self._group, wake)
        self.writers = OtherWriters((), self._group, wake, self.memory)
        self._rows: socket.socket | None = None
        self._beats: Sequence[socket.socket] = ()
        self._watcher: threading.Thread | None = None
        try:
            with listen(self._address) as listener:
                self._gather(config, listener)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="hosts", daemon=True)
        self._watcher.start()

    def _gather(self, config: EngineConfig, listener: socket.socket) -> None:
        deadline, tls = time.monotonic() + START_LIMIT_S, tls_of(config)
        logger.info("waiting for %d hosts at %s", config.hosts - 1, self._address)
        ends: dict[str, dict[int, socket.socket]] = {kind: {} for kind in _ENDS}
        while any(len(of_kind) < config.hosts - 1 for of_kind in ends.values()):
            self._meet(config, listener, tls, deadline, ends)
        frames, memory, writes, beats = (ends[kind] for kind in _ENDS)
        self._beats = list(beats.values())
        self._group = HostGroup(frames, START_LIMIT_S)
        self._group.why = lambda: self._why
        self.memory = OtherHosts([memory[rank] for rank in sorted(memory)], self._group, self._wake)
        in_order = [writes[rank] for rank in sorted(writes)]
        self.writers = OtherWriters(in_order, self._group, self._wake, self.memory)
        # The last of the other hosts connects while `agree` waits for it.
        acceptor = threading.Thread(
            target=self._accept_rows, args=(listener, tls, deadline), name="rows", daemon=True
        )
        acceptor.start()
        for host in self._hosts:
            after = host.rank + config.tp
            to = self._address if after == self.size else self._host(after).address
            self._send(host, {"config": config_to_json(config), _ROWS_AT: list(to)})
        self.agree("connected")
        acceptor.join(_ACCEPT_S)
        if self._rows is None:
            raise ConfigError(f"host {config.hosts - 1} has not sent its rows here", param="hosts")
        names = names_of_neighbours(0, config.pp, config.tp)
        copies: Sequence[socket.socket] = ()
        if config.tp > 1:
            self._local = Ranks(config, self._lose_local)
            self._group.local, copies = self._local.group, self._local.copies
            self.store_path = self._local.store_path
        rows = StageEnds(self._rows, None)
        self.neighbours = SocketStages(
            rows, self._group, config.pp - 1, names, config.most_sent_rows, copies
        )

    def _accept_rows(self, listener: socket.socket, tls: HostTls | None, deadline: float) -> None:
        with contextlib.suppress(OSError, ConfigError):  # The listener closes after an error.
            while self._rows is None:
                self._rows = _accepted_rows(listener, tls, deadline)

    def _meet(
        self,
        config: EngineConfig,
        listener: socket.socket,
        tls: HostTls | None,
        deadline: float,
        ends: Mapping[str, dict[int, socket.socket]],
    ) -> None:
        """Takes one connection of another host, or refuses it."""
        found = _accepted(listener, tls, deadline)
        if found is None:
            return
        sock, told = found
        number, kind = told.get(_NUMBER), told.get(_KIND)
        for host in [host for host in self._hosts if host.link.is_gone()]:
            self._hosts.remove(host)
            for of_kind in ends.values():
                of_kind.pop(host.rank, None)
        numbers = [host.number for host in self._hosts]
        if kind in _ENDS and type(number) is int and number in numbers:
            ends[kind][number * config.tp] = sock
            return
        problem = _why_not(config, told, numbers)
        if problem or type(number) is not int:
            logger.warning("refused a host: %s", problem)
            with contextlib.suppress(OSError):
                send_message(sock, {"error": problem, "reason": ConfigError.reason})
            sock.close()
            return
        sock.settimeout(START_LIMIT_S)
        end_when_lost(sock, _LOST_S)
        link, rank = HostLink(sock), number * config.tp
        address = Address(*told[_ROWS_AT])
        self._hosts.append(_OtherHost(number, rank, link, address))
        self._hosts.sort(key=lambda one: one.number)
        logger.info("host %d is here, at %s", number, address.host)
        with contextlib.suppress(LinkClosed):
            link.send({"welcome": number})

    def _host(self, rank: int) -> _OtherHost:
        return next(host for host in self._hosts if host.rank == rank)

    @property
    def group(self) -> HostGroup:
        return self._group

    @property
    def others(self) -> Sequence[Follower]:
        return [*(() if self._local is None else self._local.others), *self._hosts]

    @property
    def places(self) -> Sequence[str]:
        each = self.size // self._num_hosts
        hosts = [self._address.host, *(one.address.host for one in self._hosts)]
        of_ranks = "" if each == 1 else f"{each} ranks of "
        return [f"{of_ranks}host {host}" for host in hosts for _ in range(each)]

    def share(self, size: int) -> Segment:
        return share_on_host(self._local, size)

    def begin(self, limit_s: float) -> None:
        super().begin(limit_s)
        if self._local is not None:
            self._local.begin(limit_s)

    def close(self) -> None:
        self._group.stop()
        if self.neighbours is not None:
            self.neighbours.close()  # Ends the thread that may be reading `_rows`.
        elif self._rows is not None:
            self._rows.close()
        if self._watcher is not None:
            self._watcher.join()
        if self._local is not None:
            self._local.close()
        self._group.close()
        self.memory.close()
        self.writers.close()
        for beat in self._beats:
            beat.close()
        for host in self._hosts:
            host.link.close()

    def _watch(self) -> None:
        """Runs in a separate thread. Ends the group when the connection to a host is lost, or a GPU
        of this host has ended it.
        """
        lost: Sequence[int] = ()
        while not lost and not self._group.is_stopped:
            # Often enough that no other host takes this one for silent.
            lost = self._group.await_loss(min(_WATCH_S, self._limit_s / 4))
            if self._is_ready:
                self._beat()
        if self._group.has_ended and not (lost and self._is_lost):
            return
        if lost:
            said = self._host(lost[0]).link.last_word()
            why = f"{self.ending(lost[0])} during step {self._group.num_frames}"
            self.fail(f"{why}: {said}" if said else why)
        else:
            self.fail(self._group.reason)  # A GPU of this host has waited for too long.
        logger.error("%s", self._why)
        self._wake()

    def _beat(self) -> None:
        """Tells the other hosts that this process runs."""
        for beat in self._beats:
            # Steps find a host that is lost, or so slow that there is no room for a beat.
            with contextlib.suppress(OSError):
                beat.settimeout(0.0)
                beat.send(b"\0")

    def _lose_local(self) -> None:
        """Runs in a thread of the ranks of this host, of which one has ended."""
        assert self._local is not None
        self.fail(self._local.group.reason)
        self._wake()

    def ending(self, rank: int) -> str:
        if self._local is not None and rank < self._local.size:
            return self._local.ending(rank)
        return f"rank {rank} (host {self._host(rank).address.host}) is gone"


def _kind_of(config: EngineConfig) -> str:
    return "cuda" if config.is_on_gpu else "cpu"


def share_on_host(local: Ranks | None, size: int) -> Segment:
    """Makes memory that the ranks of one host map; `local`: the others of this host."""
    return Segment.create(size, "weft-pool") if local is None else local.share(size)


def _why_not(config: EngineConfig, told: Mapping[str, Any], numbers: Collection[int]) -> str:
    """Why a host cannot take part; empty: it can."""
    number = told.get(_NUMBER)
    if told.get("version") != version():
        return f"host {number} runs version {told.get('version')}, host 0 {version()}"
    if told.get("role") != config.role:
        return (
            f"host {number} is of a {told.get('role')} worker, host 0 of a {config.role} worker: "
            "give each worker a --rendezvous of its own"
        )
    if told.get("hosts") != config.hosts:
        return f"host {number} has --hosts {told.get('hosts')}, host 0 has {config.hosts}"
    device, own = told.get("device"), _kind_of(config)
    if device != own:
        return f"host {number} computes on {device}, host 0 on {own}: give all the same --device"
    is_link = told.get(_KIND) == "link"
    if not is_link or type(number) is not int or not 0 < number < config.hosts:
        return f"--host-rank {number}: must be from 1 to {config.hosts - 1}"
    match told.get(_ROWS_AT):
        case [str(), int(port)] if 0 < port < 1 << 16:
            pass
        case _:
            return f"host {number} has told no address at which it takes rows"
    if number in numbers:
        return f"--host-rank {number}: another host has this number"
    return ""


def _accepted(
    listener: socket.socket, tls: HostTls | None, deadline: float
) -> tuple[socket.socket, dict[str, Any]] | None:
    """A connection and its first message; None: it came to nothing. Raises ConfigError at the
    deadline.
    """
    try:
        sock = accept(listener, tls, deadline)
    except TimeoutError as error:
        raise ConfigError(
            f"the other hosts have not come within {START_LIMIT_S:g} s", param="hosts"
        ) from error
    if sock is None:
        logger.warning("a connection at the rendezvous was not trusted, or was lost")
        return None
    try:
        return sock, receive_message(sock)
    except OSError:
        sock.close()
        return None


def _accepted_rows(
    listener: socket.socket, tls: HostTls | None, deadline: float
) -> socket.socket | None:
    """The next connection, if it is that of the stage before."""
    found = _accepted(listener, tls, deadline)
    return found[0] if found is not None and found[1].get(_KIND) == "rows" else None


class Joined(NamedTuple):
    """A host that takes part."""

    config: EngineConfig
    """Settings of host 0, and this host's own where they are local."""
    link: HostLink
    group: HostGroup
    memory: socket.socket
    """Connection over which host 0 reads and writes this host's pages."""
    writes: socket.socket
    """Connection over which host 0 says which pages this host writes to other workers."""
    beats: socket.socket
    """Connection over which host 0 says that it runs."""
    rows: StageEnds
    """Connections to the hosts of the stages beside its own."""


def join(config: EngineConfig) -> Joined:
    """Joins host 0 from another host, which may start later. Raises ConfigError if host 0 refuses
    this host, or hosts cannot reach one another, and LinkClosed if host 0 ends meanwhile.
    """
    number, tls = config.host_rank, tls_of(config)
    rendezvous, deadline = parse_address(config.rendezvous), time.monotonic() + START_LIMIT_S
    logger.info("host %d waits for host 0 at %s", number, rendezvous)
    sock = connect(rendezvous, tls, deadline, is_patient=True)
    own = sock.getsockname()[0]
    sock.settimeout(START_LIMIT_S)
    end_when_lost(sock, _LOST_S)
    link = HostLink(sock)
    # The address that others get is the one from which this host has reached host 0.
    with listen(Address(own, 0)) as listener:
        rows_at = [own, listener.getsockname()[1]]
        link.send(
            {
                _KIND: "link",
                _NUMBER: number,
                "hosts": config.hosts,
                "version": version(),
                "role": config.role,
                "device": _kind_of(config),
                _ROWS_AT: rows_at,
            }
        )
        _check_answer(link.receive()[0])
        ends: dict[str, socket.socket] = {}
        for kind in _ENDS:
            # Host 0 takes one connection after another, with its message.
            ends[kind] = connect(rendezvous, tls, deadline, is_patient=False)
            send_message(ends[kind], {_KIND: kind, _NUMBER: number})
        hello = _check_answer(link.receive()[0])
        to, before = Address(*hello[_ROWS_AT]), None
        try:
            after = connect(to, tls, deadline, is_patient=False)
            send_message(after, {_KIND: "rows", _NUMBER: number})
        except (ConfigError, OSError) as error:
            why = error.message if isinstance(error, ConfigError) else str(error)
            problem = (
                f"host {number} at {own} does not reach the stage after its own: {why}; name host "
                "0 in --rendezvous by an address in the network that joins the hosts"
            )
            link.send({"error": problem, "reason": ConfigError.reason})
            raise ConfigError(problem, param="rendezvous") from error
        while before is None and number > 1:
            if not select.select([listener, sock], [], [], 1.0)[0]:
                continue
            if link.is_gone():
                raise LinkClosed
            before = _accepted_rows(listener, tls, deadline)
    logger.info("host %d joins host 0 at %s from %s", number, rendezvous, own)
    told = config_of_json(hello["config"])
    local = {name: getattr(config, name) for name in _LOCAL}
    config = replace(told, **local)
    group, rows = HostGroup({0: ends[_FRAMES]}, START_LIMIT_S), StageEnds(before, after)
    return Joined(config, link, group, ends[_MEMORY], ends[_WRITES], ends[_BEATS], rows)


def end_when_silent(beats: socket.socket, group: HostGroup, limit_s: float) -> None:
    """Starts a thread that ends the group once host 0 has sent no beat for `limit_s`. Connections
    alone do not show that its process is stopped, for which its system still answers.
    """

    def run() -> None:
        try:
            beats.settimeout(limit_s)
            while beats.recv(64):
                pass
        except TimeoutError:
            group.lose(f"host 0 has been silent for {limit_s:g} s", lambda: None)
        except OSError:
            pass  # The connection for frames has ended too.

    threading.Thread(target=run, name="beats", daemon=True).start()


def _check_answer(message: dict[str, Any]) -> dict[str, Any]:
    if "error" in message:
        raise error_class(str(message["reason"]))(f"host 0: {message['error']}")
    return message
