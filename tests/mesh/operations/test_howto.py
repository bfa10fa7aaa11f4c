"""The commands of docs/howto and of the README, as they stand there, against a mesh.

The blocks of a page that are marked `run` are one script. Of those marked `up`, which start other
meshes, the flags are checked; so are flags that any page passes on to a service.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from weft.checkpoint.demo import DEMO_NAME
from weft.checkpoint.resolve import resolve_model
from weft.cli.up.settings import UpSettings
from weft.common.settings import Settings, load_settings
from weft.decode.main import DecodeSettings
from weft.gateway.settings import GatewaySettings
from weft.kvstore.settings import KvStoreSettings
from weft.prefill.main import PrefillSettings
from weft.testing.docs import HOWTO, ROOT, blocks, pages
from weft.testing.meshes.local_mesh import MODEL, LocalMesh

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(600)]

PAGES = [page for page in sorted(HOWTO.glob("*.md")) if any(b.mark == "run" for b in blocks(page))]
SERVICES: dict[str, tuple[type[Settings], list[str]]] = {
    "decode": (DecodeSettings, ["--model-dir", "M"]),
    "prefill": (PrefillSettings, ["--model-dir", "M"]),
    "gateway": (GatewaySettings, ["--model-dir", "M", "--decode", "H:1"]),
    "kvstore": (KvStoreSettings, []),
}
"""Settings of the services, and flags that they cannot do without."""
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[LocalMesh]:
    if shutil.which("curl") is None:
        pytest.skip("no `curl` on the PATH")
    root = tmp_path_factory.mktemp("root") / "adapters"
    for name in ("pirate", "json"):
        shutil.copytree(ROOT / "adapters" / name, root / name)
    flags = ("--decode", "2", "--adapter-root", str(root), "--local-prefill-max-tokens", "0")
    mesh = LocalMesh(tmp_path_factory.mktemp("howto"), *flags, "--kv-memory-bytes", "300000000")
    mesh.wait_ready()
    yield mesh
    assert mesh.stop() == 0, mesh.text


def script_of(page: Path) -> str:
    """The commands of a page, in bash."""
    parts = ["set -eu"]
    for block in blocks(page):
        if block.mark == "run" or (page.parent == ROOT and block.text.startswith(("curl", "from"))):
            is_python = block.language == "python"
            parts.append(
                f"{sys.executable} - <<'END'\n{block.text}END" if is_python else block.text
            )
    return "\n".join(parts)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_commands_of_a_page_run(page: Path, mesh: LocalMesh, tmp_path: Path) -> None:
    mesh.wait_healthy()
    script = script_of(page)
    for shown, real in {
        "http://127.0.0.1:8000": mesh.url,
        "~/.local/state/weft/mesh-50051": str(mesh.state),
        "/path/to/model": str(resolve_model(DEMO_NAME)),
        "my-model": MODEL,
        '"max_tokens": 400': '"max_tokens": 100',
    }.items():
        script = script.replace(shown, real)
    (tmp_path / "weft").write_text(f'#!/bin/sh\nexec {sys.executable} -m weft.cli "$@"\n')
    (tmp_path / "weft").chmod(0o700)
    (tmp_path / ".curlrc").write_text("fail-with-body\n")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CURL_HOME": str(tmp_path),
        "WEFT_ADDRESS": mesh.grpc_address,
        "no_proxy": "*",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{mesh.text}"
    if page.stem == "worker-death":
        assert done.stdout.count("data: [DONE]") == 1
        assert "decode-0 was killed by SIGKILL" in mesh.text
    if page.stem == "apart":
        assert "FILL_SOURCE_PREFILL" in done.stdout


def check(arguments: list[str]) -> None:
    """Raises SystemExit for flags that a program does not have."""
    if arguments[:1] == ["up"]:
        load_settings(UpSettings, arguments[1:], {})
    elif arguments[:1] == ["serve"] and arguments[1] in SERVICES:
        load_settings(SERVICES[arguments[1]][0], arguments[2:], {})


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_of_commands_are_those_of_their_programs(page: Path) -> None:
    for block in blocks(page):
        if block.mark == "up":
            for line in block.text.splitlines():
                check(shlex.split(line)[1:])
    for program, text in re.findall(r"--(\w+)-args \"([^\"]*)\"", page.read_text()):
        if program in SERVICES:
            settings, needed = SERVICES[program]
            load_settings(settings, [*needed, *shlex.split(text)], {})
