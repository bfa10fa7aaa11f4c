"""What rank 0 asks and hears of the other ranks, on one host or several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weft.contract.errors import ConfigError, RanksLost, error_class
from weft.engine.executor.rank_jobs import RankResult, joined
from weft.engine.executor.ranks.link import LinkClosed, RankLink
from weft.engine.model.stage import Neighbours
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shared import SharedGroup


class Follower(Protocol):
    """Another rank, as rank 0 has it."""

    @property
    def rank(self) -> int: ...

    @property
    def link(self) -> RankLink: ...


class RankLeader(ABC):
    """The handle of rank 0 on the other ranks of an engine, or of the first rank of a host on those
    of its host.

    Args:
        tp: Ranks of each stage.
        limit_s: Longest wait for another rank in a step.
        wake: Called from another thread when a rank has ended.
    """

    rank = 0
    store_path = ""
    """File at which the GPUs' ranks find one another."""

    def __init__(self, size: int, tp: int, limit_s: float, wake: Callable[[], None]) -> None:
        self.size = size
        self._tp = tp
        self._limit_s = limit_s
        self._wake = wake
        self._why = "the ranks are ending"
        self._is_lost = self._is_ready = False
        self.notices: list[str] = []
        """What users should know of the other ranks."""
        self.neighbours: Neighbours | None = None
        """The stages beside that of rank 0; None: there are no stages."""

    @property
    @abstractmethod
    def group(self) -> SharedGroup | HostGroup:
        """How the ranks communicate in steps."""

    @property
    @abstractmethod
    def places(self) -> Sequence[str]:
        """Where each rank runs, in words, rank 0 included."""

    @abstractmethod
    def share(self, size: int) -> Segment:
        """Makes memory for the pool that all ranks map. Raises ConfigError if the system refuses
        it, or a rank is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the other ranks. On a CPU it also closes the links to the stages beside."""

    @property
    @abstractmethod
    def others(self) -> Sequence[Follower]:
        """The ranks to which this one has a link, in their order."""

    @abstractmethod
    def ending(self, rank: int) -> str:
        """How a rank has ended, in words."""

    def agree(self, phase: str, number: int = 0, text: str = "") -> int:
        """Waits until all ranks have completed a phase of the start.

        Args:
            number: This rank's number, for example of the pages that it has room for.
            text: Must be the same on all ranks.

        Returns:
            The least number of all ranks.

        Raises:
            WeftError: Another rank has raised this error, or is gone.
        """
        number = self.collect(phase, number, text)
        self.answer(number)
        return number

    def collect(self, phase: str, number: int, text: str) -> int:
        """As `agree`, whose answer the other ranks still wait for: `answer` sends it."""
        for follower in self.others:
            message = self._receive(follower)
            if message["phase"] == phase and message["text"] != text:
                raise ConfigError(
                    f"rank {follower.rank} has the {phase} {message['text']}, rank {self.rank} "
                    f"{text}: their files or number formats differ",
                    param="model_dir",
                )
            if message["phase"] != phase:
                raise ConfigError(
                    f"rank {follower.rank} is at {message['phase']} where rank {self.rank} is at "
                    f"{phase}",
                    param="tp",
                )
            number = min(number, int(message["number"]))
            self.notices += message["notices"]
        return number

    def answer(self, number: int) -> None:
        """Tells the other ranks, which wait in a phase of the start, that all have come to it."""
        for follower in self.others:
            self._send(follower, {"number": number})

    def combine(self, own: RankResult) -> RankResult:
        """Waits for the results of the other ranks' jobs, and joins them with this rank's. Any
        thread may call it.
        """
        found = [own]
        for follower in self.others:
            try:
                message, _ = follower.link.receive()
                found.append(RankResult.of_message(message))
            except (LinkClosed, ValueError):
                gone = f"rank {follower.rank} is gone, or answered with something else"
                found.append(RankResult(problem=gone, reason=ConfigError.reason, is_mixture=True))
        return joined(found)

    def ready(self) -> None:
        """Ends the start: from now on a rank that ends or is late counts as lost."""
        self.agree("ready")
        self.begin(self._limit_s)

    def begin(self, limit_s: float) -> None:
        """A rank that ends, or is late by more than `limit_s`, counts as lost from now on."""
        self.group.limit(limit_s)
        self._is_ready = True

    def check(self) -> None:
        """Raises RanksLost if the group has ended; its message says which rank is lost and how."""
        if self.group.is_stopped:
            raise RanksLost(self.group.reason)

    def await_stage(self, num_frames: int) -> None:
        """Waits until all ranks have done so many frames, of which this one has done the last
        stage: on one host the others of that stage, as those of other stages are known to have done
        them; of several hosts all, whose answers are to be read. Raises RanksLost if one is gone,
        or has not done them in time.
        """
        if isinstance(self.group, HostGroup):
            self.group.await_ended_by(num_frames)
            return
        if self._tp > 1 and isinstance(self.group, SharedGroup):
            self.group.await_ended_by(range(1, self._tp), num_frames)

    def fail(self, why: str) -> None:
        """Ends all ranks, because one of them has failed."""
        self._why, self._is_lost = why, True
        self.group.stop()

    def _receive(self, follower: Follower) -> dict[str, Any]:
        try:
            message, _ = follower.link.receive()
        except LinkClosed:
            raise ConfigError(self.ending(follower.rank) + " during its start") from None
        if "error" in message:
            kind = error_class(str(message["reason"]))
            raise kind(f"rank {follower.rank}: {message['error']}")
        return message

    def _send(
        self, follower: Follower, message: dict[str, object], memory: int | None = None
    ) -> None:
        try:
            follower.link.send(message, memory)
        except LinkClosed:
            raise ConfigError(self.ending(follower.rank) + " during its start") from None
