"""The decode worker: `weft serve decode`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from weft.common.rpc.server import run
from weft.common.settings import load_settings, require_paths, with_settings_of
from weft.common.worker.context import WorkerContext
from weft.common.worker.host import run_worker
from weft.common.worker.other_host import follow_first_host
from weft.common.worker.prefill_service import PrefillService
from weft.common.worker.role import RoleService
from weft.common.worker.settings import OF_DECODE, WorkerSettings, engine_setting
from weft.contract.settings import RoleName
from weft.decode.service import DecodeService
from weft.engine.base.config import EngineConfig

if TYPE_CHECKING:
    _DecodeSettings = WorkerSettings
else:
    _DecodeSettings = with_settings_of(WorkerSettings, EngineConfig, OF_DECODE)


class DecodeSettings(_DecodeSettings):
    """Owns requests and generates their tokens."""

    program: ClassVar[str] = "decode"

    stream_interval_s: float | None = engine_setting("stream_interval_s", None)
    role: Literal["decode", "both"] = Field(
        "decode",
        description="both: prefill for other workers too; what gateways use the worker for may "
        "then change while it runs (`weft role`)",
    )


_SERVICES: Mapping[RoleName, Sequence[Callable[[WorkerContext], RoleService]]] = {
    "decode": [DecodeService],
    "both": [DecodeService, PrefillService],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns the exit status."""
    settings = load_settings(DecodeSettings, sys.argv[1:] if argv is None else argv)
    require_paths(settings)
    if settings.host_rank:
        return follow_first_host(settings, settings.role)
    return run(run_worker(settings, settings.role, _SERVICES[settings.role]))
