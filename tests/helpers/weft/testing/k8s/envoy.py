"""Envoy, as a gateway of an InferencePool configures it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx

TOOLS = Path(__file__).resolve().parents[4] / "tools" / "envoy"
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-test-subset"
"""Header from which the tests' Envoy makes the subset of endpoints."""
DUPLEX = {
    "request_header_mode": "SEND",
    "response_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_trailer_mode": "SEND",
}
BUFFERED = {
    "request_header_mode": "SEND",
    "response_header_mode": "SKIP",
    "request_body_mode": "BUFFERED",
    "response_body_mode": "NONE",
    "request_trailer_mode": "SKIP",
    "response_trailer_mode": "SKIP",
}
LISTENERS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "duplex": (DUPLEX, "by_metadata"),
    "buffered": (BUFFERED, "by_header"),
}
"""Each with its processing mode and the cluster that reads the picker's choice."""
FAILS_OPEN = "open"
"""A listener whose requests need no picker while there is none; buffered."""
SOURCES: Mapping[str, Mapping[str, object]] = {
    "by_metadata": {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}},
    "by_header": {"header": DESTINATION},
}
"""Where clusters find it."""
_TYPES = "type.googleapis.com/envoy"
_READY_S = 60.0


def binary() -> str | None:
    """Envoy's program; None: there is none."""
    own = TOOLS / "envoy" / "_bin" / "envoy"
    return str(own) if own.exists() else shutil.which("envoy")


class Envoy:
    """One Envoy in front of REST edges; a context manager that ends it."""

    def __init__(self, folder: Path, pickers: Sequence[str], edges: Sequence[str]) -> None:
        program = binary()
        assert program is not None
        self._admin = folder / "envoy-admin"
        self.log_path = folder / "envoy.log"
        config = folder / "envoy.json"
        config.write_text(json.dumps(bootstrap(pickers, edges)))
        self._log: IO[bytes] = self.log_path.open("ab")
        command = [program, "-c", str(config), "--admin-address-path", str(self._admin)]
        command += ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def urls(self) -> dict[str, str]:
        """Addresses of the listeners by their names, once Envoy serves."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log_path.read_text(errors="replace")
            try:
                admin = f"http://{self._admin.read_text().strip()}"
                ready = httpx.get(f"{admin}/ready", trust_env=False)
                if ready.status_code == 200:
                    told = httpx.get(f"{admin}/listeners?format=json", trust_env=False).json()
                    return {
                        one["name"]: "http://127.0.0.1:"
                        f"{one['local_address']['socket_address']['port_value']}"
                        for one in told["listener_statuses"]
                    }
            except (OSError, httpx.TransportError):
                pass
            time.sleep(0.02)
        raise AssertionError(self.log_path.read_text(errors="replace"))


def bootstrap(pickers: Sequence[str], edges: Sequence[str]) -> dict[str, Any]:
    """Envoy's whole configuration."""
    return {
        "admin": {"address": _address("127.0.0.1:0")},
        "static_resources": {
            "listeners": [
                *(_listener(name, mode, cluster) for name, (mode, cluster) in LISTENERS.items()),
                _listener(FAILS_OPEN, BUFFERED, "by_header", fails_open=True),
            ],
            "clusters": [
                _picker_cluster(pickers),
                *(_pool_cluster(name, source, edges) for name, source in SOURCES.items()),
            ],
        },
    }


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _listener(
    name: str, mode: Mapping[str, str], cluster: str, *, fails_open: bool = False
) -> dict[str, Any]:
    subset = {
        "header": SUBSET,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": f"{DESTINATION}-subset",
        },
        "remove": True,
    }
    process = {
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": dict(mode),
        "message_timeout": "5s",
        "failure_mode_allow": fails_open,
        "status_on_error": {"code": "ServiceUnavailable"},
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    filters = {
        "header_to_metadata": (
            "header_to_metadata.v3.Config",
            {"request_rules": [subset]},
        ),
        "ext_proc": ("ext_proc.v3.ExternalProcessor", process),
        "router": ("router.v3.Router", {}),
    }
    manager = {
        "@type": f"{_TYPES}.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": name,
        "http_filters": [
            {
                "name": f"envoy.filters.http.{filter_name}",
                "typed_config": {"@type": f"{_TYPES}.extensions.filters.http.{kind}", **config},
            }
            for filter_name, (kind, config) in filters.items()
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "0s"}}
                    ],
                }
            ]
        },
    }
    return {
        "name": name,
        "address": _address("127.0.0.1:0"),
        # A body that is buffered has to fit.
        "per_connection_buffer_limit_bytes": 32 << 20,
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ]
            }
        ],
    }


def _endpoints(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    found = [{"endpoint": {"address": _address(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": found}]}


def _picker_cluster(pickers: Sequence[str]) -> dict[str, Any]:
    options = {
        "@type": f"{_TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": "picker",
        "connect_timeout": "1s",
        "load_assignment": _endpoints("picker", pickers),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options
        },
        # As kubelets do by the readiness of the picker's pods.
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "0.2s",
                "no_traffic_interval": "0.2s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": "readiness"},
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
    }


def _pool_cluster(name: str, source: Mapping[str, object], edges: Sequence[str]) -> dict[str, Any]:
    """The edges, of which the picker's choice is taken, as `source` has it; else any."""
    override = {
        "override_host_sources": [source],
        "fallback_policy": _policy("round_robin", "RoundRobin", {}),
    }
    return {
        "name": name,
        "connect_timeout": "1s",
        "load_assignment": _endpoints(name, edges),
        "load_balancing_policy": _policy("override_host", "OverrideHost", override),
    }


def _policy(name: str, kind: str, config: Mapping[str, object]) -> dict[str, Any]:
    typed = {"@type": f"{_TYPES}.extensions.load_balancing_policies.{name}.v3.{kind}", **config}
    extension = {"name": f"envoy.load_balancing_policies.{name}", "typed_config": typed}
    return {"policies": [{"typed_extension_config": extension}]}
