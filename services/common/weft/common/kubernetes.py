"""Where the API server of a Kubernetes cluster is, and who asks it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from weft.common.rpc.listen import bracket
from weft.common.settings import Settings
from weft.contract.errors import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubernetesSettings(Settings):
    """Settings of programs that ask an API server."""

    kubernetes_api: str = Field(
        "", max_length=1024, description="API server, https://host:port; empty = this cluster's"
    )
    kubernetes_namespace: str = Field(
        "",
        max_length=63,
        description="namespace of the mesh; empty = that of the service account",
    )
    kubernetes_token_file: Path | None = Field(
        None, description="bearer token for the API server; none = the service account's"
    )
    kubernetes_ca_file: Path | None = Field(
        None, description="PEM authorities of the API server; none = the service account's"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """Address and credentials of the API server."""

    url: str
    """URL, https://host:port."""
    namespace: str
    token_file: Path
    """Token file, read again for every request: bound tokens are replaced every hour."""
    ca_file: Path

    def context(self) -> ssl.SSLContext:
        """Trusts the server's authorities.

        Raises:
            ConfigError: The token or the authorities cannot be read.
        """
        try:
            self.headers()
            return ssl.create_default_context(cafile=str(self.ca_file))
        except (OSError, ValueError, ssl.SSLError) as error:
            problem = f"Kubernetes: {self.ca_file}, {self.token_file}: {error}"
            raise ConfigError(problem) from error

    def headers(self) -> dict[str, str]:
        """Raises OSError or ValueError if the token cannot be read."""
        token = self.token_file.read_text(encoding="ascii").strip()
        return {"authorization": f"Bearer {token}"}


def api_server(
    environ: Mapping[str, str],
    url: str = "",
    namespace: str = "",
    token_file: Path | None = None,
    ca_file: Path | None = None,
    account: Path = SERVICE_ACCOUNT,
) -> ApiServer:
    """The configured API server; else that of the cluster in which this process runs.

    Raises:
        ConfigError: No API server is configured, and this process runs in no cluster.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not url:
        if not host or not port:
            raise ConfigError("not in a Kubernetes cluster; name its API with --kubernetes-api")
        url = f"https://{bracket(host)}:{port}"
    if not namespace:
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise ConfigError(
                "no namespace: this process has no service account; give --kubernetes-namespace"
            ) from error
    return ApiServer(
        url=url,
        namespace=namespace,
        token_file=token_file or account / "token",
        ca_file=ca_file or account / "ca.crt",
    )
