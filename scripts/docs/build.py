"""Builds the site into build/site: the repository's pages, and references made from the sources.

    python scripts/docs/build.py

Pages keep their places, so links between them work as they do in the repository. A link that leads
nowhere fails the build. Nothing is fetched, neither now nor by a reader's browser.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import contract_reference
import python_reference
import rest_reference
from sphinx.cmd.build import main as sphinx_build

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
LINK = re.compile(r"\]\(([^()\s#]+)(?:#[^()\s]*)?\)")
GUIDES = (
    "README.md",
    "docs/architecture.md",
    "docs/performance.md",
    "docs/glossary.md",
    "docs/development.md",
    "CONTRIBUTING.md",
)
OPERATION = (
    *("api", "dialects", "adapters", "operations", "parallel", "routing", "targets"),
    *("quantisation", "quantisation-fp8", "security", "observability", "metrics", "kubernetes"),
)


def repository_files() -> list[Path]:
    """Files of the repository, relative to its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def stage_pages() -> list[Path]:
    """Copies all pages, and the files that they link to; the pages, relative to the root."""
    pages = [path for path in repository_files() if path.suffix == ".md"]
    linked = set(pages)
    for page in pages:
        for target in LINK.findall((ROOT / page).read_text()):
            path = (ROOT / page.parent / target).resolve()
            if path.is_file() and path.is_relative_to(ROOT):
                linked.add(path.relative_to(ROOT))
    for path in linked:
        (STAGE / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, STAGE / path)
    return pages


def stage_references() -> dict[str, list[str]]:
    """Writes the references; their pages by kind."""
    made: dict[str, list[str]] = {}
    kinds = {"REST": rest_reference, "Contract": contract_reference, "Python": python_reference}
    (STAGE / "reference").mkdir(parents=True)
    for kind, module in kinds.items():
        for name, text in module.pages():
            text = text.replace("](docs/", "](../docs/")
            (STAGE / "reference" / f"{name}.md").write_text(text + "\n")
            made.setdefault(kind, []).append(f"reference/{name}.md")
    return made


def toctree(caption: str, pages: Sequence[str], depth: int = 1) -> list[str]:
    """An entry of the site's contents."""
    options = [f":caption: {caption}", f":maxdepth: {depth}", ""]
    return ["```{toctree}", *options, *pages, "```", ""]


def stage_index(pages: Sequence[Path], references: dict[str, list[str]]) -> None:
    """Writes the first page: the README, and the contents."""
    names = [str(path) for path in pages]
    operation = [f"docs/{name}.md" for name in OPERATION]

    def below(folder: str) -> list[str]:
        return sorted(name for name in names if name.startswith(folder))

    howto, decisions = below("docs/howto/"), below("docs/decisions/")
    architecture = below("docs/architecture/")
    known = {*GUIDES, *operation, *howto, *decisions, *architecture}
    groups = {
        "Guides": GUIDES,
        "How to": howto,
        "Operation": operation,
        "Architecture": architecture,
        "Decisions": decisions,
        "Folders": [name for name in names if name not in known],
        **{f"Reference: {kind}": made for kind, made in references.items()},
    }
    lines = ["# Weft", "", "```{include} README.md", ":start-line: 1", "```", ""]
    for caption, group in groups.items():
        lines += toctree(caption, group)
    (STAGE / "index.md").write_text("\n".join(lines))


def main() -> int:
    """Builds the site; returns the exit status."""
    for folder in (STAGE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    stage_index(stage_pages(), stage_references())
    conf = str(Path(__file__).parent)
    arguments = ["-W", "--keep-going", "-q", "-j", "auto", "-c", conf, str(STAGE), str(SITE)]
    status = int(sphinx_build(arguments))
    if status == 0:
        print(f"the site is in {SITE.relative_to(ROOT)}/index.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
