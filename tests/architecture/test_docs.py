"""What the documents show is what the programs say, and what they name is there."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from weft.cli.main import COMMANDS
from weft.testing.docs import HOWTO, ROOT, anchors, blocks, links, num_words, pages, prose

PAGES = pages()
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
MAX_README_LINES = 150
MAX_WORDS = 57_090
MAX_TOUR_WORDS = 2_500
MAX_DECISION_WORDS = 400
FOREIGN_FLAGS = {
    # Of other programs.
    *("appendonly", "cacert", "continue", "from-file", "from-literal", "maxmemory"),
    *("maxmemory-policy", "model_args", "no-deps", "resolve", "save", "tls-auth-clients"),
    *("tls-ca-cert-file", "tls-cert-file", "tls-cluster", "tls-key-file", "tls-port"),
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def messages(situation: str) -> list[str]:
    """What docs/operations.md says that is said then."""
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(rf"^\| {re.escape(situation)} \| `(.+)` \|$", text, re.MULTILINE)
    assert rows, situation
    return rows


@pytest.mark.parametrize(
    ("situation", "flags", "environment"),
    [
        ("wrong value", ["--grpc-port", "99999"], {}),
        ("wrong value in the environment", [], {"WEFT_UP_REST_PORT": "abc"}),
    ],
)
def test_refused_settings_are_as_documented(
    situation: str, flags: list[str], environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weft.cli", "up", *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    for message in messages(situation):
        assert message in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_whole(page: Path) -> None:
    """A row after an empty line is shown as text unless a head and its rule come with it."""
    lines = page.read_text().splitlines()
    for number in range(1, len(lines) - 1):
        if lines[number].startswith("|") and not lines[number - 1].startswith("|"):
            assert re.match(r"\|[ :|-]+\|$", lines[number + 1]), f"{page.name}:{number + 1}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"\w+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.is_file(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors(path), f"{link}: no such heading"


@cache
def words() -> frozenset[str]:
    """All words of the programs, as identifiers and as flags are written."""
    return frozenset(re.findall(r"[\w-]+", sources()))


@cache
def sources() -> str:
    """All programs, to look names up in."""
    folders = ("engine", "kernels", "services", "cli", "protos/weft", "bench", "scripts", "tests")
    kinds = (".py", ".go", ".proto", ".h", ".c")
    return "\n".join(
        path.read_text()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in kinds and "node_modules" not in path.parts
    )


@cache
def files() -> frozenset[str]:
    """Paths of all files, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return frozenset(listed.stdout.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """A path may begin at the root, at a part's folder, or anywhere if it is that of one file."""
    for path in re.findall(r"`([\w./-]+\.(?:py|go|proto|c|h|toml|yaml))`", prose(page)):
        beside = (page.parent / path).resolve()
        found = beside.is_file() or any(f"/{name}".endswith(f"/{path}") for name in files())
        assert found or path in FILES_OF_USERS, path


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(HOWTO.glob("*.md"))], ids=name_of)
def test_files_that_commands_name_are_there(page: Path) -> None:
    """Paths in commands that begin with a folder of the repository exist in a fresh clone."""
    folders = "|".join(sorted({re.escape(name.split("/")[0]) for name in files() if "/" in name}))
    for block in blocks(page):
        for path in re.findall(rf"(?<![\w./~-])(?:{folders})/[\w./-]*\w", block.text):
            assert any(f"{name}/".startswith(f"{path}/") for name in files()), path


FILES_OF_USERS = {"adapter_config.json", "mesh.toml", "tenants.toml"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_code_that_a_page_uses_are_there(page: Path) -> None:
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)(?:\(\w*\))?`", prose(page)):
        if owner[1:].lower() != owner[1:] or owner in ("Engine", "Router", "Scheduler"):
            assert {owner, name} <= words(), f"{owner}.{name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_of_make_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"`make ([a-z][a-z0-9-]*)", page.read_text())
    for block in blocks(page):
        named += re.findall(r"^(?:\$ )?make ([a-z][a-z0-9-]*)", block.text, re.MULTILINE)
    assert set(named) <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_and_commands_are_there(page: Path) -> None:
    text = page.read_text()
    for command in re.findall(r"(?:`|/bin/|^|\$ )weft ([a-z]+)", text, re.MULTILINE):
        assert command in COMMANDS, command
    for flag in set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", text)) - FOREIGN_FLAGS:
        # A setting's field, or as argparse or Go have it.
        field = flag.removeprefix("no-").replace("-", "_")
        assert {field, flag, f"--{flag}"} & words(), f"--{flag}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_the_tour_is_short() -> None:
    assert num_words(ROOT / "docs" / "architecture.md") <= MAX_TOUR_WORDS


def test_the_documents_can_be_read() -> None:
    own = [page for page in PAGES if page.name == "README.md" or "docs" in page.parts]
    documents = [page for page in own if page.parent == ROOT or "docs" in page.parts]
    assert sum(map(num_words, documents)) <= MAX_WORDS


@pytest.mark.parametrize("page", DECISIONS, ids=name_of)
def test_a_decision_is_one_page(page: Path) -> None:
    assert num_words(page) <= MAX_DECISION_WORDS
    assert f"({page.name})" in (page.parent / "README.md").read_text()


def test_decisions_that_the_code_names_are_there() -> None:
    numbers = {page.name[:4] for page in DECISIONS}
    assert set(re.findall(r"docs/decisions/(\d{4})", sources())) <= numbers


@pytest.mark.parametrize("page", sorted(HOWTO.glob("*.md")), ids=name_of)
def test_commands_of_how_to_pages_are_run_or_say_why_not(page: Path) -> None:
    if page.name == "add-a-model.md":  # It shows code.
        return
    assert all(block.mark in ("run", "up", "shown") for block in blocks(page))


def test_plots_are_of_the_results() -> None:
    script = ROOT / "scripts" / "plot_performance.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True, timeout=60)


def test_results_name_no_folders_of_the_machine() -> None:
    folder = re.compile(r"(?<![\w.])/(tmp|root|home|work|mnt|Users)/[\w.-]+")
    for path in (ROOT / "bench" / "results").iterdir():
        assert not folder.search(path.read_text()), path.name


def test_the_edge_has_the_flags_that_its_page_names() -> None:
    page = (ROOT / "services" / "rest" / "README.md").read_text()
    programs = "".join(path.read_text() for path in (ROOT / "services/rest/cmd").rglob("*.go"))
    for flag in set(re.findall(r"`--([a-z-]+)`", page)):
        assert f'"{flag}"' in programs, flag
    assert "--https-cert" in page


def test_names_that_examples_import_are_there() -> None:
    examples = [
        block.text for page in PAGES for block in blocks(page) if block.language == "python"
    ]
    imports = re.findall(r"^\s*from (weft\.[\w.]+) import ([\w, ]+)$", "\n".join(examples), re.M)
    assert ("weft.checkpoint.resolve", "resolve_model") in imports
    for module, names in imports:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), (module, name)
