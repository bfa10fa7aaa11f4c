"""Pauses of an engine, and changes of its weights.

    running -> pausing -> paused -> running       pausing: until no step runs, and with the modes
                 |          |                     abort and wait until no request is left
                 |       updating -> paused       a refit without a pause pauses meanwhile
                 |          |
                 '-- time --'---> failed          a mixture of weights: requests are refused until
                                                  a refit ends

An update comes from a folder at once, or from a trainer's process group in several commands: begin,
receive, end. A receive without begin begins it, and the last of the model's tensors then ends it. A
command that fails ends it too. Meanwhile the state is updating. Groups are joined and left beside
the steps.

Packed weights are offered to other workers beside the steps, and copied from one in an update of
one command.

A pause ends after its limit, unless a further command renews it; requests that wait then fail. A
new version of the weights is a new namespace of pages. Requests that go on across it keep pages
that nobody else ever gets; all others begin anew.
"""

from __future__ import annotations

import json

from weft.contract.clock import Clock
from weft.contract.errors import (
    ConfigError,
    Paused,
    RefitRunning,
    WeftError,
    WeightsIncomplete,
    error_class,
)
from weft.contract.weights import (
    WeightCommand,
    WeightOffer,
    WeightReply,
    WeightState,
    WeightStatus,
    rank_of_json,
)
from weft.engine.executor.orders import (
    CopyWeights,
    EndRefit,
    JoinWeightGroup,
    LeaveWeightGroup,
    OfferWeights,
    Order,
    ReceiveWeights,
    RefitFromFolder,
)
from weft.engine.executor.port import Executor
from weft.engine.executor.rank_jobs import RankResult
from weft.engine.executor.refits import AS_GROUP, WeightRefits, encode_group
from weft.engine.loop.groups import RequestGroups
from weft.engine.loop.intake import Intake
from weft.engine.loop.outgoing import Outgoing, failure_of
from weft.engine.loop.sleep import SleepControl
from weft.engine.model.weights.announced import encode_tensors
from weft.engine.scheduler.scheduler import Scheduler
from weft.pages.fills.filler import Filler

_DIGITS = 16
_RETRY_S = 1.0
_REFUSES = ("abort", "wait")
"""Modes of a pause in which new requests are refused."""
_REPAIR = "send the whole update again, or restart the worker"


