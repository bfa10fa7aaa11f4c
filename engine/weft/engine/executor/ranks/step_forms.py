"""Forms of steps of engines on GPUs that share experts: all take graphs of one size, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weft.engine.executor.graphs import GraphBucket
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.step_input import StepInput
from weft.engine.parallel.lockstep import Lockstep

if TYPE_CHECKING:
    from weft.engine.parallel.device_dispatch import DeviceDispatch

_NOTHING, _EAGER = 0, 1 << 31
"""Proposals: an engine without rows takes any form; one whose step has no graph adds its rows to
`_EAGER`; another one proposes 1 + the number of its bucket.
"""


class StepForms:
    """Agrees on the form of each step before it is launched."""

    def __init__(self, lockstep: Lockstep, dispatch: DeviceDispatch, local: LocalExecutor) -> None:
        self._lockstep, self._dispatch, self._local = lockstep, dispatch, local
        graphs = local.graphs
        self._sizes = [] if graphs is None else graphs.buckets.sizes
        self._numbers = {bucket: number for number, bucket in enumerate(self._sizes)}

    @property
    def digest(self) -> str:
        """Engines with equal ones have captured the same steps."""
        return hashlib.sha256(repr(self._sizes).encode()).hexdigest()

    @contextmanager
    def agree(self, step: StepInput) -> Iterator[None]:
        """Meanwhile the step, which this engine launches, takes the form that all agree on. Raises
        RanksLost if an engine is gone, or has not come in time.
        """
        bucket = self._agree(self._proposal(step))
        if self._local.graphs is None:
            yield
            return
        with self._local.graphs.buckets.agreed(bucket):
            yield

    def take_empty_step(self) -> None:
        """Agrees on a step in which this engine has no rows, and runs its graph if it has one.
        Raises as `agree`.
        """
        bucket = self._agree(_NOTHING)
        if bucket is not None:
            assert self._local.graphs is not None
            self._local.graphs.run_nothing(bucket)

    def _proposal(self, step: StepInput) -> int:
        bucket = self._local.own_bucket(step)
        if bucket is None:
            # The last layer computes rows whose tokens are scored once more.
            return _EAGER + step.num_rows + sum(len(one.tokens) for one in step.scores)
        return 1 + self._numbers[bucket.plain]

    def _agree(self, proposal: int) -> GraphBucket | None:
        found = [each for each in self._lockstep.propose(proposal) if each != _NOTHING]
        wanted = [self._sizes[each - 1] for each in found if each < _EAGER]
        bucket = None
        if len(wanted) == len(found):
            bucket = self._local.graphs.buckets.common(wanted) if self._local.graphs else None
        num_rows = None
        if bucket is None:
            sizes = [one.tokens for one in wanted]
            num_rows = max(sizes + [each - _EAGER for each in found if each >= _EAGER])
        self._dispatch.begin(num_rows)
        return bucket
