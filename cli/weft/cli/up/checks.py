"""Refuses workers that could not serve, before any of them starts: by their own settings, and by
the checks that the engine makes before it loads weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.cli.up.process import ServiceSpec
from weft.common.settings import load_settings
from weft.contract.errors import ConfigError, WeftError
from weft.engine.base.config import Role

_SERVE = "serve"


def check_workers(services: Sequence[ServiceSpec]) -> None:
    """Raises ConfigError, which names the worker and the setting, if a worker's settings do not fit
    one another, its model or its drafts.
    """
    for spec in services:
        program = spec.command[spec.command.index(_SERVE) + 1 :] if _SERVE in spec.command else ()
        if program and program[0] == "decode":
            _check(spec.name, "decode", program[1:])
        elif program and program[0] == "prefill":
            _check(spec.name, "prefill", program[1:])


def _check(name: str, role: Role, flags: Sequence[str]) -> None:
    # Imported here, so that `weft up --help` is quick.
    from weft.common.worker.adapter_needs import with_adapter_needs
    from weft.decode.main import DecodeSettings
    from weft.engine.base.placement import ProcessLimits, place_ranks
    from weft.engine.base.topology import Host
    from weft.engine.loop.combinations import check_combination
    from weft.prefill.main import PrefillSettings

    kind = DecodeSettings if role == "decode" else PrefillSettings
    try:
        settings = load_settings(kind, flags)
        config = settings.engine_config(getattr(settings, "role", role), name)
        check_combination(with_adapter_needs(settings, config, is_strict=True))
        place_ranks(config, Host(), ProcessLimits.of_this_process())
    except WeftError as error:
        raise ConfigError(f"{name}: {error.message}", param=error.param) from error
    except SystemExit as end:
        if not end.code:
            raise  # After `--help`.
        raise ConfigError(f"{name}: has the settings refused above") from end
