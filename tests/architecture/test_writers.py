"""What a request holds is written by one room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "engine" / "weft" / "engine"
CHANGES = {"append", "extend", "insert", "remove", "pop", "clear"}


def test_pages_of_requests_are_written_in_their_room() -> None:
    """Others call methods of `HeldPages` and `RequestPages`."""
    others = (path for path in ENGINE.rglob("*.py") if path.parent.name != "requests")
    found = [
        f"{path.relative_to(ENGINE)}:{node.lineno}"
        for path in others
        for node in _written(ast.parse(path.read_text(encoding="utf-8")))
        if _is_held(node)
    ]
    assert not found


def _written(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, or changed by a method of lists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CHANGES
            and isinstance(node.func.value, ast.Attribute)
        ):
            yield node.func.value
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and isinstance(node.value, ast.Attribute)
        ):
            yield node.value


def _is_held(node: ast.Attribute) -> bool:
    owner = node.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return name == "held"
