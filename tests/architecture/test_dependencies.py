"""What is installed with Weft is what it imports."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from weft.kernels.ops.attention import library_flash
from weft.pages.transfer import nixl_binding

ROOT = Path(__file__).parents[2]
PARTS = (
    *("chaos", "contract", "checkpoint", "cli", "engine", "kernels"),
    *("pages", "protos/gen", "services"),
)


def dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [re.split(r"[<>=;\[ ]", text)[0] for text in project["dependencies"]]


def imported() -> set[str]:
    """Every name of a module that the sources import, as a path."""
    names: set[str] = set()
    for path in (file for part in PARTS for file in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    # Imported by whichever is there.
    names |= {name.replace("-", "_") for name in nixl_binding.PACKAGES}
    names |= library_flash.PACKAGES.keys()
    return {name.replace(".", "/") for name in names}


@pytest.fixture(scope="module")
def names() -> set[str]:
    return imported()


@pytest.mark.parametrize("name", dependencies())
def test_a_dependency_is_imported(name: str, names: set[str]) -> None:
    files = importlib.metadata.distribution(name).files or []
    # Modules without their suffix; those of packages by the package's name too.
    modules = {re.sub(r"(/__init__)?\.[^/]*$", "", str(file)) for file in files}
    assert names & modules, f"no module of {name} is imported"
