"""Limits of resuming a request that lost its owner, and the record of its losses."""

from __future__ import annotations

from dataclasses import dataclass

from weft.common.durations import duration
from weft.contract.errors import (
    DeadlineExceeded,
    Draining,
    Overloaded,
    WeftError,
)
from weft.v1 import common_pb2

_REFUSALS = (Draining, Overloaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLimits:
    """Limits of resuming one prompt, besides its deadline."""

    max_attempts: int
    """Number of lost owners with which the request fails. Those that are draining or too busy to
    accept it do not count.
    """
    timeout_s: float
    """Longest time without any owner."""


@dataclass(slots=True)
class _Loss:
    attempt: int
    worker_id: str
    error: WeftError
    num_tokens: int
    at: float
    pause_s: float | None = None
    """Length of the client's pause; None: the pause has not ended."""


class Losses:
    """The lost attempts of one prompt. Times are those of the event loop, in seconds."""

    def __init__(self, limits: ResumeLimits) -> None:
        """Starts without losses."""
        self._limits = limits
        self._losses: list[_Loss] = []
        self._ownerless_since: float | None = None

    def add(
        self, attempt: int, worker_id: str, error: WeftError, num_tokens: int, at: float
    ) -> None:
        """Records the loss of an attempt.

        Args:
            attempt: Its number.
            worker_id: The lost worker.
            error: How it ended.
            num_tokens: Tokens of all samples by then.
            at: When.
        """
        self.end_pause(at)
        self._losses.append(_Loss(attempt, worker_id, error, num_tokens, at))
        if self._ownerless_since is None:
            self._ownerless_since = at

    def owned(self) -> None:
        """Notes that a worker has accepted the request."""
        self._ownerless_since = None

    def end_pause(self, now: float) -> float | None:
        """Notes that the client receives tokens again. Returns the length of its pause; None if
        there was none.
        """
        if not self._losses or self._losses[-1].pause_s is not None:
            return None
        self._losses[-1].pause_s = now - self._losses[-1].at
        return self._losses[-1].pause_s

    def is_over(self, error: WeftError) -> bool:
        """Whether the request must not be submitted again after its latest loss."""
        can_mend = error.retryable or error.is_of_worker
        if not can_mend or isinstance(error, DeadlineExceeded):
            return True
        num_counted = sum(not isinstance(loss.error, _REFUSALS) for loss in self._losses)
        return num_counted >= self._limits.max_attempts

    def has_waited_enough(self, now: float) -> bool:
        """Whether the request has been without an owner for longer than allowed."""
        since = self._ownerless_since
        return since is not None and now - since >= self._limits.timeout_s

    def describe(self) -> list[common_pb2.LostAttempt]:
        """Describes the losses for the timeline."""
        return [
            common_pb2.LostAttempt(
                attempt=loss.attempt,
                worker_id=loss.worker_id,
                code=loss.error.reason,
                message=loss.error.message,
                generated_tokens=loss.num_tokens,
                pause=duration(loss.pause_s or 0.0),
            )
            for loss in self._losses
        ]
