"""A client of a Valkey or Redis server or cluster in which every failure is a miss.

A key whose node does not answer in time counts as missing. Each node has its own connections and
its own circuit breaker, so a lost node costs its share of the keys and a few timeouts. Commands are
sent once: after a redirection the map of the cluster is read again, and the key is a miss until
then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from valkey.asyncio import ConnectionPool, SSLConnection, Valkey
from valkey.crc import VALKEY_CLUSTER_HASH_SLOTS, key_slot
from valkey.exceptions import ResponseError, ValkeyError
from weft.common.rpc.breaker import Breaker, BreakerState
from weft.contract.clock import Clock, monotonic
from weft.contract.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Consecutive failures after which a node gets no calls for a while."""
MAX_OPEN_S = 15.0
MAX_CALLS = 16
"""Most concurrent calls to one node."""
MAP_REST_S = 1.0
"""Seconds between two attempts to read the map of a cluster."""
SCAN_COUNT = 1000
_REDIRECTIONS = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN")
_NO_CLUSTER = "cluster support disabled"

Command = tuple[bytes | str | int, ...]
"""A command; its second item is the key."""


def read_password(file: Path, param: str) -> str:
    """Reads the password of servers. `param` is the name of the setting, for the error.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}", param=param) from error


class NoAnswer:
    """Takes the place of a reply that did not come."""


NO_ANSWER: Final = NoAnswer()
Reply = bytes | int | bool | None | ResponseError | NoAnswer
"""A server's reply: bytes, a number, None for a missing key, or a refusal."""


@dataclass(slots=True)
class ServerCounters:
    """Counters since start."""

    calls: int = 0
    """Number of batches of commands, each to one node."""
    failed_calls: int = 0
    """Calls that broke or came too late."""
    skipped_commands: int = 0
    """Commands not sent because their node is resting after failures."""
    redirections: int = 0


class _Node:
    def __init__(self, name: str, pool: ConnectionPool) -> None:
        self.name = name
        self.client = Valkey.from_pool(pool)
        self.breaker = Breaker(MAX_FAILURES, open_s=0.5, max_open_s=MAX_OPEN_S)
        self.places = asyncio.Semaphore(MAX_CALLS)
        self.problem = ""
        """Error of the last call; empty: it succeeded."""

    async def close(self) -> None:
        with contextlib.suppress(ValkeyError, OSError):
            await self.client.connection_pool.disconnect()


def _check_names(pool: ConnectionPool) -> None:
    """Makes the pool check that servers' certificates name their hosts, unless the URL disables it.

    By default the library accepts any certificate of the authority, so that each holder of one
    could pose as the server.
    """
    about = pool.connection_kwargs
    if not issubclass(pool.connection_class, SSLConnection):
        return
    is_checked = str(about.get("ssl_check_hostname", True)).lower() not in ("false", "no", "0")
    has_certificate = about.get("ssl_cert_reqs", "required") != "none"
    about["ssl_check_hostname"] = is_checked and has_certificate


