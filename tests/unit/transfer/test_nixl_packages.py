"""Which of its packages NIXL is loaded from."""

from __future__ import annotations

import importlib
import importlib.metadata
import types
from collections.abc import Iterator
from typing import Any

import pytest
from weft.contract.errors import WeftError
from weft.pages.transfer import nixl_binding
from weft.pages.transfer.nixl_binding import load_binding, nixl_available, nixl_version


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    load_binding.cache_clear()
    yield
    load_binding.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], broken: str = "") -> None:
    """Makes these distributions the installed ones; `broken` cannot be imported."""

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    def load(name: str) -> Any:
        package, _, part = name.partition(".")
        if package.replace("_", "-") not in packages or package == broken:
            raise ImportError(f"no {package} for this machine")
        return types.SimpleNamespace(loaded_from=package, part=part)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(nixl_binding.importlib, "import_module", load)


@pytest.mark.parametrize("package", ["nixl-cu13", "nixl-cu12"])
def test_a_package_for_one_cuda_is_enough(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    install(monkeypatch, {package: "1.7.0"})
    assert nixl_available() == (True, "nixl 1.7.0")
    assert nixl_version() == "1.7.0"
    assert load_binding()._api.loaded_from == package.replace("-", "_")


def test_the_meta_package_is_asked_first_and_others_if_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packages = {"nixl": "1.5.1", "nixl-cu13": "1.5.1", "nixl-cu12": "1.5.1"}
    install(monkeypatch, packages)
    assert load_binding()._api.loaded_from == "nixl"
    load_binding.cache_clear()
    install(monkeypatch, {"nixl": "1.5.1", "nixl-cu12": "1.5.0"}, broken="nixl")
    binding = load_binding()
    assert (binding._api.loaded_from, binding.version) == ("nixl_cu12", "1.5.0")


def test_why_there_is_no_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {})
    is_available, reason = nixl_available()
    assert not is_available
    for package in ("nixl", "nixl-cu13", "nixl-cu12"):
        assert package in reason
    assert nixl_version() == ""
    load_binding.cache_clear()
    install(monkeypatch, {"nixl-cu13": "1.5.1"}, broken="nixl_cu13")
    with pytest.raises(WeftError, match="no nixl_cu13 for this machine"):
        load_binding()
