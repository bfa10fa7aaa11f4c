"""The actuators that settings name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from weft.common.kubernetes import api_server
from weft.planner.actuators.base import Actuator, ActuatorName, MeshCalls
from weft.planner.actuators.kubernetes import KubernetesActuator
from weft.planner.actuators.roles import RoleActuator
from weft.planner.settings import PlannerSettings


def make_actuators(settings: PlannerSettings, calls: MeshCalls) -> Sequence[Actuator]:
    """Those that the settings name, in their order.

    Raises:
        ConfigError: One of them cannot be used with these settings or on this machine.
    """
    makers: Mapping[ActuatorName, Callable[[], Actuator]] = {
        "roles": lambda: RoleActuator(calls, settings.lease_s),
        "kubernetes": lambda: KubernetesActuator(
            api_server(
                os.environ,
                settings.kubernetes_api,
                settings.kubernetes_namespace,
                settings.kubernetes_token_file,
                settings.kubernetes_ca_file,
            ),
            settings.scale_targets,
        ),
    }
    return [makers[name]() for name in settings.act]
