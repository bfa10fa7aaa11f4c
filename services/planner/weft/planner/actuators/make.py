"""The actuators that settings name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from weft.common.admin import read_token
from weft.common.kubernetes import api_server
from weft.common.rpc.tls import Identity
from weft.planner.actuators.base import Actuator, ActuatorName
from weft.planner.actuators.kubernetes import KubernetesActuator
from weft.planner.actuators.processes import ProcessActuator
from weft.planner.actuators.roles import RoleActuator
from weft.planner.gateways import GatewayCalls
from weft.planner.settings import PlannerSettings


def make_actuators(
    settings: PlannerSettings, calls: GatewayCalls, identity: Identity | None, planner_id: str
) -> Sequence[Actuator]:
    """Those that the settings name, in their order.

    Raises:
        ConfigError: One of them cannot be used with these settings or on this machine.
    """
    assert settings.admin_token_file is not None, "checked with the settings"
    token = read_token(settings.admin_token_file)

    def processes() -> Actuator:
        assert settings.supervisor_file is not None, "checked with the settings"
        return ProcessActuator(settings.supervisor_file, token, identity, planner_id)

    makers: Mapping[ActuatorName, Callable[[], Actuator]] = {
        "roles": lambda: RoleActuator(calls, settings.lease_s),
        "processes": processes,
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
