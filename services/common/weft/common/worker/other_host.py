"""A worker's process on a host other than the first: it serves nothing, and follows host 0."""

from __future__ import annotations

import logging

from weft.common.default_id import default_id
from weft.common.telemetry.logging import configure_logging
from weft.common.worker.settings import WorkerSettings
from weft.contract.errors import ConfigError
from weft.engine.base.config import Role

logger = logging.getLogger(__name__)


def follow_first_host(settings: WorkerSettings, role: Role) -> int:
    """Takes part in the steps of host 0 until it ends or is lost; returns the exit status, as
    `run_worker` does.
    """
    configure_logging(role, settings.log_level, settings.log_format)
    worker_id = settings.worker_id or default_id(role, settings.port)
    try:
        config = settings.engine_config(role, worker_id)
    except ConfigError as error:
        logger.error("settings are not valid: %s", error.message)
        return 2
    # Only such a process computes steps by itself.
    from weft.engine.executor.ranks.follow import follow_host

    return follow_host(config)
