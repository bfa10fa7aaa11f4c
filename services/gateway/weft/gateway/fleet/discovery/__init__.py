"""Sources of worker addresses."""

from __future__ import annotations

import os

from weft.common.kubernetes import api_server
from weft.gateway.fleet.discovery.base import Discovery, Endpoint, Role, StaticDiscovery
from weft.gateway.settings import GatewaySettings

__all__ = ["Discovery", "Endpoint", "Role", "StaticDiscovery", "make_discovery"]


def make_discovery(settings: GatewaySettings) -> Discovery:
    """Creates the source that the settings name.

    Raises:
        ConfigError: The source cannot be used on this machine.
    """
    if settings.discovery == "dns":
        from weft.gateway.fleet.discovery.dns import DnsDiscovery

        return DnsDiscovery(settings.decode, settings.prefill, settings.discovery_interval_s)
    if settings.discovery == "file":
        from weft.gateway.fleet.discovery.file import FileDiscovery

        assert settings.discovery_file is not None, "checked with the settings"
        return FileDiscovery(settings.discovery_file, settings.discovery_interval_s)
    if settings.discovery == "kubernetes":
        # Imported here, since only this source needs an HTTP client.
        from weft.gateway.fleet.discovery.kubernetes import KubernetesDiscovery

        api = api_server(
            os.environ,
            settings.kubernetes_api,
            settings.kubernetes_namespace,
            settings.kubernetes_token_file,
            settings.kubernetes_ca_file,
        )
        return KubernetesDiscovery(api, settings.decode, settings.prefill)
    return StaticDiscovery(settings.decode, settings.prefill)
