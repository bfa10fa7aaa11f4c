"""The parts that a role's service is built from."""

from __future__ import annotations

from dataclasses import dataclass

from weft.common.telemetry.spans import Tracer
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.service import Queries
from weft.common.worker.settings import WorkerSettings
from weft.contract.reports import EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The parts of one worker that its role's service uses."""

    settings: WorkerSettings
    engine: EngineClient
    info: EngineInfo
    worker_id: str
    queries: Queries
    tracer: Tracer
