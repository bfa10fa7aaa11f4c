"""Generates the Python and Go stubs of the contract from pinned tools.

Python: `grpcio-tools` and `mypy-protobuf`, pinned in pyproject.toml. Go: the plugins that
services/rest/go.mod names as tools. With `--check` nothing is changed: the stubs are made anew in
a temporary folder and compared with the committed ones.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from go_toolchain import REST, build_tool, find_go

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PYTHON_OUT = PROTOS / "gen"
GO_OUT = REST / "gen"
GO_MODULE = "weft.dev/weft/services/rest/gen"
# Only what the REST edge calls or serves becomes Go.
GO_PROTOS = (
    *(
        f"weft/v1/{name}.proto"
        for name in ("openai", "dialects", "edge", "mesh", "profile", "trace")
    ),
    "weft/extproc/external_processor.proto",
)
GO_TOOLS = ("protoc-gen-go", "protoc-gen-go-grpc", "protoc-gen-grpc-gateway")
PYTHON_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
GO_SUFFIXES = (".pb.go", ".pb.gw.go")


class GenerationError(Exception):
    """A tool is missing or failed."""


def include_folders() -> list[str]:
    """Folders that hold weft/v1, google/api and google/rpc .proto files."""
    spec = importlib.util.find_spec("google.api")
    if spec is None or not spec.submodule_search_locations:
        raise GenerationError("googleapis-common-protos is not installed; run `make setup`")
    google_api = Path(next(iter(spec.submodule_search_locations)))
    return [str(PROTOS), str(google_api.parent.parent)]


def run_protoc(arguments: Sequence[str]) -> None:
    """Runs the protoc of grpcio-tools."""
    includes = [f"-I{folder}" for folder in include_folders()]
    command = [sys.executable, "-m", "grpc_tools.protoc", *includes, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GenerationError(f"protoc failed:\n{done.stderr}")


def generate_python(out: Path) -> None:
    """Writes message classes, service classes and type stubs of every .proto under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    scripts = Path(sys.executable).parent
    plugins = [
        f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    names = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("weft/*/*.proto"))
    run_protoc([*plugins, *outputs, *names])


def generate_go(go: str, out: Path) -> None:
    """Writes the Go messages, client and REST handlers of GO_PROTOS under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    outputs: list[str] = []
    for kind in ("go", "go-grpc", "grpc-gateway"):
        outputs += [f"--{kind}_out={out}", f"--{kind}_opt=module={GO_MODULE}"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            tools = {name: build_tool(go, REST, name, Path(folder)) for name in GO_TOOLS}
        except RuntimeError as error:
            raise GenerationError(str(error)) from error
        plugins = [f"--plugin={name}={path}" for name, path in tools.items()]
        run_protoc([*plugins, *outputs, *GO_PROTOS])


def differences(committed: Path, fresh: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Names of generated files that differ, are missing, or should not be there."""

    def read(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name.endswith(suffixes)
        }

    old, new = read(committed), read(fresh)
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def check(go: str | None) -> list[str]:
    """Regenerates into a temporary folder; names of the stale files."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate_python(fresh / "python")
        stale = differences(PYTHON_OUT, fresh / "python", PYTHON_SUFFIXES)
        if go is not None:
            generate_go(go, fresh / "go")
            stale += differences(GO_OUT, fresh / "go", GO_SUFFIXES)
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when stale")
    arguments = parser.parse_args()
    go = find_go()
    try:
        if arguments.check:
            if stale := check(go):
                print("stale stubs, run `make protos`:", *stale, sep="\n  ")
                return 1
        else:
            generate_python(PYTHON_OUT)
            if go is not None:
                generate_go(go, GO_OUT)
    except GenerationError as error:
        print(f"gen_protos: {error}", file=sys.stderr)
        return 2
    if go is None:
        print("Go is missing: the Go stubs were left as they are")
    return 0


if __name__ == "__main__":
    sys.exit(main())
