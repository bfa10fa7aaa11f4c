"""Settings of the REST edge. `scripts/gen_rest_settings.py` writes them for its Go sources."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from weft.common.settings import ServiceSettings, Settings, setting_of
from weft.gateway.settings import GatewaySettings


class RestSettings(Settings):
    """Serves the gateways' REST APIs. It is Go and has no TOML file."""

    program: ClassVar[str] = "rest"

    listen: str = Field("127.0.0.1:8000", description="address to serve REST on, host:port")
    backend: str = Field(
        "127.0.0.1:50051",
        description="gRPC addresses of the gateways, host:port with commas between; calls are "
        "spread over all",
    )
    metrics_listen: str = Field(
        "", description="address to serve Prometheus metrics on, host:port; empty = none"
    )
    picker_listen: str = Field(
        "",
        description="address to answer Envoy's external processing on as an endpoint picker, "
        "host:port; empty = none",
    )
    picker_endpoints: str = Field(
        "",
        description="REST edges that the picker may send requests to, host:port with commas "
        "between; a name with several addresses is as many edges",
    )
    ready_file: Path | None = setting_of(ServiceSettings, "ready_file")
    max_body_bytes: int = setting_of(GatewaySettings, "max_body_bytes")
    max_held_bytes: int = Field(
        0,
        ge=0,
        description="most bytes of request bodies that are not passed on yet; more are answered "
        "with 503, in bytes; 0 = room for four of the largest, and no less than 128 MiB",
    )
    ready_grace_s: float = setting_of(GatewaySettings, "ready_grace_s")
    drain_timeout: timedelta = Field(
        timedelta(seconds=10),
        ge=timedelta(0),
        description="time that running requests then get to finish, as 10s or 1m",
    )
    comment_after: timedelta = Field(
        timedelta(seconds=15),
        ge=timedelta(0),
        description="time without an event after which a stream gets a comment, as 15s; 0 = never",
    )
    tls_cert: Path | None = setting_of(ServiceSettings, "tls_cert")
    tls_key: Path | None = setting_of(ServiceSettings, "tls_key")
    tls_ca: Path | None = setting_of(ServiceSettings, "tls_ca")
    https_cert: Path | None = Field(
        None, description="PEM certificate that REST clients see; none = plain HTTP"
    )
    https_key: Path | None = Field(None, description="PEM key of the certificate for HTTPS")
    insecure: bool = setting_of(ServiceSettings, "insecure")
    otlp_endpoint: str = setting_of(ServiceSettings, "otlp_endpoint")
    trace_sample_ratio: float = setting_of(ServiceSettings, "trace_sample_ratio")
    tracing: bool = setting_of(ServiceSettings, "tracing")
    allowed_origins: str = Field(
        "",
        description="origins whose pages may send requests and read answers in a browser (CORS), "
        "as https://chat.example.org, with commas between; * = all, empty = none",
    )
