"""What gateways tell of a mesh, as observations of each model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.planner.forecast import Speed
from weft.planner.policy import Observation
from weft.v1 import mesh_pb2

_NEW_WEIGHT = 0.2
"""Weight of the newest message in means of sizes and answers, which messages tell as counts."""
_FIRST_OUTPUT_TOKENS = 128.0
PREFILLS = (mesh_pb2.MEMBER_ROLE_PREFILL,)
DECODES = (mesh_pb2.MEMBER_ROLE_DECODE, mesh_pb2.MEMBER_ROLE_BOTH)
WORKERS = (*PREFILLS, *DECODES)


@dataclass(slots=True)
class _Sizes:
    """Of one model at one gateway: counts seen last, and smoothed shares."""

    prompts: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    last: mesh_pb2.MeshDemand | None = None
    output_tokens: float = _FIRST_OUTPUT_TOKENS
    cached_share: float = 0.0

    def take(self, told: mesh_pb2.MeshDemand) -> int:
        """Returns the requests that came since the message before."""
        last = self.last
        self.last = told
        if last is None or told.requests < last.requests:
            # The gateway was restarted.
            self.prompts, self.tokens = list(told.prompts), list(told.prompt_tokens)
            return 0
        gained = [new - old for new, old in zip(told.prompts, last.prompts, strict=False)]
        tokens = [
            new - old for new, old in zip(told.prompt_tokens, last.prompt_tokens, strict=False)
        ]
        if any(gained):
            kept = 1 - _NEW_WEIGHT
            self.prompts = [kept * a + b for a, b in zip(self.prompts, gained, strict=False)]
            self.tokens = [kept * a + b for a, b in zip(self.tokens, tokens, strict=False)]
        if ended := told.ended_prompts - last.ended_prompts:
            weight = min(1.0, _NEW_WEIGHT * ended)
            mean = (told.output_tokens - last.output_tokens) / ended
            self.output_tokens += weight * (mean - self.output_tokens)
            if prompt := told.ended_prompt_tokens - last.ended_prompt_tokens:
                share = (told.cached_tokens - last.cached_tokens) / prompt
                self.cached_share += weight * (min(1.0, share) - self.cached_share)
        return told.requests - last.requests


class MeshPicture:
    """The newest message of each gateway. Gateways see the same workers, and requests of their own.

    Messages are taken in order; counts are those since this picture began.
    """

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, mesh_pb2.WatchMeshResponse]] = {}
        self._sizes: dict[tuple[str, str], _Sizes] = {}
        self._requests: dict[str, int] = {}

    def take(self, gateway: str, now_s: float, message: mesh_pb2.WatchMeshResponse) -> None:
        self._newest[gateway] = (now_s, message)
        for demand in message.demand:
            sizes = self._sizes.setdefault((gateway, demand.model), _Sizes())
            gained = sizes.take(demand)
            self._requests[demand.model] = self._requests.get(demand.model, 0) + gained

    def forget(self, gateway: str) -> None:
        """A gateway that is gone for good is not waited for; its requests stay counted."""
        self._newest.pop(gateway, None)
        self._sizes = {key: sizes for key, sizes in self._sizes.items() if key[0] != gateway}

    def models(self) -> list[str]:
        return sorted({model for _, model in self._sizes})

    def workers(self, model: str) -> Mapping[str, mesh_pb2.MeshMember]:
        """Workers of a model by their ids, as the newest message tells them."""
        if not self._newest:
            return {}
        _, message = max(self._newest.values(), key=lambda one: one[0])
        return {
            one.member_id: one
            for one in message.members
            if one.role in WORKERS and one.model == model and not one.draining
        }

    def observe(self, model: str) -> Observation | None:
        """None: nothing is known of the model."""
        if not self._newest:
            return None
        members = list(self.workers(model).values())
        # Every gateway must be heard: each has requests of its own.
        heard_s = min(at_s for at_s, _ in self._newest.values())
        healthy = [one for one in members if one.healthy]
        shares = [_share(one) for one in healthy if one.pages.total]
        sizes, output_tokens = self._means(model)
        return Observation(
            time_s=heard_s,
            requests=self._requests.get(model, 0),
            sizes=sizes,
            output_tokens=output_tokens,
            queued_tokens=float(sum(one.queued_tokens for one in members)),
            prefill=sum(one.role in PREFILLS for one in members),
            decode=sum(one.role in DECODES for one in members),
            ready=len(healthy),
            speed=_speed(healthy),
            worst_share=max(shares, default=0.0),
            mean_share=sum(shares) / len(shares) if shares else 0.0,
        )

    def _means(self, model: str) -> tuple[tuple[tuple[float, float], ...], float]:
        """Prompt tokens to be computed with their shares, and mean tokens of an answer."""
        found = [sizes for (_, name), sizes in self._sizes.items() if name == model]
        counts = _summed(sizes.prompts for sizes in found)
        tokens = _summed(
            [(1 - sizes.cached_share) * one for one in sizes.tokens] for sizes in found
        )
        total = sum(counts)
        shares = tuple(
            (size / count, count / total)
            for size, count in zip(tokens, counts, strict=True)
            if count
        )
        ended = [one for one in found if one.last is not None and one.last.ended_prompts]
        outputs = [one.output_tokens for one in ended]
        return shares, sum(outputs) / len(outputs) if outputs else _FIRST_OUTPUT_TOKENS


def _summed(lists: Iterable[Sequence[float]]) -> list[float]:
    total: list[float] = []
    for one in lists:
        total += [0.0] * (len(one) - len(total))
        for at, value in enumerate(one):
            total[at] += value
    return total


def _share(member: mesh_pb2.MeshMember) -> float:
    return member.pages.used / member.pages.total


def _speed(members: Iterable[mesh_pb2.MeshMember]) -> Speed:
    """Of the slowest worker for each part: what is planned must hold there too."""
    told = [one.speed for one in members if one.HasField("speed")]
    rates = [one.prefill_tokens_per_second for one in told if one.prefill_tokens_per_second > 0]
    steps = [
        (base, each)
        for one in told
        if (base := one.step_base.ToNanoseconds() / 1e9)
        + (each := one.step_request.ToNanoseconds() / 1e9)
        > 0
    ]
    return Speed(
        prefill_tokens_per_s=min(rates, default=0.0),
        step_base_s=max((base for base, _ in steps), default=0.0),
        step_request_s=max((each for _, each in steps), default=0.0),
    )
