"""Sleep and waking of an engine, by tags.

    awake -> draining -> settling -> moving -> asleep      draining: until the pause is complete
      ^         |           |         |  ^        |        settling: until no page is in use
      '---------'- too late-'- failed-'  '- wake -'        moving: until all ranks have obeyed

Each tag is awake or asleep; one command at a time moves some of them. Requests run only while both
are awake. Commands whose tags are where they should be change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from weft.contract.clock import Clock
from weft.contract.errors import Asleep, ConfigError, RefitRunning, WeftError, error_class
from weft.contract.weights import SLEEP_TAGS, SleepTag, WeightCommand
from weft.engine.executor.orders import Sleep, Wake
from weft.engine.executor.port import Executor
from weft.engine.executor.rank_jobs import RankResult
from weft.engine.executor.sleeping import Sleeper
from weft.engine.scheduler.adapters import Adapters
from weft.engine.transfer.transport import Transport
from weft.pages.transfer.nixl import TransferError

_SETTLE_S = 60.0
_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class CachedPages:
    """The pages that nobody uses when an engine falls asleep."""

    flush: Callable[[], object]
    """Drops them; tiers may copy some first."""
    are_quiet: Callable[[], bool]
    """Whether no page is being filled, read or copied."""
    num_used: Callable[[], int]
    """Pages of requests."""


@dataclass(slots=True)
class _Job:
    command: WeightCommand
    tags: list[SleepTag]
    ends_at: float
    phase: Literal["draining", "settling", "moving"] = "draining"
    error: WeftError | None = None
    has_dropped: bool = False
    """Whether weights are lost, although the order failed on some rank."""
    has_ended: bool = False


class SleepControl:
    """Owns which parts sleep. The owner of pauses calls `turn` in every turn, and gives the answers
    that it returns.
    """

    def __init__(
        self,
        executor: Executor,
        sleeper: Sleeper,
        transport: Transport,
        pages: CachedPages,
        adapters: Adapters,
        clock: Clock,
    ) -> None:
        self._adapters = adapters
        self._executor = executor
        self._sleeper = sleeper
        self._transport = transport
        self._pages = pages
        self._clock = clock
        self._asleep: set[SleepTag] = set()
        self._are_weights_dropped = False
        self._job: _Job | None = None

    @property
    def asleep(self) -> list[SleepTag]:
        return [tag for tag in SLEEP_TAGS if tag in self._asleep]

    @property
    def is_busy(self) -> bool:
        return self._job is not None

    @property
    def stops_steps(self) -> bool:
        return bool(self._asleep) or self._job is not None

    def check(self) -> None:
        """Raises Asleep unless all is awake, and nothing is falling asleep."""
        if self.stops_steps:
            what = ", ".join(self.asleep) or "it is falling asleep"
            message = f"this worker sleeps ({what}); wake it by /wake_up"
            raise Asleep(message, stage="queue", retry_after_s=_RETRY_S)

    def check_weights(self) -> None:
        """Raises Asleep if weights cannot be changed, since there is no memory for them."""
        if self._job is not None or "weights" in self._asleep:
            raise Asleep("the weights sleep; wake them first", stage="weights")

    def begin(self, command: WeightCommand) -> bool:
        """Begins to sleep or to wake; False: there is nothing to do. Raises WeftError for a command
        that cannot be obeyed.
        """
        if self._job is not None:
            raise RefitRunning("the worker is falling asleep or waking", stage="sleep")
        wakes = command.action == "wake"
        tags = [tag for tag in command.tags if (tag in self._asleep) == wakes]
        drops_later = (
            *(not wakes, command.level == 2, "weights" in command.tags),
            *("weights" in self._asleep, not self._are_weights_dropped),
        )
        if all(drops_later):
            tags.append("weights")
        if not tags:
            return False
        if "weights" in tags and not wakes and self._sleeper.problem:
            raise ConfigError(self._sleeper.problem, stage="sleep")
        if "weights" in tags and not wakes and command.level == 2 and not self._sleeper.can_drop:
            message = (
                "level: no update could bring the weights of a model with images, or that makes "
                "vectors; give 1"
            )
            raise ConfigError(message, stage="sleep", param="level")
        phase: Literal["draining", "moving"] = "moving" if wakes else "draining"
        self._job = _Job(command, tags, self._clock() + command.limit_s, phase)
        if wakes:
            self._executor.order(Wake("weights" in tags, "kv_cache" in tags))
        return True

    def turn(self, *, is_drained: bool) -> tuple[WeightCommand, WeftError | None] | None:
        """Goes on. Returns the command that has ended, with its error."""
        job = self._job
        if job is None:
            return None
        try:
            if job.phase != "moving":
                self._settle(job, is_drained)
            elif (result := self._sleeper.jobs.take()) is not None:
                self._moved(job, result)
        except (WeftError, TransferError) as error:
            if isinstance(error, TransferError):
                error = ConfigError(f"the pool is in use by a transfer: {error}", stage="sleep")
            job.error, job.has_ended = error, True
        if not job.has_ended:
            return None
        self._job = None
        if "kv_cache" not in self._asleep:
            self._transport.register()
        if "weights" not in self._asleep:
            self._adapters.let_go()
        return job.command, job.error

    @property
    def are_weights_dropped(self) -> bool:
        """Whether there is no version of the weights, asleep or awake."""
        return self._are_weights_dropped

    def weights_came(self) -> None:
        """An update has filled the weights."""
        self._are_weights_dropped = False

    def _settle(self, job: _Job, is_drained: bool) -> None:
        """Gives the order once no page is in use."""
        if self._clock() >= job.ends_at:
            raise Asleep("requests, fills or copies of pages did not end in time", stage="sleep")
        if not is_drained:
            return
        if job.phase == "draining":
            job.phase, job.ends_at = "settling", self._clock() + _SETTLE_S
        if "kv_cache" in job.tags:
            if job.command.mode == "keep" and self._pages.num_used():
                message = "mode: with `keep` requests have pages; give abort, wait or retract"
                raise ConfigError(message, stage="sleep", param="mode")
            self._pages.flush()
            if self._pages.num_used() or not self._pages.are_quiet():
                return
            self._transport.release()
        if "weights" in job.tags:
            self._adapters.hold()
            if not self._adapters.is_still:
                return
        keeps = job.command.level == 1
        self._executor.order(Sleep("weights" in job.tags, "kv_cache" in job.tags, keeps))
        job.phase = "moving"

    def _moved(self, job: _Job, result: RankResult) -> None:
        error = None
        if result.problem:
            error = error_class(result.reason)(result.problem, stage="sleep")
        drops = "weights" in job.tags and job.command.level == 2
        if job.error is not None:
            # What the failed order had done on some ranks is undone.
            self._are_weights_dropped |= error is not None or job.has_dropped
            job.has_ended = True
        elif job.command.action == "wake":
            if error is None:
                self._asleep.difference_update(job.tags)
            job.error, job.has_ended = error, True
        elif error is not None:
            job.error, job.has_dropped = error, drops and result.is_mixture
            self._executor.order(Wake("weights" in job.tags, "kv_cache" in job.tags))
        else:
            self._asleep.update(job.tags)
            self._are_weights_dropped |= drops
            job.has_ended = True
