"""Operations of clients and operators with a mesh's adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
import httpx
from weft.testing.meshes.local_mesh import LocalMesh, wait_until
from weft.v1 import gateway_pb2, gateway_pb2_grpc

TIMEOUT_S = 120.0


def post(mesh: LocalMesh, path: str, body: dict[str, object]) -> httpx.Response:
    return httpx.post(f"{mesh.url}{path}", json=body, timeout=TIMEOUT_S, trust_env=False)


def load(mesh: LocalMesh, name: str, path: str, **fields: object) -> httpx.Response:
    return post(mesh, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **fields})


def unload(mesh: LocalMesh, name: str) -> httpx.Response:
    return post(mesh, "/v1/unload_lora_adapter", {"lora_name": name})


def listed(mesh: LocalMesh) -> list[gateway_pb2.RegisteredAdapter]:
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        return list(stub.ListAdapters(gateway_pb2.ListAdaptersRequest(), timeout=30).adapters)


def serving(mesh: LocalMesh) -> dict[str, str]:
    """Digests of the served adapters by name."""
    found = [one for one in listed(mesh) if one.state == gateway_pb2.REGISTRY_STATE_SERVING]
    return {one.adapter.name: one.adapter.digest.hex() for one in found}


def held(mesh: LocalMesh, worker: str) -> set[str]:
    """Digests that a worker has, in whatever state."""
    return {one.adapter.digest.hex() for one in mesh.load(worker).adapters}


def wait_held(mesh: LocalMesh, workers: Sequence[str], digests: Sequence[str]) -> None:
    """Returns once every worker has these contents and no others."""
    wait_until(lambda: all(held(mesh, name) == set(digests) for name in workers), 30)


def copies(root: Path) -> set[str]:
    """Digests of the contents that the registry keeps."""
    return {path.name for path in (root / ".weft").iterdir() if path.is_dir()}
