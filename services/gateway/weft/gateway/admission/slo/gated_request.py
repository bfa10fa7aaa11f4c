"""A request's passage through the latency gate, and the outcome of its targets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from weft.engine.base.errors import Cancelled, Overloaded, WeftError
from weft.gateway.admission.slo.admission import LatencyAdmission
from weft.gateway.admission.slo.gate import AdmissionRequest
from weft.gateway.admission.slo.targets import Targets
from weft.gateway.routing import RoutingRequest


class Answered(Protocol):
    """The times of a sample; see `SampleOutput`."""

    @property
    def ids(self) -> Sequence[int]:
        """Token ids."""

    @property
    def pace_s(self) -> float | None:
        """Mean seconds between its tokens; None: it has fewer than two."""

    first_token_time: float


class GatedRequest:
    """One request at the gate of its model.

    Args:
        admission: The model's admission; None: no targets are in force.
        targets: Targets of the request.
        arrival: Event loop time.
    """

    def __init__(
        self, admission: LatencyAdmission | None, targets: Targets, arrival: float
    ) -> None:
        self._admission = admission
        self._targets = targets
        self._arrival = arrival
        self._ask: AdmissionRequest | None = None

    @property
    def is_needed(self) -> bool:
        """Whether targets are in force: this request's, or those of others."""
        return self._admission is not None

    async def enter(
        self,
        prompts: Sequence[RoutingRequest],
        *,
        tenant: str,
        weight: float,
        max_tokens: int,
        deadline: float,
    ) -> None:
        """Waits until the request may be sent.

        Args:
            prompts: Its prompts.
            tenant: The request's tenant.
            weight: Weight of the tenant.
            max_tokens: Most tokens to generate, over all prompts and samples.
            deadline: Event loop time at which waiting ends.

        Raises:
            TargetUnattainable: A target would be missed.
            DeadlineExceeded: It was held for too long.
        """
        if self._admission is None:
            return
        ask = AdmissionRequest(
            prompts=prompts,
            arrival=self._arrival,
            targets=self._targets,
            tenant=tenant,
            weight=weight,
            max_tokens=max_tokens,
        )
        await self._admission.enter(ask, deadline)
        self._ask = ask

    def began(self) -> None:
        """Notes that the request now counts in the workers' loads."""
        if self._admission is not None and self._ask is not None:
            self._admission.gate.began(self._ask)

    def ended(self, samples: Sequence[Sequence[Answered]]) -> None:
        """Notes that the request is over.

        Args:
            samples: Samples of each of its prompts.
        """
        if self._admission is None or self._ask is None:
            return
        ask, self._ask = self._ask, None
        first = [_first(prompt) for prompt in samples]
        num_generated = sum(len(sample.ids) for prompt in samples for sample in prompt)
        self._admission.gate.ended(ask, max(first) if first and all(first) else None, num_generated)
        self._admission.look()

    def outcome(
        self, samples: Sequence[Sequence[Answered]], error: BaseException | None
    ) -> str | None:
        """Outcome of the request against its targets.

        Args:
            samples: Samples of each of its prompts.
            error: The failure; None if the request succeeded.

        Returns:
            met, late_first_token, slow_tokens, refused, cancelled or failed; None: it has no
            target, or could not be served whatever the load.
        """
        if not self._targets:
            return None
        if error is None:
            first = [_first(prompt) for prompt in samples]
            first_s = max(first) - self._arrival if first and all(first) else None
            paces = [pace for prompt in samples for one in prompt if (pace := one.pace_s)]
            return self._targets.outcome(first_s, max(paces, default=None))
        if isinstance(error, Overloaded):
            return "refused"
        if isinstance(error, (asyncio.CancelledError, GeneratorExit, Cancelled)):
            return "cancelled"
        is_clients = isinstance(error, WeftError) and error.http_status < 500
        return None if is_clients else "failed"


def _first(samples: Sequence[Answered]) -> float:
    """Time of the first token of any sample; 0: there was none."""
    return min((one.first_token_time for one in samples if one.first_token_time), default=0.0)
