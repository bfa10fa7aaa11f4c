"""The wheels on a fresh machine: an empty home, and neither make, Go nor a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from weft.testing.meshes.local_mesh import MODEL, LocalMesh
from weft.testing.wheels import wheel_folder

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
ABSENT = ("make", "go", "cc", "gcc", "clang", "python3")
OF_INDEXES = ("PIP_", "UV_INDEX", "UV_DEFAULT_INDEX", "UV_FIND_LINKS", "SSL_", "REQUESTS_")
"""Variables that say how this machine reaches its package index."""
ARM = (183).to_bytes(2, "little")
"""ELF's number of 64-bit Arm."""


class FreshMachine:
    """An empty home in which `uv` is the only program."""

    def __init__(self, folder: Path) -> None:
        self.home, programs = folder / "home", folder / "programs"
        self.home.mkdir()
        programs.mkdir()
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert uv is not None, "uv is missing: run `make setup`"
        (programs / "uv").symlink_to(uv)
        kept = {k: v for k, v in os.environ.items() if k.startswith(OF_INDEXES)}
        kept |= {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
        self.environment = {**kept, "HOME": str(self.home), "PATH": str(programs)}
        assert not [name for name in ABSENT if shutil.which(name, path=str(programs))]
        self.run("uv", "venv", "--python", str(Path(sys.base_prefix) / "bin" / "python3"))

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
        return done.stdout

    def install(self, extra: str) -> None:
        wheels = wheel_folder()
        (wheel,) = wheels.glob("weft-*.whl")
        requirement = f"weft{extra} @ file://{wheel}"
        self.run("uv", "pip", "install", "--find-links", str(wheels), requirement)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> FreshMachine:
    machine = FreshMachine(tmp_path_factory.mktemp("fresh"))
    machine.install("")
    return machine


def test_without_the_demo_model_the_start_says_what_to_install(machine: FreshMachine) -> None:
    done = subprocess.run(
        [".venv/bin/weft", "up"],
        cwd=machine.home,
        env=machine.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "install the wheel with its extra `demo`" in done.stderr


def test_a_mesh_answers_at_its_first_and_second_start(
    machine: FreshMachine, tmp_path: Path
) -> None:
    machine.install("[demo]")

    class InstalledMesh(LocalMesh):
        program: ClassVar = [str(machine.home / ".venv" / "bin" / "weft")]

        def environment(self) -> dict[str, str]:
            return machine.environment

    body = {
        "messages": [{"role": "user", "content": "What is a loom?"}],
        **{"temperature": 0, "max_tokens": 16, "weft_timeline": True},
    }
    texts = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        mesh = InstalledMesh(folder, "--plain", "--local-prefill-max-tokens", "0")
        try:
            mesh.wait_ready()
            client = httpx.Client(base_url=mesh.url, timeout=120, trust_env=False)
            models = client.get("/v1/models").json()["data"]
            assert [model["id"] for model in models] == [MODEL]
            answer = client.post("/v1/chat/completions", json=body).json()
            (fill,) = answer["weft"]["timeline"]["fills"]
            assert fill["source"] == "FILL_SOURCE_PREFILL"
            texts.append(answer["choices"][0]["message"]["content"])
            assert "<title>" in client.get("/console/").text
        finally:
            status = mesh.stop()
        assert status == 0, mesh.text
        logs = "".join(log.read_text() for log in mesh.state.rglob("*.log"))
        assert "no native" not in logs
    assert texts[0] == texts[1] != ""
    # Nothing was compiled.
    assert not (machine.home / ".cache" / "weft" / "native").exists()


@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs Debian's gcc-aarch64-linux-gnu"
)
def test_the_wheel_for_arm_has_the_edge_and_every_c_file_for_it(tmp_path: Path) -> None:
    (wheel,) = (wheel_folder("wheel-aarch64") / "aarch64").glob("weft-*.whl")
    assert re.search(r"-py3-none-manylinux_2_\d+_aarch64\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        programs = [name for name in names if name.endswith((".so", "/weft-rest"))]
        assert {ARM} == {content.read(name)[18:20] for name in programs}
    sources = [name for name in names if name.endswith(".c")]
    assert len(sources) >= 3
    assert {f"{name[:-2]}-neon.so" for name in sources} < {*programs}
    assert any(name.endswith("/scripts/weft-rest") for name in programs)
