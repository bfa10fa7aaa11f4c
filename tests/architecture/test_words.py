"""One word for one thing: names in the code follow docs/glossary.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = "engine/weft/engine"
CONTRACT = "contract/weft/contract"
PAGES = "pages/weft/pages"
NUMBERS = (
    CONTRACT,
    *(f"{ENGINE}/{name}" for name in ("loop", "requests", "scheduler", "sources")),
    *(f"{PAGES}/{name}" for name in ("memory", "tiers", "fills")),
)


class Rule(NamedTuple):
    """Names that say a word of the glossary differently, or a word of it for something else."""

    name: str
    """A regular expression for whole names."""
    where: tuple[str, ...]
    """Folders, or single files, that keep to it."""
    instead: str
    """What the glossary says."""
    except_in: tuple[str, ...] = ()


RULES = (
    Rule(
        r"(?i).*blocks?",
        (*NUMBERS, f"{ENGINE}/transfer", f"{PAGES}/transfer"),
        "page; a block is of recurrent layers",
        except_in=(
            *(f"{PAGES}/memory/state_index.py", f"{ENGINE}/requests/state_companion.py"),
            *(f"{ENGINE}/loop/{name}.py" for name in ("build", "pools", "carriers")),
            *(f"{ENGINE}/sources/store.py", f"{ENGINE}/sources/tiers/pieces.py"),
            *(f"{ENGINE}/sources/tiers/loads.py", f"{ENGINE}/sources/tiers/tiers.py"),
        ),
    ),
    Rule(
        r"(?i)_?(sequence|seq|seqs)",
        NUMBERS,
        "request",
        except_in=(
            f"{PAGES}/memory/events.py",
            f"{CONTRACT}/kv_changes.py",
        ),  # events are numbered
    ),
    Rule(
        r"_?sessions?",
        (
            f"{ENGINE}/requests",
            f"{ENGINE}/scheduler",
            CONTRACT,
            f"{ENGINE}/sampling",
            f"{ENGINE}/sources",
        ),
        "`gateway` for the stream that a request came on; a session is a chat's",
        except_in=(f"{CONTRACT}/reports.py",),
    ),
    Rule(
        r"_?(plane|data_plane)",
        (f"{ENGINE}/loop", f"{ENGINE}/transfer", f"{ENGINE}/sources", PAGES, "services"),
        "`transport`; a plane is what layers keep of each position",
        except_in=("contract/weft/contract/codec/pairs.py",),  # it sets the wire's field
    ),
    Rule(
        r"_?window",
        (
            f"{ENGINE}/loop",
            f"{ENGINE}/transfer",
            PAGES,
            f"{ENGINE}/sources",
            f"{ENGINE}/requests",
            f"{ENGINE}/scheduler",
        ),
        "`exchange` for the memory that peers reach; a window is a sliding one",
    ),
    Rule(r"(?i)_?(swap(_out|_in)?|offload\w*)", (ENGINE, PAGES), "preempt, write back, load"),
    Rule(
        r"(?i)_?(radix\w*|kv_?memory|data_?plane|pool_?window)",
        (ENGINE, PAGES),
        "tree, page memory",
    ),
    Rule(
        r"(?i)\w*drafts?(_\w*)?",
        (
            *(f"{PAGES}/memory", f"{ENGINE}/features/constraints"),
            *(f"{ENGINE}/requests/{name}companion.py" for name in ("window_", "state_")),
            f"{ENGINE}/requests/companions.py",
        ),
        "rows, which a step verifies, or tokens ahead; drafts are the guest's",
        except_in=(f"{CONTRACT}/layout.py",),  # a head's digest is part of the layout
    ),
    Rule(r"request_slots?", (ENGINE,), "`slots`"),
    Rule(r"(?i)\w*slots?", ("services/gateway",), "a slot is a row of the engine's batch buffers"),
    Rule(
        r"Samples?[A-Z]\w*",
        (f"{ENGINE}/sampling", f"{ENGINE}/executor"),
        "rows are drawn; a sample is one of the answers to a prompt",
    ),
)


def names_in(path: Path) -> Iterator[tuple[str, int]]:
    """Names that a file gives: functions, classes, arguments, attributes; and their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def files_of(where: str) -> list[Path]:
    """The Python files of a folder, or the one file."""
    path = ROOT / where
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_names_use_the_words_of_the_glossary(rule: Rule) -> None:
    pattern, exempt = re.compile(rule.name), {ROOT / one for one in rule.except_in}
    named = {where: files_of(where) for where in (*rule.where, *rule.except_in)}
    assert [where for where, files in named.items() if not files] == [], "the rule is about no file"
    files = [path for where in rule.where for path in named[where] if path not in exempt]
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in files
        for name, line in names_in(path)
        if pattern.fullmatch(name)
    ]
    assert not found, f"say {rule.instead}: {', '.join(found)}"


def test_each_term_is_defined_once_and_in_order() -> None:
    lines = (ROOT / "docs/glossary.md").read_text().splitlines()
    terms = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]
    assert len(terms) == len(set(terms)) > 50
    words = [term.lower() for term in terms if not term.startswith("-")]
    assert words == sorted(words)
