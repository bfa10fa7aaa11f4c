"""Who may import whom, and what must stay optional."""

import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# What is imported when a constraint comes: it needs llguidance.
NEED_LLGUIDANCE = [
    f"weft.engine.features.constraints.{name}"
    for name in ("domains", "grammar", "grammar_state", "masks", "unique", "vocabulary")
]

# What is imported for a model that transformers computes.
NEED_TRANSFORMERS = [
    f"weft.engine.model.archs.by_transformers.{name}"
    for name in ("attention", "compare", "model", "names")
]

# Imports every module of the packages in argv[2] while the modules in argv[1] cannot be imported,
# but for the modules in argv[3].
WALK = textwrap.dedent(
    """
    import importlib, importlib.abc, pkgutil, sys

    absent, packages, apart = (argument.split(",") for argument in sys.argv[1:4])

    class Absent(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name in absent or name.startswith(tuple(a + "." for a in absent)):
                raise ModuleNotFoundError(f"No module named {name!r} (made absent)", name=name)

    sys.meta_path.insert(0, Absent())
    for package in packages:
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, package + "."):
            if not module.name.endswith(".__main__") and module.name not in apart:
                importlib.import_module(module.name)
    """
)


def import_all(packages: str, absent: str, apart: Sequence[str] = ()) -> None:
    command = [sys.executable, "-c", WALK, absent, packages, ",".join(apart)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_contracts_of_import_linter_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", ["weft.gateway", "weft.kvstore", "weft.planner"])
def test_gateway_and_store_need_no_torch(package: str) -> None:
    import_all(package, "torch,triton,transformers,safetensors,nixl,gguf")


def test_the_store_needs_no_valkey_unless_it_is_asked_for() -> None:
    import_all("weft.kvstore", "valkey,libvalkey", ["weft.kvstore.backends.valkey"])


def test_the_gateway_needs_no_valkey_unless_it_is_asked_for() -> None:
    apart = ["weft.gateway.api.responses.shared_store"]
    import_all("weft.gateway", "valkey,libvalkey", apart)


@pytest.mark.parametrize("package", ["weft.kernels", "weft.engine"])
def test_the_engine_needs_no_wire_format(package: str) -> None:
    absent = "grpc,google,nixl,msgspec,pydantic,opentelemetry,gguf,transformers,llguidance"
    import_all(package, absent, [*NEED_LLGUIDANCE, *NEED_TRANSFORMERS])


def test_contract_and_checkpoint_need_no_wire_and_no_torch() -> None:
    """But for the codec, which is of messages."""
    absent = "torch,triton,grpc,google,pydantic,msgspec,opentelemetry"
    codec = ["weft.contract.codec.walk", "weft.contract.codec.pairs"]
    import_all("weft.contract,weft.checkpoint", absent, codec)


def test_modules_form_no_circle() -> None:
    """Nor do imports within functions or for types alone."""
    with (ROOT / "pyproject.toml").open("rb") as config:
        roots = tomllib.load(config)["tool"]["importlinter"]["root_packages"]
    graph = grimp.build_graph(*roots, cache_dir=None)
    imported = {one: graph.find_modules_directly_imported_by(one) for one in graph.modules}
    TopologicalSorter(imported).prepare()


def test_the_cli_starts_without_heavy_imports() -> None:
    import_all("weft.cli", "torch,triton,transformers,nixl,gguf")
