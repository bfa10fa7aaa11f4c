"""Starts the other ranks of an engine, and watches them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from weft.contract.binding import Binding
from weft.engine.base.config import EngineConfig
from weft.engine.base.placement import NET_VARIABLE, bound_command
from weft.engine.executor.ranks.leader import RankLeader
from weft.engine.executor.ranks.link import LinkClosed, RankLink, config_to_json
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shared import SharedGroup, segment_bytes
from weft.engine.parallel.stage_links import SocketStages, StageEnds, connected_ends
from weft.engine.parallel.stages import names_of_neighbours, stage_of_rank

logger = logging.getLogger(__name__)

MODULE = "weft.engine.executor.ranks.rank_process"
START_LIMIT_S = 3600.0
"""Longest wait for another rank during the start, in which ranks read weights at different speeds.
"""
_EXIT_S = 3.0


class _Follower(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    link: RankLink
    pidfd: int


class Ranks(RankLeader):
    """The other ranks of this host are its processes."""

    def __init__(self, config: EngineConfig, wake: Callable[[], None] = lambda: None) -> None:
        """Starts the processes, which begin to load their shares, and divides the CPU threads among
        the ranks. Raises ConfigError if there is no shared memory, or no native operation to wait
        in it.
        """
        size = config.ranks_of_host
        super().__init__(size, config.tp, config.rank_timeout_s, wake)
        self.rank = config.host_rank * size
        threads = max(1, (config.num_threads or torch.get_num_threads()) // _sharing_ranks(config))
        torch.set_num_threads(threads)
        config = replace(config, num_threads=threads)
        self._segment = Segment.create(segment_bytes(self.size), "weft-ranks")
        self._group = SharedGroup(
            self._segment,
            0,
            self.size,
            START_LIMIT_S,
            is_checked=config.check_ranks,
            first_rank=self.rank,
        )
        self._group.why = lambda: self._why
        self._folder = tempfile.TemporaryDirectory(prefix="weft-ranks-")
        self.store_path = f"{self._folder.name}/store"
        self._ends: list[list[StageEnds]] = []
        """By shard and stage; empty: there is one stage on this host."""
        self.copies: list[socket.socket] = []
        """Where this rank sends the rows that come from another host, by the rank of this one."""
        if config.pp > 1 and config.hosts == 1:
            self._ends = [connected_ends(config.pp) for _ in range(config.tp)]
            names = names_of_neighbours(0, config.pp, config.tp)
            own, most_rows = self._ends[0][-1], config.most_sent_rows
            self.neighbours = SocketStages(own, self.group, config.pp - 1, names, most_rows)
        self._followers: list[_Follower] = []
        self._watcher: threading.Thread | None = None
        try:
            for rank in range(1, self.size):
                self._followers.append(self._start(config, self.rank + rank))
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _start(self, config: EngineConfig, rank: int) -> _Follower:
        ours, theirs = socket.socketpair()
        ours.settimeout(START_LIMIT_S)
        environment = {**os.environ, "OMP_NUM_THREADS": str(config.num_threads)}
        binding = config.bindings[rank] if config.bindings else Binding()
        if binding.net_devices:
            environment[NET_VARIABLE] = binding.net_devices
        command = [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())]
        ends = StageEnds(None, None)
        if self._ends:
            ends = self._ends[rank % config.tp][stage_of_rank(rank, config.pp, config.tp)]
        elif config.hosts > 1:
            copy, before = socket.socketpair()
            self.copies.append(copy)
            ends = StageEnds(before, None)
        numbers = [-1 if end is None else end.fileno() for end in ends]
        with theirs, contextlib.closing(ends):
            process = subprocess.Popen(
                bound_command(command, binding),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *(number for number in numbers if number >= 0)),
                env=environment,
            )
        link = RankLink(ours)
        hello = {
            "config": config_to_json(config),
            "rank": rank,
            "segment": self._segment.size,
            "store_path": self.store_path,
            "stage_ends": numbers,
            "log_level": logging.getLogger().getEffectiveLevel(),
        }
        with contextlib.suppress(LinkClosed):  # The next `agree` reports it.
            link.send(hello, self._segment.number)
        return _Follower(rank, process, link, os.pidfd_open(process.pid))

    @property
    def group(self) -> SharedGroup:
        return self._group

    @property
    def others(self) -> Sequence[_Follower]:
        return self._followers

    @property
    def places(self) -> Sequence[str]:
        return [f"process {pid}" for pid in self.pids]

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, rank 0 included."""
        return [os.getpid(), *(follower.process.pid for follower in self._followers)]

    def share(self, size: int) -> Segment:
        segment = Segment.create(size, "weft-pool")
        for follower in self._followers:
            self._send(follower, {"size": size}, segment.number)
        return segment

    def close(self) -> None:
        self.group.stop()
        if isinstance(self.neighbours, SocketStages):
            self.neighbours.close()
        for follower in self._followers:
            follower.link.close()
            try:
                follower.process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        if self._watcher is not None:
            self._watcher.join()
        for follower in self._followers:
            os.close(follower.pidfd)
        self._followers = []
        for of_shard in self._ends:
            for ends in of_shard:
                ends.close()
        for copy in self.copies:
            copy.close()
        self._folder.cleanup()

    def _watch(self) -> None:
        """Runs in a separate thread. Ends the group when another rank ends, unless `close`
        ends it.
        """
        poll = select.poll()
        for follower in self._followers:
            poll.register(follower.pidfd, select.POLLIN)
        ended = {number for number, _ in poll.poll()}
        if self.group.is_stopped and not self._is_lost:
            return  # `close` ended the group, or a waiting rank has reported the cause.
        if not self._is_ready:
            # Threads that wait for that rank's sums must go on. The next `agree` reports the cause.
            self._why = "another rank has ended during its start"
            self.group.stop()
            return
        (first, *_) = [one for one in self._followers if one.pidfd in ended]
        said = ""
        with contextlib.suppress(LinkClosed):
            said = f": {first.link.receive()[0].get('error', '')}"
        self.fail(f"{self.ending(first.rank)} during step {self.group.num_frames}{said}")
        logger.error("%s", self._why)
        self._wake()

    def ending(self, rank: int) -> str:
        follower = self._followers[rank - self.rank - 1]
        try:
            status = follower.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return f"rank {follower.rank} does not answer any more, but has not ended"
        how = f"exit status {status}" if status >= 0 else f"signal {-status}"
        return f"rank {follower.rank} (process {follower.process.pid}) ended by {how}"


def _sharing_ranks(config: EngineConfig) -> int:
    """Number of ranks among which the threads are divided: those on the cores of rank 0."""
    if config.num_threads or not config.bindings:
        return config.ranks_of_host
    return sum(one.cores == config.bindings[0].cores for one in config.bindings)
