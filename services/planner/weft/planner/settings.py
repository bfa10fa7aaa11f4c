"""Settings of the planner."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator
from weft.common.settings import ServiceSettings
from weft.planner.actuators.base import ActuatorName
from weft.planner.policy import Rules

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
        description="operators' ports of all gateways, host:port each; their token is that of "
        "--admin-token-file",
    )
    act: list[ActuatorName] = Field(
        [],
        max_length=2,
        description="what it changes so that there are as many workers as it wants; empty = it "
        "only tells. roles: roles of workers that were started with `--role both`. One planner at "
        "a time acts",
    )
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

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        if self.gateway and self.admin_token_file is None:
            raise ValueError("--gateway needs --admin-token-file, with the gateways' token")
        return self