class WeightControl:
    """Owns the state of the weights and of pauses.

    Args:
        refits: Of this process, whose steps `executor` runs.
    """

    def __init__(
        self,
        executor: Executor,
        refits: WeightRefits,
        intake: Intake,
        scheduler: Scheduler,
        groups: RequestGroups,
        filler: Filler,
        out: Outgoing,
        clock: Clock,
        sleep: SleepControl,
        num_ranks: int = 1,
    ) -> None:
        self._executor = executor
        self._sleep = sleep
        self._pauses_for_sleep = False
        self._refits = refits
        self._intake = intake
        self._scheduler = scheduler
        self._groups = groups
        self._filler = filler
        self._out = out
        self._clock = clock
        self._state: WeightState = "ready"
        self._version = intake.model_digest.hex()[:_DIGITS]
        self._pause: WeightCommand | None = None
        self._is_drained = True
        self._ends_at = 0.0
        self._awaiting_pause: list[int] = []
        """Queries that are answered once the pause is complete."""
        self._refit: WeightCommand | None = None
        """Waits for the pause, or runs."""
        self._pauses_for_refit = False
        self._num_ranks = num_ranks
        self._is_at_work = False
        """Whether the ranks are at an order for an update or a group."""
        self._join: WeightCommand | None = None
        """Its group forms, while steps go on."""
        self._awaiting_offer: list[int] = []
        """Queries for a description of the packed weights, which the ranks make meanwhile."""
        self._is_open = False
        """Whether an update comes in several commands, of which at least one has been obeyed."""
        self._ends_by_itself = False
        self._is_mixture = False
        """Whether no version lies in memory, but a mixture or nothing."""
        self._problem = ""
        self._num_updates = 0

    @property
    def status(self) -> WeightStatus:
        return WeightStatus(
            state=self._state,
            version=self._version,
            model_digest=b"" if self._state != "ready" else self._intake.model_digest,
            pause="" if self._pause is None or self._pauses_for_refit else self._pause.mode,
            is_drained=self._is_drained,
            problem=self._problem,
            num_updates=self._num_updates,
            num_ranks=self._num_ranks,
            groups=self._refits.groups,
            asleep=self._sleep.asleep,
        )

    @property
    def stops_steps(self) -> bool:
        """Whether no step may begin now."""
        if self._state != "ready" or self._refit is not None or self._sleep.asleep:
            return True
        pause = self._pause
        return pause is not None and (self._is_drained or pause.mode in ("keep", "retract"))

    @property
    def is_busy(self) -> bool:
        """Whether turns must come soon, since something is awaited that no message announces."""
        is_awaited = self._refit is not None or self._join is not None or bool(self._awaiting_offer)
        return is_awaited or not self._is_drained or self._sleep.is_busy

    def check(self) -> None:
        """Raises Asleep, Paused or WeightsIncomplete unless new requests are taken."""
        self._sleep.check()
        if self._state == "failed":
            raise WeightsIncomplete(
                f"this worker has no version of the weights: {self._problem}; {_REPAIR}",
                stage="queue",
            )
        if self._pause is not None and self._pause.mode in ("abort", "wait"):
            raise Paused("a trainer has paused this worker", stage="queue", retry_after_s=_RETRY_S)

    def obey(self, command: WeightCommand, *, has_moved_experts: bool = False) -> None:
        """`has_moved_experts`: experts are not where another worker would have them."""
        if self._pause is not None and command.action != "pause":
            self._ends_at = self._clock() + self._pause.limit_s
        try:
            match command.action:
                case "pause":
                    self._begin_pause(command)
                case "resume":
                    self._resume()
                    self._reply(command.query)
                case "refit" | "copy" | "begin" | "receive" | "end":
                    self._begin_refit(command)
                case "offer":
                    if has_moved_experts:
                        message = (
                            "this worker's experts have other places than at its start "
                            "(balance_experts); read the weights from files, or from another worker"
                        )
                        raise ConfigError(message, stage="weights")
                    self._begin_offer(command)
                case "join":
                    self._begin_join(command)
                case "leave":
                    self._leave(command)
                case "sleep":
                    self._begin_sleep(command)
                case "wake":
                    if not self._sleep.begin(command):
                        self._reply(command.query)
                case "show":
                    self._reply(command.query)
                case "digest":
                    self._sleep.check_weights()
                    self._reply(command.query, packed_digest=self._refits.packed_digest())
        except WeftError as error:
            self._reply(command.query, error)

    @property
    def is_quiet(self) -> bool:
        """Whether there is a version of the weights, and no rank is at work on it or to be."""
        is_at_work = self._is_at_work or self._refit is not None or self._is_open
        is_awake = not (self._sleep.is_busy or self._sleep.asleep)
        return self._state == "ready" and is_awake and not is_at_work

    def turn(self, num_under_way: int) -> bool:
        """Called in every turn before it plans. `num_under_way` counts the steps that have begun
        and not ended. Returns whether other weights have come.
        """
        num_before = self._num_updates
        if self._pause is not None and not self._is_drained and not num_under_way:
            self._advance_pause(self._pause)
        if self._is_at_work:
            if (result := self._refits.jobs.take()) is not None:
                self._is_at_work = False
                self._on_result(result)
        elif self._refit is not None and self._is_drained:
            self._start(self._refit)
        is_drained = self._is_drained and not self._awaiting_offer
        if (ended := self._sleep.turn(is_drained=is_drained)) is not None:
            self._end_sleep(*ended)
        is_late = self._pause is not None and self._clock() >= self._ends_at
        if self._pause is not None and is_late and not self._is_at_work:
            if self._is_open:
                # Its trainer is gone. What follows fails the update, and ends a pause for it.
                self._order(EndRefit(is_given_up=True))
            elif not self._sleep.stops_steps:
                self._expire(self._pause)
        return self._num_updates > num_before

    # -- sleep -----------------------------------------------------------------------------------

    def _begin_sleep(self, command: WeightCommand) -> None:
        if self._refit is not None or self._is_open or self._is_changing:
            raise RefitRunning("the weights are being changed; sleep afterwards", stage="weights")
        if not self._sleep.begin(command):
            self._reply(command.query)
            return
        known = self._pause
        if known is None or (known.mode == "keep" and command.mode != "keep"):
            self._begin_pause(command, is_asked=False)
            self._pauses_for_sleep = known is None
        self._set_fills()
        self._stop_leases()

    def _end_sleep(self, command: WeightCommand, error: WeftError | None) -> None:
        if self._sleep.are_weights_dropped and self._state == "ready":
            self._state, self._is_mixture = "failed", True
            self._problem = "they were dropped (sleep of level 2)"
            message = f"the weights were dropped while the worker slept; {_REPAIR}"
            self._groups.fail_all(WeightsIncomplete(message, stage="weights"))
        if self._pause is not None:
            self._ends_at = self._clock() + self._pause.limit_s
        if self._pauses_for_sleep and not self._sleep.asleep:
            self._end_pause()
        self._set_fills()
        self._reply(command.query, error)

    # -- pauses ----------------------------------------------------------------------------------

    def _begin_pause(self, command: WeightCommand, *, is_asked: bool = True) -> None:
        self._ends_at = self._clock() + command.limit_s
        self._pauses_for_refit = self._pauses_for_sleep = False
        known, self._pause = self._pause, command
        if known is None or known.mode != command.mode:
            self._is_drained = False
        self._set_fills()
        if command.mode == "abort":
            self._groups.cancel_everything()
            self._stop_leases()
        if is_asked:
            self._awaiting_pause.append(command.query)
        if self._is_drained:
            self._tell_paused()

    def _advance_pause(self, pause: WeightCommand) -> None:
        if pause.mode in ("abort", "wait") and self._scheduler.num_requests:
            return
        if pause.mode == "retract":
            for request in list(self._scheduler.running):
                self._scheduler.preempt(request)
        self._is_drained = True
        self._tell_paused()

    def _tell_paused(self) -> None:
        for query in self._awaiting_pause:
            self._reply(query)
        self._awaiting_pause.clear()

    def _resume(self) -> None:
        if self._refit is not None or self._is_open:
            message = "the weights are being changed; end the update, and resume afterwards"
            raise RefitRunning(message, stage="weights")
        if self._sleep.is_busy:
            raise RefitRunning("the worker is falling asleep or waking", stage="weights")
        self._end_pause()

    def _end_pause(self) -> None:
        self._pause, self._is_drained, self._pauses_for_refit = None, True, False
        self._pauses_for_sleep = False
        self._set_fills()
        for query in self._awaiting_pause:
            message = "the pause ended before all requests had"
            self._reply(query, Paused(message, stage="weights"))
        self._awaiting_pause.clear()

    def _expire(self, pause: WeightCommand) -> None:
        error = Paused(
            f"the trainer's pause has ended after {pause.limit_s:g} s without a word from it",
            stage="queue",
            retry_after_s=_RETRY_S,
        )
        if self._refit is not None:
            self._reply(self._refit.query, error)
            self._refit = None
        self._end_pause()
        for request in self._scheduler.not_admitted():
            self._groups.fail(request.key, error)

    def _set_fills(self) -> None:
        """Refuses fills as long as requests would be."""
        is_refusing = self._pause is not None and self._pause.mode in _REFUSES
        self._filler.is_paused = is_refusing or self._is_mixture or self._sleep.stops_steps

    def _stop_leases(self) -> None:
        for lease in list(self._filler.leases):
            self._filler.on_stop(lease.handle.lease_id)

    # -- weights ---------------------------------------------------------------------------------

    def _begin_refit(self, command: WeightCommand) -> None:
        self._sleep.check_weights()
        self._check_free()
        if self._is_open and command.action in ("refit", "copy", "begin"):
            raise RefitRunning("an update is under way; end it first", stage="weights")
        if not self._is_open and command.action == "end":
            raise ConfigError("no update is under way; begin one first", stage="weights")
        if not self._refits.is_possible:
            message = (
                "the weights of a model with images, or that makes vectors, cannot be changed: "
                "restart the worker"
            )
            raise ConfigError(message, stage="weights")
        self._refit = command
        if self._pause is None:
            self._pause, self._pauses_for_refit, self._is_drained = command, True, False
            self._ends_at = self._clock() + command.limit_s

    @property
    def _is_changing(self) -> bool:
        return self._is_at_work and not self._awaiting_offer

    def _check_free(self) -> None:
        if self._refit is not None or self._is_changing:
            raise RefitRunning("the weights are being changed already", stage="weights")

    def _start(self, command: WeightCommand) -> None:
        """Obeys a command for which a pause was awaited."""
        is_first = self._state != "updating"
        self._state = "updating"
        if is_first:
            self._stop_leases()
        match command.action:
            case "refit":
                self._order(RefitFromFolder(command.folder))
            case "copy":
                assert command.offer is not None
                self._order(CopyWeights(command.offer.to_json()))
            case "begin":
                self._is_open, self._ends_by_itself, self._refit = True, False, None
                self._reply(command.query)
            case "receive":
                if not self._is_open:
                    self._is_open = self._ends_by_itself = True
                packed = AS_GROUP if command.packed_bytes is None else command.packed_bytes
                tensors = encode_tensors(command.tensors)
                ends = self._ends_by_itself
                self._order(ReceiveWeights(command.group_name, tensors, packed, ends))
            case _:
                self._order(EndRefit())

    def _order(self, order: Order) -> None:
        self._is_at_work = True
        self._executor.order(order)

    def _on_result(self, result: RankResult) -> None:
        if self._pause is not None:
            # What the ranks were at may have taken longer than a pause lasts.
            self._ends_at = self._clock() + self._pause.limit_s
        if self._join is not None:
            self._end_join(self._join, result)
            return
        if self._awaiting_offer:
            self._end_offer(result)
            return
        command, self._refit = self._refit, None
        if command is not None and not result.reason and not result.digest:
            self._reply(command.query)
            return
        error = _error_of(result)
        if error is None:
            self._change_version("" if command is None else command.version, result.digest)
        else:
            self._fail(result)
            if self._is_mixture:
                error = type(error)(
                    f"{error.message}; until an update ends, requests are refused: {_REPAIR}",
                    stage="weights",
                )
        self._is_open = False
        if self._pauses_for_refit:
            self._end_pause()
        if command is not None:
            self._reply(command.query, error)

    def _begin_join(self, command: WeightCommand) -> None:
        self._check_free()
        if self._is_open or self._is_at_work:
            raise RefitRunning("an update is under way; end it first", stage="weights")
        assert command.group is not None
        self._join = command
        self._order(JoinWeightGroup(encode_group(command.group)))

    def _end_join(self, command: WeightCommand, result: RankResult) -> None:
        self._join = None
        error = _error_of(result)
        if error is not None and command.group is not None:
            self._executor.order(LeaveWeightGroup(command.group.name))
        self._reply(command.query, error)

    def _leave(self, command: WeightCommand) -> None:
        self._check_free()
        self._executor.order(LeaveWeightGroup(command.group_name))
        self._reply(command.query)

    def _begin_offer(self, command: WeightCommand) -> None:
        self._sleep.check_weights()
        self._check_free()
        if self._state != "ready":
            raise WeightsIncomplete("there is no version of the weights", stage="weights")
        self._awaiting_offer.append(command.query)
        if not self._is_at_work:
            self._order(OfferWeights(self._intake.model_digest))

    def _end_offer(self, result: RankResult) -> None:
        offer, error = None, _error_of(result)
        if error is None:
            origin = self._refits.origin
            offer = WeightOffer(
                model_digest=self._intake.model_digest,
                start_digest=origin.digest,
                files=origin.files,
                version=self._version,
                ranks=[rank_of_json(one) for one in json.loads(result.offer)],
            )
        for query in self._awaiting_offer:
            self._reply(query, error, offer=offer)
        self._awaiting_offer.clear()

    def _change_version(self, name: str, digest: bytes) -> None:
        self._state, self._problem, self._is_mixture = "ready", "", False
        self._sleep.weights_came()
        self._num_updates += 1
        self._set_fills()
        old, self._version = self._version, name or digest.hex()[:_DIGITS]
        self._out.weight_version = self._version
        self._intake.change_model(digest)
        retracts = self._pause is not None and self._pause.mode == "retract"
        self._scheduler.change_version(self._intake.rename, old, retracts=retracts)

    def _fail(self, result: RankResult) -> None:
        if result.is_mixture or not self._is_mixture:
            self._problem = result.problem
        self._is_mixture |= result.is_mixture
        self._state = "failed" if self._is_mixture else "ready"
        self._set_fills()
        if result.is_mixture:
            message = f"an update of the weights failed: {result.problem}; {_REPAIR}"
            self._groups.fail_all(WeightsIncomplete(message, stage="weights"))

    def _reply(
        self,
        query: int,
        error: WeftError | None = None,
        *,
        packed_digest: bytes = b"",
        offer: WeightOffer | None = None,
    ) -> None:
        status = self.status
        status.packed_digest = packed_digest
        failure = None if error is None else failure_of(error)
        self._out.outbox.weight_replies.append(
            WeightReply(query=query, status=status, failure=failure, offer=offer)
        )


def _error_of(result: RankResult) -> WeftError | None:
    if not result.reason:
        return None
    return error_class(result.reason)(result.problem, stage="weights")
