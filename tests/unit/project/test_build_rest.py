"""`make serve` where the REST edge cannot be built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MAKE = shutil.which("make")
GO = """#!/bin/sh
if [ "$1" = env ]; then echo go1.99.0; exit 0; fi
echo "module lookup disabled: no proxy" >&2
exit 1
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What make needs of the sources, an environment that is set up, and a Go that cannot build."""
    for name in ("Makefile", "pyproject.toml", "services/rest/go.mod", "services/rest/go.sum"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    ignored = shutil.ignore_patterns("__pycache__")  # Others may be writing there.
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=ignored)
    script(tmp_path / "tools" / "go", GO)
    script(tmp_path / ".venv" / "bin" / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script(tmp_path / ".venv" / "bin" / "weft", '#!/bin/sh\necho "weft $@"\n')
    (tmp_path / ".venv" / ".setup-done").touch()
    return tmp_path


def run(tree: Path, target: str) -> subprocess.CompletedProcess[str]:
    assert MAKE is not None
    path = f"{tree / 'tools'}{os.pathsep}{os.environ['PATH']}"
    # Not what a make that runs these tests was given.
    environment = {
        k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "ARGS")
    }
    return subprocess.run(
        [MAKE, target],
        cwd=tree,
        env={**environment, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(MAKE is None, reason="there is no make")
def test_a_mesh_starts_although_its_edge_cannot_be_built(tree: Path) -> None:
    old = tree / "services" / "rest" / "bin" / "weft-rest"
    script(old, "#!/bin/sh\n")
    os.utime(old, (0, 0))
    done = run(tree, "serve")
    assert done.returncode == 0, done.stderr
    assert "weft up" in done.stdout
    assert "REST is off" in done.stdout
    assert "no proxy" in done.stderr
    assert not old.exists(), "an edge of other sources would be started"


@pytest.mark.skipif(MAKE is None, reason="there is no make")
def test_the_edge_alone_is_an_error_when_it_cannot_be_built(tree: Path) -> None:
    assert run(tree, "rest").returncode != 0
