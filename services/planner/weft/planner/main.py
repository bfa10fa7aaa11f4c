"""The planner: `weft serve planner`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry
from weft.common.admin import AdminBackend
from weft.common.default_id import default_id
from weft.common.rpc.server import ServiceServer, run
from weft.common.rpc.tls import load_identity
from weft.common.settings import load_settings
from weft.common.tasks import start_logged
from weft.common.telemetry.logging import configure_logging
from weft.contract.errors import WeftError
from weft.keda import externalscaler_pb2_grpc
from weft.planner.planner import MeshPlanner
from weft.planner.scaler import SERVICE_NAME, ExternalScaler, PlanCollector
from weft.planner.settings import PlannerSettings

_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns the exit status."""
    settings = load_settings(PlannerSettings, sys.argv[1:] if argv is None else argv)
    return run(run_planner(settings))


class PlannerAdmin(AdminBackend):
    """The planner's part of AdminService."""

    def __init__(self, planner: MeshPlanner) -> None:
        self._planner = planner

    async def flush_cache(self) -> int:
        return 0

    async def dump_state(self, max_entries: int) -> Mapping[str, object]:
        planner = self._planner
        plans = {
            model: {
                "prefill": plan.prefill,
                "decode": plan.decode,
                "why": plan.why,
                "alarms": {alarm.name: alarm.text for alarm in plan.alarms},
            }
            for model, plan in list(planner.plans.items())[:max_entries]
        }
        return {"planner_id": planner.planner_id, "acts": planner.acts, "plans": plans}


async def run_planner(settings: PlannerSettings) -> int:
    """Runs the planner until a signal; returns the exit status."""
    configure_logging("planner", settings.log_level, settings.log_format)
    planner_id = settings.planner_id or default_id("planner", settings.port)
    try:
        # The certificate of an operator, with which the planner calls gateways.
        identity = load_identity(settings, "cli")
        planner = MeshPlanner(settings, planner_id, identity)
        registry = CollectorRegistry()
        registry.register(PlanCollector(planner))
        server = ServiceServer(settings, registry, admin=PlannerAdmin(planner), identity=identity)
        externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(
            ExternalScaler(planner), server.grpc
        )
        await server.start((SERVICE_NAME,))
    except WeftError as error:
        _log.error("%s", error.message)
        return 1
    planning = start_logged(planner.run())
    await server.set_serving(True)
    server.write_ready_file(worker_id=planner_id, role="planner")
    _log.info("ready", extra={"address": server.address, "planner_id": planner_id})

    async def drain() -> None:
        planning.cancel()

    try:
        await server.run_until_signal(drain)
        return 0
    finally:
        planning.cancel()
        await server.stop()
