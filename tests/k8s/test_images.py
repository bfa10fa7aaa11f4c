"""The images' install steps, run in an empty environment: what they bring is enough, and no more.

No image is built here.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir
from weft.testing.services.processes import ServiceProcess
from weft.testing.wheels import wheel_folder

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "k8s" / "images"
NAMES = ("gateway", "kvstore", "rest", "worker")


def instructions(name: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile, continued lines joined."""
    text = (IMAGES / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def build_steps(name: str) -> Iterator[str]:
    """Commands of the stage `build`."""
    is_build = False
    for word, rest in instructions(name):
        if word == "FROM":
            is_build = rest.endswith(" AS build")
        elif word == "RUN" and is_build and rest != "pip install --no-cache-dir uv":
            yield rest


def sent_to_images() -> set[str]:
    """Names at the top of the repository that a build of an image sees."""
    return {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}


def install(name: str, folder: Path) -> Path:
    """Runs the install steps with the image's folders below `folder`; returns its /opt."""
    source, opt = folder / "src", folder / "opt"
    source.mkdir()
    opt.mkdir()
    for file in (ROOT / "pyproject.toml", *wheel_folder().glob("*.whl")):
        shutil.copyfile(file, source / file.name)
    tools = Path(sys.executable).parent
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    # How this machine reaches package indexes stays; what belongs to this environment does not.
    own = ("VIRTUAL_ENV", "PYTHON", "WEFT_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    environment |= {"PATH": path, "GOTOOLCHAIN": "local"}
    for step in build_steps(name):
        command = step.replace("/opt/", f"{shlex.quote(str(opt))}/")
        done = subprocess.run(
            ["sh", "-eu", "-c", command],
            cwd=source,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
    return opt


@pytest.mark.parametrize("name", NAMES)
def test_images_are_small_and_not_roots(name: str) -> None:
    steps = instructions(name)
    stages = [rest for word, rest in steps if word == "FROM"]
    assert len(stages) == 2, "one stage installs, the other only takes the result"
    assert ("USER", "10001:10001") in steps
    last = max(index for index, (word, _) in enumerate(steps) if word == "FROM")
    assert not any("uv" in rest or "pip" in rest for _, rest in steps[last:])
    entry = json.loads(dict(steps)["ENTRYPOINT"])
    assert entry[0] in ("weft", "/weft-rest")


@pytest.mark.parametrize("name", NAMES)
def test_images_install_the_wheel(name: str) -> None:
    copied = [rest for word, rest in instructions(name) if word == "COPY" and "--from" not in rest]
    assert " ".join(copied) in ("pyproject.toml dist/ ./", "dist/ ./")
    assert {*" ".join(copied).replace("/", "").split()} <= {*sent_to_images(), "."}
    assert "weft-*.whl" in " ".join(build_steps(name))


@pytest.mark.parametrize("group", ["gateway", "kvstore"])
def test_small_images_have_the_projects_bounds(group: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["dependency-groups"][group]
    extras = project["project"]["optional-dependencies"]
    known = {*project["project"]["dependencies"], *extras["valkey"]}
    assert set(wanted) <= known
    assert set(extras["valkey"]) <= set(wanted)
    assert not [name for name in wanted if name.startswith(("torch", "transformers", "triton"))]


def test_small_images_install_their_group() -> None:
    for group in ("gateway", "kvstore"):
        assert f"--group {group}" in " ".join(build_steps(group))


def test_the_stores_nixl_is_the_projects() -> None:
    steps = " ".join(build_steps("kvstore"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pin = next(d for d in project["project"]["dependencies"] if d.startswith("nixl"))
    version = pin.partition(";")[0].partition("==")[2]
    assert f"nixl=={version} nixl-cu13=={version}" in steps


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_gateway_starts_from_its_image(tmp_path: Path) -> None:
    weft = install("gateway", tmp_path) / "weft" / "bin"
    model = write_model_dir(tmp_path / "model", byte_level_bpe(), 64)
    command = [str(weft / "weft"), "serve", "gateway", "--port", "0", "--model-dir", str(model)]
    with ServiceProcess("gateway", [*command, "--decode", "127.0.0.1:1"], tmp_path) as process:
        assert process.wait_ready()["address"]
    check = "import opentelemetry.sdk.trace, weft.gateway.fleet.discovery.kubernetes as d; print(d)"
    torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    for code in (check, torch):
        subprocess.run([weft / "python", "-c", code], check=True, cwd=tmp_path, timeout=60)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_store_starts_from_its_image(tmp_path: Path) -> None:
    weft = install("kvstore", tmp_path) / "weft" / "bin"
    command = [str(weft / "weft"), "serve", "kvstore", "--port", "0", "--transport", "nixl"]
    with ServiceProcess("kvstore", [*command, "--memory-bytes", "1048576"], tmp_path) as process:
        assert process.wait_ready()["address"]
        assert "without native code" not in process.log


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_worker_starts_from_its_image(tmp_path: Path) -> None:
    weft = install("worker", tmp_path) / "weft" / "bin"
    cache = {"WEFT_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [weft / "weft", "model", "convert"],
        env={**os.environ, **cache},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    model = next((tmp_path / "cache" / "models").rglob("config.json")).parent
    command = [str(weft / "weft"), "serve", "decode", "--port", "0", "--model-dir", str(model)]
    command += ["--kv-memory-bytes", "67108864"]
    with ServiceProcess("decode", command, tmp_path, cache) as process:
        assert process.wait_ready(600)["address"]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_edge_starts_from_its_image(tmp_path: Path) -> None:
    binary = install("rest", tmp_path) / "weft" / "bin" / "weft-rest"
    with ServiceProcess("rest", [str(binary), "--listen", "127.0.0.1:0"], tmp_path) as process:
        assert process.wait_ready()["address"]
