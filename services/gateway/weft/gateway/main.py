"""Entry point of the gateway process."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence

from weft.common.faults import allow_sabotage
from weft.common.rpc.server import run
from weft.common.settings import load_settings, require_paths
from weft.common.telemetry.logging import configure_logging
from weft.contract.errors import ConfigError, ModelError
from weft.gateway.app import GatewayApp
from weft.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)

_YOUNG_OBJECTS = 20_000
"""Objects made and not freed that start a collection. A step's message wakes a task of each stream
at once, and all that they hold for a moment would be visited again and again."""
_OLDER_ROUNDS = 20
"""Collections of younger objects before one of older ones."""


def main(argv: Sequence[str]) -> int:
    """Runs a gateway until SIGTERM or SIGINT. `argv` has its flags, without the program's name.
    Returns the exit status: 0 after a drain, 1 when it could not start. Raises SystemExit if the
    settings are not valid (2), or help was asked for (0).
    """
    settings = load_settings(GatewaySettings, argv)
    require_paths(settings)
    configure_logging("gateway", settings.log_level, settings.log_format)
    if settings.enable_faults:
        allow_sabotage("gateway")
    return run(_serve(settings))


async def _serve(settings: GatewaySettings) -> int:
    try:
        app = GatewayApp(settings)
        # Objects made at start stay for ever, so full collections need not visit them later.
        # This comes before `start`, after which others may end the gateway at once.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG_OBJECTS, _OLDER_ROUNDS, _OLDER_ROUNDS)
        await app.start()
    except (ConfigError, ModelError) as error:
        _log.error("cannot start: %s", error.message)
        return 1
    try:
        await app.run_until_signal()
    finally:
        await app.close()
    return 0
