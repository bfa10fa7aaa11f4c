"""Profiles of this engine's steps: when they begin and end.

    waiting -> preparing -> recording -> ended
       |            |
       '------------'----- in time, or stopped

A preparation is not interrupted: a profile that ends meanwhile ends after it.

All ranks begin and end at the same step borders, since they get these orders between steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from weft.contract.clock import Clock
from weft.contract.errors import ProfileRunning, WeftError
from weft.contract.profiles import ProfileCommand, ProfileEnd, ProfileOptions
from weft.engine.executor.orders import PrepareProfile, StartProfile, StopProfile
from weft.engine.executor.port import Executor
from weft.engine.executor.profiler import StepProfiler
from weft.engine.loop.outgoing import Outgoing, failure_of


@dataclass(slots=True)
class _OpenProfile:
    name: str
    folder: str
    options: ProfileOptions
    begins_at: int
    """Number of the first step that may be recorded."""
    ends_at_s: float
    is_prepared: bool = False
    is_recording: bool = False
    began_s: float = 0.0
    num_steps: int = 0
    end_reason: str = ""
    """Why it ends, once it is to end."""


class StepProfiles:
    """At most one profile at a time.

    Args:
        profiler: Of this process, whose steps `executor` runs.
        num_ranks: Processes that run the steps.
    """

    def __init__(
        self,
        executor: Executor,
        profiler: StepProfiler,
        out: Outgoing,
        clock: Clock,
        num_ranks: int,
    ) -> None:
        self._executor = executor
        self._profiler = profiler
        self._out = out
        self._clock = clock
        self._num_ranks = num_ranks
        self._num_begun = 0
        """Steps since the start."""
        self._open: _OpenProfile | None = None

    def obey(self, command: ProfileCommand) -> None:
        failure = None
        try:
            if command.options is not None:
                self._begin(command, command.options)
            elif self._open is not None and self._open.name == command.profile:
                self._end(self._open, "stopped")
        except WeftError as error:
            failure = failure_of(error)
        self._out.outbox.profile_replies.append((command.query, failure))

    def turn(self, *, begins_step: bool, num_under_way: int) -> None:
        """Called before a turn begins a step, or begins none. `num_under_way` counts the steps that
        have begun and not ended.
        """
        self._num_begun += begins_step
        if self._open is not None:
            self._advance(self._open, begins_step, num_under_way)

    def _begin(self, command: ProfileCommand, options: ProfileOptions) -> None:
        if self._open is not None:
            message = f"profile {self._open.name} runs; wait for its end, or stop it"
            raise ProfileRunning(message, stage="profile")
        if self._profiler.is_hung:
            message = "the profiler still starts for an earlier profile; restart the worker"
            raise ProfileRunning(message, stage="profile")
        first = max(self._num_begun + 1 + options.after_steps, options.from_step)
        ends_at_s = self._clock() + options.limit_s
        self._open = _OpenProfile(command.profile, command.folder, options, first, ends_at_s)

    def _advance(self, profile: _OpenProfile, begins_step: bool, num_under_way: int) -> None:
        options = profile.options
        if profile.end_reason:
            self._end(profile, profile.end_reason)
        elif profile.num_steps == options.steps and (begins_step or not num_under_way):
            self._end(profile, "steps")
        elif self._clock() >= profile.ends_at_s:
            self._end(profile, "time")
        elif profile.is_recording:
            profile.num_steps += begins_step
        elif not profile.is_prepared:
            if self._num_begun + (not begins_step) >= profile.begins_at:
                profile.is_prepared = True
                self._executor.order(PrepareProfile(options.host, options.device))
        elif begins_step and self._profiler.is_ready:
            self._executor.order(StartProfile())
            profile.is_recording, profile.num_steps = True, 1
            profile.began_s = time.time()

    def _end(self, profile: _OpenProfile, reason: str) -> None:
        profile.end_reason = reason
        if profile.is_prepared and not self._profiler.is_ready:
            return
        self._open = None
        ended_s, stopping_s = time.time(), self._clock()
        if profile.is_prepared:
            self._executor.order(StopProfile(profile.folder))
        self._out.outbox.profile_ends.append(
            ProfileEnd(
                profile=profile.name,
                steps=profile.num_steps,
                reason=reason,
                ranks=self._num_ranks if profile.is_prepared else 0,
                began_s=profile.began_s or ended_s,
                ended_s=ended_s,
                pause_s=self._clock() - stopping_s,
            )
        )
