"""A setting is declared once: its words, its default, its choices."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from weft.cli.rest_settings import RestSettings
from weft.cli.up.settings import UpSettings
from weft.common.settings import Settings
from weft.decode.main import DecodeSettings
from weft.engine.base.config import SETTINGS
from weft.gateway.settings import GatewaySettings
from weft.kvstore.settings import KvStoreSettings
from weft.planner.settings import PlannerSettings
from weft.prefill.main import PrefillSettings

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("contract", "checkpoint", "engine", "pages", "kernels", "services", "cli", "chaos")
PROGRAMS: tuple[type[Settings], ...] = (
    UpSettings,
    GatewaySettings,
    DecodeSettings,
    PrefillSettings,
    KvStoreSettings,
    PlannerSettings,
    RestSettings,
)
OTHER_THINGS = {
    "backend": "KV stores: what keeps pages; the REST edge: the gateways",
    "decode": "weft up: a number of workers; gateways: their addresses",
    "prefill": "weft up: a number of workers; gateways: their addresses",
    "kvstore": "weft up: a number of stores; workers: their addresses",
    "model_name": "weft up: a list, one for each model",
    "device": "weft up: a list, one for each worker",
    "expected_adapters": "gateways: names in requests; workers: folders",
    "max_running_requests": "gateways: of the whole mesh; workers: of a step",
}
"""Names that mean one thing in one program and another thing in another."""


def words() -> dict[str, set[str]]:
    """The help texts of each setting, by name."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, setting in SETTINGS.items():
        found[name].add(setting.help)
    for program in PROGRAMS:
        for name, field in program.model_fields.items():
            found[name].add(field.description or "")
    return found


def product_sources() -> Iterator[tuple[Path, str]]:
    for root in PRODUCT:
        for path in sorted((ROOT / root).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text()


def test_a_name_has_the_same_words_in_every_program() -> None:
    several = {name for name, texts in words().items() if len(texts) > 1}
    assert several == OTHER_THINGS.keys()


def test_words_are_written_once() -> None:
    places: dict[object, list[Path]] = {text: [] for texts in words().values() for text in texts}
    for path, source in product_sources():
        if "Field(" in source or "setting(" in source:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Constant) and node.value in places:
                    places[node.value].append(path)
    assert not {text: paths for text, paths in places.items() if len(paths) > 1}


def test_defaults_are_written_once() -> None:
    """A parameter or a field of a setting's name does not repeat the setting's number."""
    numbers = {
        (name, field.default)
        for program in PROGRAMS
        for name, field in program.model_fields.items()
        if isinstance(field.default, (int, float)) and field.default > 1
    }
    default = re.compile(r"(\w+): [^=\n]+ = (\d[\d_]*(?:\.\d+)?)(?: << (\d+))?[,)\n]")
    again = [
        f"{path}: {found[0]}"
        for path, source in product_sources()
        for found in default.finditer(source)
        if (found[1], float(found[2]) * 2 ** int(found[3] or 0)) in numbers
    ]
    assert not again


UNITS = {"": 1, "s": 1, "ms": 1e-3, "%": 0.01, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def test_defaults_that_pages_name_are_the_declared_ones() -> None:
    """As in "`--max-restart-delay-s` (30 s)"."""
    declared: dict[str, set[float]] = defaultdict(set)
    for program in PROGRAMS:
        for name, field in program.model_fields.items():
            default = field.default
            number = default.total_seconds() if isinstance(default, timedelta) else default
            if isinstance(number, (int, float)):
                declared[f"--{name.replace('_', '-')}"].add(number)
    named = re.compile(r"`(--[a-z0-9-]+)`[^`|(.]{0,20}\((\d[\d,.]*) ?(ms|s|KiB|MiB|GiB|%|)\)")
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("services/*/README.md"), ROOT / "README.md"]
    found = [
        (page.name, *match.groups())
        for page in pages
        for match in named.finditer(page.read_text())
        if match[1] in declared
    ]
    assert len(found) > 10
    for page, flag, number, unit in found:
        value = float(number.replace(",", "")) * UNITS[unit]
        assert any(value == pytest.approx(one) for one in declared[flag]), (page, flag, number)


@pytest.fixture
def generator() -> Iterator[object]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("gen_rest_settings")
    sys.path.pop(0)


def test_the_edge_has_the_settings_that_are_declared(generator: object) -> None:
    fresh = generator.text()  # type: ignore[attr-defined]
    assert generator.TARGET.read_text() == fresh, "run `make protos`"  # type: ignore[attr-defined]
