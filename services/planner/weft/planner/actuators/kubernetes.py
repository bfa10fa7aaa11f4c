"""Replicas of StatefulSets, Deployments and LeaderWorkerSets, by their `scale` subresource.

read      the replicas that are ordered, whoever has ordered them
patch     with the version that was read: an edit that came between is refused, and seen next time

Nothing else is asked of the API server, so a Role needs `get` and `patch` of these alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self, cast, get_args

import httpx
from pydantic import BaseModel, Field, ValidationError
from weft.common.kubernetes import ApiServer
from weft.contract.errors import ConfigError, PeerUnavailable
from weft.planner.actuators.base import Members
from weft.planner.forecast import Counts
from weft.planner.observe import DECODES, PREFILLS

ScaledRole = Literal["prefill", "decode"]
_TIMEOUT_S = 3.0
_GROUPS = {
    "statefulsets": "apps/v1",
    "deployments": "apps/v1",
    "leaderworkersets": "leaderworkerset.x-k8s.io/v1",
}
"""Kinds that can be scaled, with their groups and versions."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class ScaleTarget(NamedTuple):
    """What has a model's workers of one role."""

    model: str
    role: ScaledRole
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError unless `text` is MODEL:ROLE=KIND/NAME."""
        place, _, target = text.rpartition("=")
        model, _, role = place.rpartition(":")
        kind, _, name = target.partition("/")
        if not (model and role in get_args(ScaledRole) and kind in _GROUPS):
            raise ValueError(
                f"{text!r} is not MODEL:ROLE=KIND/NAME, ROLE prefill or decode, KIND one of "
                f"{', '.join(_GROUPS)}"
            )
        if not _NAME.fullmatch(name):
            raise ValueError(f"{text!r}: {name!r} is no name of an object")
        return cls(model, cast(ScaledRole, role), kind, name)

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


class _Metadata(BaseModel):
    resource_version: str = Field(alias="resourceVersion", min_length=1, max_length=64)


class _ScaleSpec(BaseModel):
    replicas: int = Field(0, ge=0, lt=1 << 31)
    """Left out where it is 0."""


class Scale(BaseModel):
    """autoscaling/v1 Scale, as far as it is read."""

    metadata: _Metadata
    spec: _ScaleSpec


class KubernetesActuator:
    """Orders replicas. What it does not scale of a model counts as it is."""

    def __init__(self, api: ApiServer, targets: Sequence[ScaleTarget]) -> None:
        """Reads the credentials; asks nothing yet. Raises ConfigError if they cannot be read."""
        self._api = api
        self._targets = targets
        self._client = httpx.AsyncClient(
            base_url=api.url, verify=api.context(), timeout=_TIMEOUT_S, trust_env=False
        )

    async def ordered(self, model: str, workers: Members) -> Counts | None:
        roles = [one.role for one in workers.values()]
        counts = {
            "prefill": sum(role in PREFILLS for role in roles),
            "decode": sum(role in DECODES for role in roles),
        }
        targets = self._targets_of(model)
        for target in targets:
            counts[target.role] = (await self._read(target)).spec.replicas
        return Counts(**counts) if targets else None

    async def order(
        self, model: str, wanted: Counts, workers: Members, *, apart: bool = True
    ) -> str:
        steps = []
        for target in self._targets_of(model):
            scale = await self._read(target)
            steps.append((getattr(wanted, target.role), target, scale))
        done = []
        # More of one role come before there are fewer of the other.
        for replicas, target, scale in sorted(steps, key=lambda one: one[2].spec.replicas - one[0]):
            if replicas != scale.spec.replicas:
                await self._patch(target, replicas, scale.metadata.resource_version)
                done.append(f"{target}: {replicas} replicas (were {scale.spec.replicas})")
        return "; ".join(done)

    async def close(self) -> None:
        await self._client.aclose()

    def _targets_of(self, model: str) -> list[ScaleTarget]:
        return [target for target in self._targets if target.model == model]

    def _path(self, target: ScaleTarget) -> str:
        space = f"/apis/{_GROUPS[target.kind]}/namespaces/{self._api.namespace}"
        return f"{space}/{target.kind}/{target.name}/scale"

    async def _read(self, target: ScaleTarget) -> Scale:
        return self._scale(target, await self._ask("GET", target))

    async def _patch(self, target: ScaleTarget, replicas: int, version: str) -> None:
        change = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        scale = self._scale(target, await self._ask("PATCH", target, change))
        if scale.spec.replicas != replicas:
            raise PeerUnavailable(
                f"{target}: {replicas} replicas were ordered, and the API server made that "
                f"{scale.spec.replicas}",
                stage="scale",
            )

    async def _ask(self, verb: str, target: ScaleTarget, change: object = None) -> httpx.Response:
        try:
            headers = self._api.headers()
            if change is not None:
                headers["content-type"] = "application/merge-patch+json"
            answer = await self._client.request(
                verb, self._path(target), json=change, headers=headers
            )
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise PeerUnavailable(
                f"{target}: the Kubernetes API cannot be asked: {type(error).__name__}: {error}",
                stage="scale",
            ) from error
        match answer.status_code:
            case 200:
                return answer
            case 401 | 403:
                hint = f"the service account needs get and patch of {target.kind}/scale"
                raise ConfigError(f"{target}: {answer.status_code}: {hint}", stage="scale")
            case 404:
                raise ConfigError(
                    f"{target}: there is none in {self._api.namespace}", stage="scale"
                )
            case 409:
                text = f"{target}: somebody else has changed it meanwhile"
                raise PeerUnavailable(text, stage="scale")
        text = f"{target}: the Kubernetes API answered {answer.status_code}"
        raise PeerUnavailable(text, stage="scale")

    @staticmethod
    def _scale(target: ScaleTarget, answer: httpx.Response) -> Scale:
        try:
            return Scale.model_validate_json(answer.content)
        except ValidationError as error:
            text = (
                f"{target}: the Kubernetes API answered with no Scale: {error.errors()[0]['msg']}"
            )
            raise PeerUnavailable(text, stage="scale") from error
