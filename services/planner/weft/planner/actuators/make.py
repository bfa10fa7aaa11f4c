"""The actuators that settings name."""

from __future__ import annotations

from collections.abc import Sequence

from weft.planner.actuators.base import Actuator, MeshCalls
from weft.planner.actuators.roles import RoleActuator
from weft.planner.settings import PlannerSettings


def make_actuators(settings: PlannerSettings, calls: MeshCalls) -> Sequence[Actuator]:
    """Those that the settings name, in their order.

    Raises:
        ConfigError: One of them cannot be used with these settings or on this machine.
    """
    makers = {"roles": lambda: RoleActuator(calls, settings.lease_s)}
    return [makers[name]() for name in settings.act]
