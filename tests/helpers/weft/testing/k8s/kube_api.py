"""A real kube-apiserver over an empty etcd, for one test run."""

from __future__ import annotations

import json
import secrets
import signal
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from weft.cli.up.ports import free_ports
from weft.testing.k8s.manifests import K8S, Object

BIN = K8S / "tools" / "bin"
ACCOUNTS = {name: f"system:serviceaccount:weft:weft-{name}" for name in ("gateway", "planner")}
_READY_S = 120.0


class KubeApi:
    """Starts both processes; `stop` ends them.

    Args:
        folder: For data, certificates, logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port, self._etcd_port, self._peer_port = free_ports("127.0.0.1", 3)
        self.url = f"https://127.0.0.1:{self.port}"
        self.ca = folder / "certificates" / "apiserver.crt"
        self.tokens = {name: secrets.token_hex(16) for name in ("admin", *ACCOUNTS, "nobody")}
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / "account.key").write_bytes(pem)
        users = {"admin": "admin", **ACCOUNTS, "nobody": "nobody"}
        groups = {"admin": ',"system:masters"'}
        (folder / "tokens.csv").write_text(
            "".join(
                f"{self.tokens[name]},{user},{name}{groups.get(name, '')}\n"
                for name, user in users.items()
            )
        )
        self._plurals: dict[tuple[str, str], tuple[str, bool]] = {}
        self._etcd = self._run(
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{self._etcd_port}",
            f"--advertise-client-urls=http://127.0.0.1:{self._etcd_port}",
            f"--listen-peer-urls=http://127.0.0.1:{self._peer_port}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{self._peer_port}",
            f"--initial-cluster=default=http://127.0.0.1:{self._peer_port}",
        )
        self._server = self._start_server()

    def _run(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([str(BIN / name), *flags], stdout=log, stderr=log)

    def _start_server(self) -> subprocess.Popen[bytes]:
        key = self._folder / "account.key"
        return self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self._folder / 'certificates'}",
            f"--token-auth-file={self._folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.96.0.0/16",
        )

    def client(self, user: str = "admin") -> httpx.Client:
        """An HTTP client of a user."""
        headers = {"authorization": f"Bearer {self.tokens[user]}"}
        context = ssl.create_default_context(cafile=str(self.ca))
        return httpx.Client(
            base_url=self.url, verify=context, headers=headers, timeout=30, trust_env=False
        )

    def kubeconfig(self) -> Path:
        """A kubeconfig file with an administrator's credentials for the server."""
        server = {"server": self.url, "certificate-authority": str(self.ca)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": self.tokens["admin"]}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        path = self._folder / "kubeconfig"
        path.write_text(json.dumps(config))
        return path

    def wait_ready(self) -> None:
        """Returns when the server is ready, its built-in roles included."""
        deadline = time.monotonic() + _READY_S
        while True:
            assert self._server.poll() is None, self.log
            try:
                with self.client() as client:
                    if client.get("/readyz").status_code == 200:
                        return
            except (httpx.TransportError, OSError):  # no socket yet, or no certificate
                pass
            assert time.monotonic() < deadline, self.log
            time.sleep(0.2)

    def restart(self) -> None:
        """Ends the server and starts it again over the same data."""
        self.pause()
        self.resume()

    def pause(self) -> None:
        """Ends the server; `resume` starts it again over the same data."""
        self._end(self._server)

    def resume(self) -> None:
        self._server = self._start_server()
        self.wait_ready()

    def stop(self) -> None:
        """Ends both processes."""
        for process in (self._server, self._etcd):
            self._end(process)

    @property
    def log(self) -> str:
        """The end of the server's log."""
        return (self._folder / "kube-apiserver.log").read_text(errors="replace")[-4000:]

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def path(self, item: Object) -> str:
        """API path of an object."""
        version, kind = item["apiVersion"], item["kind"]
        root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        if (version, kind) not in self._plurals:
            with self.client() as client:
                for resource in client.get(root).json()["resources"]:
                    if "/" not in resource["name"]:
                        place = (resource["name"], resource["namespaced"])
                        self._plurals[version, resource["kind"]] = place
        plural, is_namespaced = self._plurals[version, kind]
        metadata = item["metadata"]
        space = f"/namespaces/{metadata['namespace']}" if is_namespaced else ""
        return f"{root}{space}/{plural}/{metadata['name']}"

    def apply(self, item: Object, *, dry_run: bool) -> httpx.Response:
        """Server-side apply with strict checks of fields."""
        query = {"fieldManager": "test", "force": "true", "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        with self.client() as client:
            return client.patch(
                self.path(item),
                params=query,
                json=item,  # JSON is YAML
                headers={"content-type": "application/apply-patch+yaml"},
            )

    def define(self, path: Path) -> None:
        """Creates what a CustomResourceDefinition describes, and waits until it is served."""
        definition = yaml.safe_load(path.read_text())
        group = definition["spec"]["group"]
        version = definition["spec"]["versions"][0]["name"]
        plural = definition["spec"]["names"]["plural"]
        answer = self.apply(definition, dry_run=False)
        assert answer.is_success, answer.text
        deadline = time.monotonic() + _READY_S
        with self.client() as client:
            while client.get(f"/apis/{group}/{version}/{plural}").status_code != 200:
                assert time.monotonic() < deadline, self.log
                time.sleep(0.1)

    def delete(self, item: Object) -> Any:
        """Deletes an object."""
        with self.client() as client:
            answer = client.delete(self.path(item))
        answer.raise_for_status()
        return answer.json()
