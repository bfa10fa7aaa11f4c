"""Settings of the planner."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator
from weft.common.kubernetes import KubernetesSettings
from weft.common.rpc.listen import split_address
from weft.common.settings import ServiceSettings, setting_of
from weft.planner.actuators.base import ActuatorName
from weft.planner.actuators.kubernetes import ScaleTarget
from weft.planner.policy import Rules

DNS = "dns:"
_LEASES = 6.0
"""Decisions for which a lease lasts."""


class PlannerSettings(ServiceSettings):
    """Says how many workers each model should have; advises unless it is told to act."""

    program: ClassVar[str] = "planner"

    planner_id: str = Field(
        "",
        max_length=64,
        description="id that no other planner has; empty = planner, host name and port",
    )
    gateway: list[str] = Field(
        [],
        min_length=1,
        max_length=16,
        description="operators' ports of all gateways, host:port each; dns:NAME:PORT = at each "
        "address of a name. Their token is that of --admin-token-file",
    )
    act: list[ActuatorName] = Field(
        [],
        max_length=2,
        description="what it changes so that there are as many workers as it wants; empty = it "
        "only tells. roles: roles of workers that were started with `--role both`. processes: "
        "workers of `weft up --max-workers`. kubernetes: replicas that --kubernetes-scale names. "
        "One planner at a time acts",
    )
    supervisor_file: Path | None = Field(
        None,
        description="with act = processes: `supervisor.json` in the state folder of `weft up`",
    )
    kubernetes_scale: list[str] = Field(
        [],
        max_length=64,
        description="whose replicas are a model's workers of a role: MODEL:ROLE=KIND/NAME, ROLE "
        "prefill or decode, KIND statefulsets, deployments or leaderworkersets",
    )
    kubernetes_api: str = setting_of(KubernetesSettings, "kubernetes_api")
    kubernetes_namespace: str = setting_of(KubernetesSettings, "kubernetes_namespace")
    kubernetes_token_file: Path | None = setting_of(KubernetesSettings, "kubernetes_token_file")
    kubernetes_ca_file: Path | None = setting_of(KubernetesSettings, "kubernetes_ca_file")
    first_token_s: float = Field(
        1.0, gt=0, le=3600, description="target: time to the first token, in seconds"
    )
    inter_token_s: float = Field(
        0.05, gt=0, le=60, description="target: time between tokens, in seconds"
    )
    enforced: bool = Field(
        False, description="gateways refuse requests that would miss these targets"
    )
    budget: int = Field(
        0, ge=0, le=4096, description="most workers of a model, of all roles; 0 = no limit"
    )
    least_prefill: int = Field(1, ge=0, le=4096, description="least prefill workers of a model")
    least_decode: int = Field(1, ge=1, le=4096, description="least decode workers of a model")
    calm_s: float = Field(
        Rules().hold_s,
        ge=10,
        le=86400,
        description="time for which fewer workers must have been enough before fewer are wanted, "
        "in seconds",
    )
    interval_s: float = Field(
        5.0, ge=1, le=60, description="time between two decisions, in seconds"
    )

    @property
    def lease_s(self) -> float:
        """Time by which what a planner tells, and a role, outlasts it."""
        return _LEASES * self.interval_s

    @property
    def scale_targets(self) -> tuple[ScaleTarget, ...]:
        return tuple(map(ScaleTarget.parse, self.kubernetes_scale))

    @field_validator("gateway")
    @classmethod
    def _check_gateways(cls, gateways: list[str]) -> list[str]:
        for one in gateways:
            split_address(one.removeprefix(DNS))
        return gateways

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        places = [(one.model, one.role) for one in self.scale_targets]
        if len(set(places)) != len(places):
            raise ValueError("--kubernetes-scale: a role of a model is named twice")
        if ("kubernetes" in self.act) != bool(places):
            raise ValueError("--act kubernetes and --kubernetes-scale belong together")
        return self

    @model_validator(mode="after")
    def _check_supervisor(self) -> Self:
        if "processes" in self.act and self.supervisor_file is None:
            raise ValueError("--act processes needs --supervisor-file, of `weft up`")
        return self

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        if self.gateway and self.admin_token_file is None:
            raise ValueError("--gateway needs --admin-token-file, with the gateways' token")
        return self
