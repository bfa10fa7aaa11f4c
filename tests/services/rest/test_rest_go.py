"""The Go edge's own tests and checks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

from go_toolchain import REST, find_go, go_environment  # noqa: E402

pytestmark = pytest.mark.needs("go")


# Linked as the edge is, and not vetted a second time: on a fresh machine that is half of it.
TEST = ("test", "-vet=off", "-ldflags=-s -w", "./...")


@pytest.mark.parametrize("check", [("vet", "./..."), TEST], ids=lambda c: c[0])
@pytest.mark.timeout(600)  # the first run compiles everything
def test_go(check: tuple[str, ...]) -> None:
    go = find_go()
    assert go is not None
    done = subprocess.run(
        [go, *check], cwd=REST, env=go_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_sources_are_formatted() -> None:
    go = find_go()
    assert go is not None
    root = subprocess.run([go, "env", "GOROOT"], capture_output=True, text=True, check=True)
    gofmt = Path(root.stdout.strip()) / "bin" / "gofmt"
    done = subprocess.run(
        [gofmt, "-l", "cmd", "internal", "gen"], cwd=REST, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
