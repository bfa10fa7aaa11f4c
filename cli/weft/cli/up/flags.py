"""Further flags of services (`--decode-args` and its like), checked before anything starts."""

from __future__ import annotations

import shlex
import sys

from weft.cli.up.settings import UpSettings
from weft.common.settings import Settings, flag_problems


def check_flags(settings: UpSettings) -> None:
    """Refuses flags that a service would not take: prints each problem on a line of standard error,
    then raises SystemExit with status 2.
    """
    problems = [
        f"  --{service}-args: {problem}"
        for service, text in (
            ("prefill", settings.prefill_args),
            ("decode", settings.decode_args),
            ("kvstore", settings.kvstore_args),
            ("gateway", settings.gateway_args),
        )
        if text
        for problem in flag_problems(_settings_of(service), shlex.split(text))
    ]
    if problems:
        sys.stderr.write("\n".join(["weft up: settings are not valid", *problems, ""]))
        raise SystemExit(2)


def _settings_of(service: str) -> type[Settings]:
    """Imports the settings only when they are needed: most meshes have no further flags."""
    if service == "prefill":
        from weft.prefill.main import PrefillSettings

        return PrefillSettings
    if service == "decode":
        from weft.decode.main import DecodeSettings

        return DecodeSettings
    if service == "kvstore":
        from weft.kvstore.settings import KvStoreSettings

        return KvStoreSettings
    from weft.gateway.settings import GatewaySettings

    return GatewaySettings
