"""Where the experts of a model are, what of them is counted, and when they get other places.

    still -> sending -> taking -> still       of one layer after another; between two of them other
      ^         |          |                  work on the weights has precedence
      '------ failed ------'                  the layer keeps its placement

Steps go on meanwhile. On all ranks a layer's weights and table change between the same two steps,
since ranks get the order between steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from weft.contract.clock import Clock
from weft.contract.errors import ExpertsFixed, WeftError
from weft.contract.experts import (
    ExpertBalance,
    ExpertCommand,
    ExpertReply,
    ExpertState,
    LayerExperts,
)
from weft.engine.base.config import EngineConfig
from weft.engine.executor.expert_counts import ExpertCounts
from weft.engine.executor.expert_moves import ExpertMoves
from weft.engine.executor.orders import DropExperts, PlaceExperts, SendExperts, TakeExperts
from weft.engine.executor.port import Executor
from weft.engine.loop.outgoing import Outgoing, failure_of
from weft.engine.parallel.expert_places import READ_ROWS, ExpertLoad, Placement, balanced

logger = logging.getLogger(__name__)

_COUNTED = 8
"""Steps of which one is counted for balancing."""
_MIN_ROWS = 4
"""Least rows for each expert in a layer, on average, by which experts get places."""


@dataclass(slots=True)
class ExpertJob:
    """Placements that are put in place, layer by layer."""

    wanted: dict[int, Placement]
    queries: list[int] = field(default_factory=list)
    layer: int | None = None
    """The layer that is under way."""
    new: Placement | None = None
    """Its placement to be."""
    is_taking: bool = False


class ExpertControl:
    """Owns the placement of each layer.

    Args:
        counts: None: the model has no experts, or they are not counted here.
        moves: None: experts stay where they are.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        counts: ExpertCounts | None,
        moves: ExpertMoves | None,
        out: Outgoing,
        clock: Clock,
    ) -> None:
        self._config = config
        self._executor = executor
        self._counts, self._moves = counts, moves
        self._out, self._clock = out, clock
        self._read_rows = READ_ROWS["cuda" if config.is_on_gpu else "cpu"]
        self.placements: Mapping[int, Placement] = {}
        """Of each layer with experts; empty: they are not moved."""
        self.has_moved = False
        """Whether some layer is placed otherwise than at the start."""
        self._is_recording = False
        self._recorded: tuple[Mapping[int, ExpertLoad], int] = {}, 0
        """What was counted when a recording ended, and in how many steps."""
        self.job: ExpertJob | None = None
        """None: no layer is to get another placement."""
        self.due_at = clock() + config.balance_interval_s if self._is_automatic else math.inf
        """When counts are looked at next."""
        self._balance: ExpertBalance | None = None
        if moves is not None:
            none = ExpertBalance(imbalance=0.0, num_placements=0, num_moved=0, num_failed=0)
            self._balance = none
            self.reset()
        self._count()

    @property
    def is_busy(self) -> bool:
        """Whether a layer is under way, so that ranks must not get other work on weights."""
        return self.job is not None and self.job.layer is not None

    @property
    def balance(self) -> ExpertBalance | None:
        return self._balance

    def reset(self) -> None:
        """The weights were read anew, as at the start."""
        if self._moves is None or self._counts is None:
            return
        sizes = self._counts.num_experts, self._config.ep, self._config.redundant_experts
        first = Placement.first(*sizes)
        self.placements = dict.fromkeys(self._moves.layers, first)
        self.has_moved = False

    def obey(self, command: ExpertCommand) -> None:
        try:
            counts = self._counts
            if counts is None:
                raise ExpertsFixed(self._why_uncounted, stage="experts")
            match command.action:
                case "start":
                    self._is_recording = True
                    self._count()
                    counts.reset()
                case "stop":
                    if self._is_recording:
                        self._recorded = self._loads(), counts.num_steps
                    self._is_recording = False
                    self._count()
                case "dump":
                    self._reply(command.query, with_layers=True)
                    return
                case "balance":
                    self._begin_by_counts(command.query)
                    return
            self._reply(command.query)
        except WeftError as error:
            reply = ExpertReply(query=command.query, state=None, failure=failure_of(error))
            self._out.outbox.expert_replies.append(reply)

    def turn(self, *, may_begin: bool) -> None:
        """Called in every turn, between two steps. `may_begin` says whether ranks may get work on
        weights.
        """
        if self.job is not None:
            self._advance(self.job, may_begin)
        elif self._clock() >= self.due_at:
            self.due_at = self._clock() + self._config.balance_interval_s
            self._look()

    def begin(self, wanted: Mapping[int, Placement], query: int | None = None) -> None:
        """Puts layers into these placements, one after another."""
        if self._moves is None:
            raise ExpertsFixed(
                "this worker's experts stay where they are: start it with ep > 1 and "
                "balance_experts = order or auto",
                stage="experts",
            )
        if self.job is None:
            self.job = ExpertJob({})
        self.job.wanted |= wanted
        if query is not None:
            self.job.queries.append(query)

    # -- counts ----------------------------------------------------------------------------------

    @property
    def _is_automatic(self) -> bool:
        return self._moves is not None and self._config.balance_experts == "auto"

    @property
    def _why_uncounted(self) -> str:
        if self._config.is_on_gpu:
            return "experts are counted on a GPU by workers that were started with count_experts"
        return (
            "this worker counts no experts: its model has none that Weft chooses, or stages or "
            "ranks that divide prompts have it"
        )

    def _count(self) -> None:
        if self._counts is not None:
            automatic = _COUNTED if self._is_automatic else 0
            self._counts.every = 1 if self._is_recording else automatic

    def _loads(self) -> Mapping[int, ExpertLoad]:
        assert self._counts is not None
        rows, steps = self._counts.read()
        both = zip(rows, steps, strict=True)
        return dict(zip(self._counts.layers, (ExpertLoad(*one) for one in both), strict=True))

    def _look(self) -> None:
        """Begins new placements if the ranks' work was unequal enough since the last look."""
        assert self._counts is not None
        loads = self._loads()
        if not any(map(_is_enough, loads.values())):
            return
        imbalance = self._imbalance(loads)
        self._note(imbalance=imbalance)
        if not self._is_recording:
            self._counts.reset()
        if imbalance >= self._config.balance_above:
            self._begin_by(loads)

    def _imbalance(self, loads: Mapping[int, ExpertLoad]) -> float:
        each = [
            placement.loads(loads[layer], self._read_rows)
            for layer, placement in self.placements.items()
        ]
        mean = sum(float(one.mean()) for one in each)
        return sum(float(one.max()) for one in each) / mean if mean else 1.0

    def _begin_by_counts(self, query: int) -> None:
        if self._moves is None:
            self.begin({}, query)
        loads = self._recorded[0]
        if self._counts is not None and self._counts.every:
            loads = self._loads()
        if not any(map(_is_enough, loads.values())):
            raise ExpertsFixed(
                f"fewer than {_MIN_ROWS} rows for each expert have been counted: start counting, "
                "and send requests, first",
                stage="experts",
            )
        self._note(imbalance=self._imbalance(loads))
        self._begin_by(loads, query)

    def _begin_by(self, loads: Mapping[int, ExpertLoad], query: int | None = None) -> None:
        wanted = {
            layer: balanced(old, loads[layer], self._read_rows)
            for layer, old in self.placements.items()
            if _is_enough(loads[layer])
        }
        changed = {layer: new for layer, new in wanted.items() if new != self.placements[layer]}
        self.begin(changed, query)

    # -- moves -----------------------------------------------------------------------------------

    def _advance(self, job: ExpertJob, may_begin: bool) -> None:
        assert self._moves is not None
        if job.layer is None:
            if job.wanted and not may_begin:
                return
            if not job.wanted:
                self.job = None
                for query in job.queries:
                    self._reply(query)
                return
            job.layer, job.is_taking = min(job.wanted), False
            job.new = job.wanted.pop(job.layer)
            self._executor.order(SendExperts(job.layer, *self._numbers(job)))
            return
        if (result := self._moves.jobs.take()) is None:
            return
        if result.reason:
            self._executor.order(DropExperts())
            logger.error("layer %d keeps its experts' places: %s", job.layer, result.problem)
            self._note(num_failed=1, problem=result.problem)
        elif not job.is_taking:
            job.is_taking = True
            self._executor.order(TakeExperts(job.layer, *self._numbers(job), result.offer))
            return
        else:
            assert job.new is not None
            self._place(job.layer, job.new)
        job.layer = job.new = None

    def _numbers(self, job: ExpertJob) -> tuple[list[int], list[int]]:
        assert job.layer is not None
        assert job.new is not None
        return self.placements[job.layer].numbers, job.new.numbers

    def _place(self, layer: int, new: Placement) -> None:
        self._executor.order(PlaceExperts(layer, new.numbers))
        moved = len(new.moves_from(self.placements[layer]))
        self.placements = {**self.placements, layer: new}
        self.has_moved = True
        self._note(num_placements=1, num_moved=moved)

    def _note(
        self,
        *,
        imbalance: float | None = None,
        num_placements: int = 0,
        num_moved: int = 0,
        num_failed: int = 0,
        problem: str = "",
    ) -> None:
        old = self._balance
        assert old is not None
        self._balance = replace(
            old,
            imbalance=old.imbalance if imbalance is None else imbalance,
            num_placements=old.num_placements + num_placements,
            num_moved=old.num_moved + num_moved,
            num_failed=old.num_failed + num_failed,
            problem=problem or old.problem,
        )

    # -- answers ---------------------------------------------------------------------------------

    def _reply(self, query: int, *, with_layers: bool = False) -> None:
        assert self._counts is not None
        loads, num_steps = self._recorded
        if self._counts.every:
            loads, num_steps = self._loads(), self._counts.num_steps
        state = ExpertState(
            is_counting=self._is_recording,
            num_steps=num_steps,
            num_ranks=self._config.ep,
            balance=self._balance,
            layers=[self._layer(layer, load) for layer, load in loads.items()]
            if with_layers
            else [],
        )
        self._out.outbox.expert_replies.append(ExpertReply(query=query, state=state))

    def _layer(self, layer: int, load: ExpertLoad) -> LayerExperts:
        found = LayerExperts(layer=layer, rows=load.rows.tolist(), steps=load.steps.tolist())
        if (placement := self.placements.get(layer)) is not None:
            found.places = placement.numbers
            found.imbalance = placement.imbalance(load, self._read_rows)
        return found


def _is_enough(load: ExpertLoad) -> bool:
    """The last layer computes only rows that draw tokens, which prompts have few of."""
    return float(np.mean(load.rows)) >= _MIN_ROWS