class ValkeyServers:
    """All servers of one or several URLs. Belongs to the event loop.

    Args:
        urls: URL of one server, or of some nodes of one cluster.
        password: None: it is in the URLs, or there is none.
        timeout_s: Seconds to connect, and to answer.
        clock: Monotonic seconds.
        param: Name of the setting with the URLs, for errors.

    Raises:
        ConfigError: A URL is not valid.
    """

    def __init__(
        self,
        urls: Sequence[str],
        password: str | None,
        timeout_s: float,
        clock: Clock = monotonic,
        param: str = "valkey_url",
    ) -> None:
        self._param = param
        self._options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
        }
        if password is not None:
            self._options["password"] = password
        self._timeout_s = timeout_s
        self._clock = clock
        self._seeds = [self._seed(url) for url in urls]
        self._nodes: dict[str, _Node] = {node.name: node for node in self._seeds}
        self._slots: list[_Node | None] | None = None
        """Node by slot; None: not known yet, or there is no cluster."""
        self._is_cluster: bool | None = None
        self._is_stale = True
        self._read_again_at = 0.0
        self._map_task: asyncio.Task[None] | None = None
        self.counters = ServerCounters()

    def _seed(self, url: str) -> _Node:
        try:
            pool = ConnectionPool.from_url(url, **self._options)
            _check_names(pool)
            # Otherwise unknown options would show only at the first call.
            pool.make_connection()  # type: ignore[no-untyped-call]
        except (ValueError, TypeError):
            # The error may quote a password that has characters which end a URL's first part.
            raise ConfigError(
                "a URL is not valid: write valkey://HOST:PORT, and special characters of a "
                "password as %XX, or put it into a file",
                param=self._param,
            ) from None
        about = pool.connection_kwargs
        name = about.get("path") or f"{about.get('host', 'localhost')}:{about.get('port', 6379)}"
        return _Node(str(name), pool)

    # -- commands --------------------------------------------------------------------------------

    async def call(self, commands: Sequence[Command], timeout_s: float) -> list[Reply]:
        """Sends commands, batched by node, and returns the replies in their order. Never raises for
        failures of servers. `timeout_s` is the time for all of them.
        """
        replies: list[Reply] = [NO_ANSWER] * len(commands)
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._read_map()
        except TimeoutError:
            return replies
        groups: dict[_Node, list[int]] = {}
        for index, command in enumerate(commands):
            node = self._node_of(command[1])
            if node is not None:
                groups.setdefault(node, []).append(index)
        await asyncio.gather(
            *(
                self._ask(node, [commands[i] for i in indices], indices, replies, deadline)
                for node, indices in groups.items()
            )
        )
        return replies

    async def _ask(
        self,
        node: _Node,
        commands: Sequence[Command],
        indices: Sequence[int],
        replies: list[Reply],
        deadline: float,
    ) -> None:
        async with self._calling(node, len(commands), deadline) as is_allowed:
            if not is_allowed:
                return
            pipeline = node.client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            found = await pipeline.execute(raise_on_error=False)
            for index, reply in zip(indices, found, strict=True):
                if isinstance(reply, ResponseError) and str(reply).startswith(_REDIRECTIONS):
                    self.counters.redirections += 1
                    self._is_stale = True
                else:
                    replies[index] = reply

    @contextlib.asynccontextmanager
    async def _calling(
        self, node: _Node, num_commands: int, deadline: float
    ) -> AsyncIterator[bool]:
        """Yields whether the call may be made, and absorbs its failures."""
        if node.breaker.problem(self._clock()):
            self.counters.skipped_commands += num_commands
            yield False
            return
        node.breaker.begin()
        self.counters.calls += 1
        try:
            async with asyncio.timeout_at(deadline), node.places:
                yield True
        except (ValkeyError, OSError) as error:  # TimeoutError is an OSError.
            self.counters.failed_calls += 1
            self._is_stale = True
            problem = str(error) or "no answer in time"
            if not node.problem:
                logger.warning("valkey at %s: %s: what it keeps is missing", node.name, problem)
            node.problem = problem
            node.breaker.failed(self._clock(), problem)
        except BaseException:
            node.breaker.abandoned()
            raise
        else:
            if node.problem:
                logger.info("valkey at %s answers again", node.name)
            node.problem = ""
            node.breaker.succeeded()

    async def greet(self) -> None:
        """Asks the servers until one answers, so that the log tells at the start which servers do
        not answer, and later that they do.
        """
        while self._is_cluster is None:
            await self._read_map()
            await asyncio.sleep(MAP_REST_S)

    # -- the map ---------------------------------------------------------------------------------

    def _node_of(self, key: bytes | str | int) -> _Node | None:
        if self._is_cluster is False:
            return self._seeds[0]
        if self._slots is None:
            return None
        assert isinstance(key, bytes)
        return self._slots[key_slot(key)]

    async def _read_map(self) -> None:
        """Reads the cluster's map if it is outdated; waits only if there is none."""
        if self._is_stale and self._is_cluster is not False and self._map_task is None:
            if self._clock() < self._read_again_at:
                return
            self._read_again_at = self._clock() + MAP_REST_S
            self._map_task = asyncio.create_task(self._ask_for_map())
        if self._map_task is not None and self._is_cluster is None:
            await asyncio.shield(self._map_task)

    async def _ask_for_map(self) -> None:
        try:
            known = sorted(
                dict.fromkeys([*self._nodes.values(), *self._seeds]), key=lambda n: bool(n.problem)
            )
            for node in known:
                if await self._read_map_of(node):
                    self._is_stale = False
                    return
        except Exception:
            logger.exception("valkey: the cluster's map cannot be read")
        finally:
            self._map_task = None

    async def _read_map_of(self, node: _Node) -> bool:
        """Returns whether the node answered."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        async with self._calling(node, 1, deadline) as is_allowed:
            if not is_allowed:
                return False
            try:
                told = await node.client.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            except ResponseError as error:
                if _NO_CLUSTER not in str(error):
                    raise
                self._is_cluster = False
                return True
            await self._take_map(node, told)
            return True
        return False

    async def _take_map(self, teller: _Node, told: Sequence[Sequence[Any]]) -> None:
        slots: list[_Node | None] = [None] * VALKEY_CLUSTER_HASH_SLOTS
        nodes: dict[str, _Node] = {}
        about = teller.client.connection_pool.connection_kwargs
        for first, last, owner, *_ in told:
            # A node that does not know its own address leaves it out.
            host = bytes(owner[0] or b"").decode() or about["host"]
            node = self._node_at(host, int(owner[1]))
            nodes[node.name] = node
            slots[first : last + 1] = [node] * (last + 1 - first)
        gone = [node for name, node in self._nodes.items() if name not in nodes]
        self._is_cluster, self._slots, self._nodes = True, slots, nodes
        for node in gone:
            if node not in self._seeds:
                await node.close()

    def _node_at(self, host: str, port: int) -> _Node:
        name = f"{host}:{port}"
        known = self._nodes.get(name) or next((n for n in self._seeds if n.name == name), None)
        if known is not None:
            return known
        pool = self._seeds[0].client.connection_pool
        options = dict(pool.connection_kwargs) | {"host": host, "port": port}
        return _Node(name, ConnectionPool(connection_class=pool.connection_class, **options))

    # -- the rest --------------------------------------------------------------------------------

    async def remove_all(self, pattern: str, timeout_s: float) -> int:
        """Deletes every key that matches a pattern; returns how many, as far as time allowed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._read_map()
        if self._is_cluster is None:
            return 0
        nodes = list(self._nodes.values()) if self._is_cluster else self._seeds[:1]
        deadline = asyncio.get_running_loop().time() + timeout_s
        return sum(
            await asyncio.gather(*(self._remove_of(node, pattern, deadline) for node in nodes))
        )

    async def _remove_of(self, node: _Node, pattern: str, deadline: float) -> int:
        num_removed = 0
        async with self._calling(node, 1, deadline) as is_allowed:
            if not is_allowed:
                return 0
            cursor = 0
            while True:
                cursor, names = await node.client.scan(cursor, match=pattern, count=SCAN_COUNT)
                pipeline = node.client.pipeline(transaction=False)
                # The keys are of different slots, so each is deleted by its own command.
                for name in names:
                    pipeline.unlink(name)
                found = await pipeline.execute(raise_on_error=False) if names else []
                num_removed += sum(reply for reply in found if isinstance(reply, int))
                if not cursor:
                    break
        return num_removed

    @property
    def num_resting(self) -> int:
        """Number of nodes that get no calls after failures."""
        now = self._clock()
        return sum(
            node.breaker.state(now) is not BreakerState.CLOSED for node in self._nodes.values()
        )

    @property
    def num_nodes(self) -> int:
        """Number of known nodes that have slots."""
        return len(self._nodes) if self._is_cluster else 1

    def describe(self) -> str:
        """Describes the servers and their problems, for people."""
        if self._is_cluster is None:
            kind = f"valkey at {', '.join(node.name for node in self._seeds)}, not reached yet"
        elif self._is_cluster:
            kind = f"valkey cluster of {len(self._nodes)} nodes"
        else:
            kind = f"valkey at {self._seeds[0].name}"
        problems = [f"{node.name}: {node.problem}" for node in self._nodes.values() if node.problem]
        return f"{kind} ({'; '.join(problems)})" if problems else kind

    async def close(self) -> None:
        """Closes every connection."""
        if self._map_task is not None:
            self._map_task.cancel()
        await asyncio.gather(*(node.close() for node in {*self._seeds, *self._nodes.values()}))
