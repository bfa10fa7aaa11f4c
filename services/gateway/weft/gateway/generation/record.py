"""One client's request, from its arrival to its end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.contract.errors import Cancelled, Overloaded, PeerUnavailable, WeftError
from weft.gateway.admission.limits import Charge
from weft.gateway.admission.slo import NO_TARGETS, AdmissionRequest, Targets
from weft.gateway.catalogue import ServedModel
from weft.gateway.generation.generation import Generation
from weft.gateway.generation.sample_output import SampleOutput
from weft.gateway.generation.stream import TokenStream
from weft.gateway.request import GenerateRequest
from weft.gateway.telemetry.request_trace import RequestTrace


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What is known of a request that waits, runs or has ended. Times are those of the event loop.

    The pipeline fills it in. Metrics, the log, traces and the mesh's view read it.
    """

    request: GenerateRequest
    """The request as it is by now: at first as its dialect translated it."""
    arrival: float
    trace: RequestTrace
    deadline: float = math.inf
    """When it must have ended."""
    first_token_deadline: float = math.inf
    """When each of its prompts must have a token, if the client says so; else its deadline."""
    served: ServedModel | None = None
    """The model that serves it; None: the requested one does not exist, or is not known yet."""
    targets: Targets = NO_TARGETS
    """Latency targets in force for it, once it has passed its checks."""
    ask: AdmissionRequest | None = None
    """The request's place in the latency gate; None: it has not passed the gate, or need not."""
    charge: Charge | None = None
    """What it is charged for; None: it was refused before."""
    num_scores: int = 0
    """Number of prompt log-probabilities for which the request has room."""
    stream: TokenStream | None = None
    """The request's stream; None while the request waits for one, and if it was refused."""
    waiter: asyncio.Task[object] | None = None
    """The task that waits until the request has a stream; None: nothing waits."""
    is_cancelled: bool = False
    """Whether the client cancelled it by its id while it waited."""
    outcome: str = ""
    """ok, or the failure's reason in lower case; empty: it has not ended."""
    failure: BaseException | None = None
    """Why it failed."""
    ended_at: float | None = None
    """None: it has not ended."""

    @property
    def state(self) -> str:
        """waiting or running; its outcome once it has ended."""
        return self.outcome or ("waiting" if self.stream is None else "running")

    @property
    def model(self) -> str:
        """Name of what serves it, as the client gave it where nothing has begun yet."""
        return self.request.model if self.stream is None else self.stream.model

    @property
    def duration_s(self) -> float:
        """Time since its arrival, or until its end."""
        ended_at = self.ended_at
        if ended_at is None:
            ended_at = asyncio.get_running_loop().time()
        return ended_at - self.arrival

    @property
    def generations(self) -> Sequence[Generation]:
        """A generation for each prompt; empty: the request was refused, or waits."""
        return () if self.stream is None else self.stream.generations

    @property
    def worker_id(self) -> str:
        """Id of the owner of its first prompt, or of the last one; empty: none."""
        return self.generations[0].worker_id if self.generations else ""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompts."""
        return sum(one.num_prompt_tokens for one in self.generations)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV the owners had."""
        return sum(one.cached_prompt_tokens for one in self.generations)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(sample.ids) for one in self.generations for sample in one.samples)

    @property
    def num_charged_tokens(self) -> int | None:
        """Tokens that it has used; None: it was refused for lack of room or workers."""
        if self.stream is None:
            is_refused = isinstance(self.failure, WeftError) and self.failure.retryable
            return None if is_refused else 0
        if not self.num_output_tokens and isinstance(self.failure, (Overloaded, PeerUnavailable)):
            return None
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def first_token_at(self) -> float | None:
        """Time of the first token of any sample; None: there is none."""
        return min(filter(None, map(_first_token_at, self.generations)), default=None)

    @property
    def first_tokens_at(self) -> float | None:
        """Time at which each of its prompts had a token; None: one has none."""
        times = [_first_token_at(one) for one in self.generations]
        return max(times) if times and all(times) else None

    @property
    def target_outcome(self) -> str | None:
        """Outcome of the request against its targets.

        Returns:
            met, late_first_token, slow_tokens, refused, cancelled or failed; None: it has no
            target, or could not be served whatever the load.
        """
        if not self.targets:
            return None
        failure = self.failure
        if failure is None:
            first_at = self.first_tokens_at
            first_s = None if first_at is None else first_at - self.arrival
            samples: list[SampleOutput] = [s for one in self.generations for s in one.samples]
            paces = [pace for sample in samples if (pace := sample.pace_s)]
            return self.targets.outcome(first_s, max(paces, default=None))
        if isinstance(failure, Overloaded):
            return "refused"
        if isinstance(failure, (asyncio.CancelledError, GeneratorExit, Cancelled)):
            return "cancelled"
        is_clients = isinstance(failure, WeftError) and failure.http_status < 500
        return None if is_clients else "failed"


def _first_token_at(generation: Generation) -> float:
    """Time of the first token of any sample; 0: there was none."""
    times = (sample.first_token_time for sample in generation.samples if sample.first_token_time)
    return min(times, default=0.0)
