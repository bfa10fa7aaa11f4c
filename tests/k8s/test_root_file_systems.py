"""A mesh of the images: their root file systems, built as their Dockerfiles say, in namespaces."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from weft.testing.meshes.tiny_mesh import MODEL, SHAPE
from weft.testing.models.tiny_models import make_tiny
from weft.testing.services.processes import ServiceProcess
from weft.testing.wheels import wheel_folder

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "build_rootfs.py")]
IMAGES = ("rest", "gateway", "kvstore", "worker")


@pytest.mark.full
@pytest.mark.needs("rootfs")
@pytest.mark.timeout(3600)
def test_a_mesh_of_images_answers(tmp_path: Path) -> None:
    wheel_folder()
    subprocess.run([*SCRIPT, "build", *IMAGES], check=True, timeout=3000)
    model = make_tiny("llama", tmp_path / "model", tokenizer=True, **SHAPE)
    shared = tmp_path / "shared"
    shared.mkdir()
    model.rename(shared / "model")
    for path in (shared, *shared.rglob("*")):
        path.chmod(0o777)  # For the images' user.

    with ExitStack() as mesh:

        def start(image: str, name: str, *flags: str) -> dict[str, str]:
            command = [*SCRIPT, "run", "--home", str(shared), image, *flags]
            process = mesh.enter_context(ServiceProcess(name, command, shared))
            return process.wait_ready(300)

        at = ("--model-dir", str(shared / "model"), "--model-name", MODEL)
        store = start("kvstore", "kvstore", "--port", "0", "--memory-bytes", str(1 << 20))
        memory = ("--port", "0", "--kv-memory-bytes", str(64 << 20), "--device", "cpu")
        stores = ("--kvstore", store["address"])
        decode = start("worker", "decode", "decode", *memory, *stores, *at)["address"]
        gateway = start("gateway", "gateway", "--port", "0", "--decode", decode, *at)["address"]
        edge = start("rest", "rest", "--listen", "127.0.0.1:0", "--backend", gateway)["address"]
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"http://{edge}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
