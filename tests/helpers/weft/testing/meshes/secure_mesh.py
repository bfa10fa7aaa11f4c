"""A mesh with certificates and API keys, and calls to its services as any other service."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
from weft.cli.certs import FURTHER
from weft.common.rpc.authorize import SERVICES
from weft.common.rpc.channel import open_blocking_channel
from weft.gateway.admission.keys import new_key, write_keys
from weft.testing.meshes.local_mesh import WEFT
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import TinyMesh
from weft.testing.services.certificates import identity, make_certificates
from weft.v1 import worker_pb2, worker_pb2_grpc

SHIPPED = ("--kvstore", "1", "--local-prefill-max-tokens", "0", "--decode-args", PATIENT)


class SecureMesh(TinyMesh):
    """`weft up --tls-dir --api-keys-file`, by default with everything shipped and stored."""

    def __init__(
        self,
        folder: Path,
        *more_flags: str,
        workers: Sequence[str] = SHIPPED,
    ) -> None:
        self.tls = folder / "tls"
        make_certificates(self.tls, *SERVICES, *FURTHER)
        self.key, entry = new_key("acme")
        keys = folder / "keys.json"
        write_keys(keys, [entry])
        flags = ["--tls-dir", str(self.tls), "--api-keys-file", str(keys)]
        super().__init__(folder, *flags, *workers, *more_flags)
        self.url = f"https://{self.rest_address}"
        self.context = ssl.create_default_context(cafile=str(self.tls / "ca.pem"))

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.text
        try:
            with httpx.Client(verify=self.context, trust_env=False) as client:
                return client.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def open(self, caller: str, name: str, port: str = "address") -> grpc.Channel:
        """A channel to a service of this mesh, as another service has it."""
        role = name.rpartition("-")[0] or name
        return open_blocking_channel(self.service(name)[port], role, identity(self.tls, caller))

    def call(self, caller: str, name: str, stub: Any, method: str, request: Any) -> Any:
        """An rpc of a service of this mesh, by another service."""
        with self.open(caller, name) as channel:
            return getattr(stub(channel), method)(request, timeout=60)

    def weft(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The command line, as operators use it."""
        flags = ["--tls-dir", str(self.tls)]
        environment = {**os.environ, "WEFT_API_KEY": self.key, "WEFT_ADDRESS": self.grpc_address}
        return subprocess.run(
            [*WEFT, *words, *flags], capture_output=True, text=True, timeout=60, env=environment
        )

    def counter(self, name: str, counter: str) -> int:
        """A worker's counter since its start."""
        with self.open("cli", name) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).WatchLoad(
                worker_pb2.WatchLoadRequest(), timeout=60
            )
            load = next(iter(call))
            call.cancel()
        return int(load.counters[counter])

    def complete(self, prompt: list[int], num_new: int) -> str:
        """Greedy continuation over REST, as the OpenAI SDK gets it."""
        with (
            httpx.Client(verify=self.context, trust_env=False) as http,
            openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, http_client=http) as client,
        ):
            answer = client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=num_new,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        return answer.choices[0].text

    def incarnations(self) -> dict[str, tuple[int | None, ...]]:
        """Processes and epochs of all services: they change when one dies."""
        files = {path.stem: self.service(path.stem) for path in (self.state / "run").glob("*.json")}
        keys = ("pid", "engine_pid", "epoch")
        return {name: tuple(file.get(key) for key in keys) for name, file in files.items()}

    def surprises(self) -> list[str]:
        """Unexpected errors that services logged, oldest first for each service."""
        logs = sorted((self.state / "logs").iterdir())
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return [line for line in lines if "unexpected failure" in line]
