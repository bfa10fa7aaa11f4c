"""What gateways tell of a mesh, as observations of each model."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping

from weft.planner.forecast import Speed
from weft.planner.policy import Observation
from weft.planner.recent import RecentRequests
from weft.v1 import mesh_pb2

PREFILLS = (mesh_pb2.MEMBER_ROLE_PREFILL,)
DECODES = (mesh_pb2.MEMBER_ROLE_DECODE, mesh_pb2.MEMBER_ROLE_BOTH)
WORKERS = (*PREFILLS, *DECODES)


def _counts(told: mesh_pb2.MeshDemand) -> tuple[int, ...]:
    return (
        told.requests,
        told.ended_prompts,
        told.cached_tokens,
        told.output_tokens,
        *told.prompts,
    )


def _gained(new: mesh_pb2.MeshDemand, old: mesh_pb2.MeshDemand | None) -> mesh_pb2.MeshDemand:
    """What came between two messages of a gateway. A gateway that was restarted counts anew, and
    of one that is heard for the first time requests are not counted: they came at any time.
    """
    if old is None or any(map(operator.lt, _counts(new), _counts(old))):
        first = mesh_pb2.MeshDemand()
        first.CopyFrom(new)
        first.requests = 0
        return first
    return mesh_pb2.MeshDemand(
        requests=new.requests - old.requests,
        prompts=map(operator.sub, new.prompts, old.prompts),
        prompt_tokens=map(operator.sub, new.prompt_tokens, old.prompt_tokens),
        ended_prompts=new.ended_prompts - old.ended_prompts,
        ended_prompt_tokens=new.ended_prompt_tokens - old.ended_prompt_tokens,
        cached_tokens=new.cached_tokens - old.cached_tokens,
        output_tokens=new.output_tokens - old.output_tokens,
    )


class MeshPicture:
    """The newest message of each gateway. Gateways see the same workers, and requests of their own.

    Messages are taken in order; counts are those since this picture began.
    """

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, mesh_pb2.WatchMeshResponse]] = {}
        self._told: dict[tuple[str, str], mesh_pb2.MeshDemand] = {}
        """The newest counts, by gateway and model."""
        self._recent: dict[str, RecentRequests] = {}
        self._requests: Counter[str] = Counter()

    def take(self, gateway: str, now_s: float, message: mesh_pb2.WatchMeshResponse) -> None:
        self._newest[gateway] = (now_s, message)
        for demand in message.demand:
            key = (gateway, demand.model)
            gained = _gained(demand, self._told.get(key))
            self._told[key] = demand
            self._requests[demand.model] += gained.requests
            recent = self._recent.setdefault(demand.model, RecentRequests())
            recent.prompts(gained.prompts, gained.prompt_tokens)
            if gained.ended_prompts:
                recent.ended(
                    gained.ended_prompts,
                    gained.ended_prompt_tokens,
                    gained.cached_tokens,
                    gained.output_tokens,
                )

    def forget(self, gateway: str) -> None:
        """A gateway that is gone for good is not waited for; its requests stay counted."""
        self._newest.pop(gateway, None)
        self._told = {key: told for key, told in self._told.items() if key[0] != gateway}

    def models(self) -> list[str]:
        return sorted(self._recent)

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
        recent = self._recent.get(model)
        if not self._newest or recent is None:
            return None
        members = list(self.workers(model).values())
        # Every gateway must be heard: each has requests of its own.
        heard_s = min(at_s for at_s, _ in self._newest.values())
        healthy = [one for one in members if one.healthy]
        shares = [_share(one) for one in healthy if one.pages.total]
        return Observation(
            time_s=heard_s,
            requests=self._requests[model],
            lengths=recent.lengths(),
            queued_tokens=float(sum(one.queued_tokens for one in members)),
            prefill=sum(one.role in PREFILLS for one in members),
            decode=sum(one.role in DECODES for one in members),
            ready=len(healthy),
            able=sum(one.HasField("role_state") for one in members),
            both=sum(one.role == mesh_pb2.MEMBER_ROLE_BOTH for one in members),
            speed=_speed(healthy),
            worst_share=max(shares, default=0.0),
            mean_share=sum(shares) / len(shares) if shares else 0.0,
        )


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
