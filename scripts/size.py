"""Counts the lines of each room that hold code: no blank lines, comments or docstrings.

python scripts/size.py            a table
python scripts/size.py --folders  each folder of every root too
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ROOTS = (
    *("contract", "checkpoint", "kernels", "pages", "engine"),
    *(
        f"services/{name}"
        for name in ("common", "gateway", "prefill", "decode", "kvstore", "planner")
    ),
    *("cli", "chaos"),
)
_C_SUFFIXES = {".c", ".h", ".cu"}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """Lines of some files."""

    files: int = 0
    lines: int = 0
    code: int = 0
    docstrings: int = 0

    def plus(self, other: Size) -> Size:
        """The sum of both."""
        return Size(*(one + two for one, two in zip(self, other, strict=True)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folders", action="store_true", help="each folder of every root too")
    arguments = parser.parse_args()
    print("| room | files | lines | that hold code | docstrings |")
    print("| --- | --- | --- | --- | --- |")
    total = Size()
    for root in ROOTS:
        sizes = {path: size_of(path) for path in sources(ROOT / root)}
        whole = sum_of(sizes.values())
        total = total.plus(whole)
        print(row(f"`{root}`", whole))
        if arguments.folders:
            for folder in sorted({path.parent for path in sizes}):
                inner = sum_of(size for path, size in sizes.items() if path.parent == folder)
                print(row(f"`{folder.relative_to(ROOT)}`", inner))
    print(row("all", total))


def row(name: str, size: Size) -> str:
    """A line of the table."""
    share = 100 * size.docstrings / max(1, size.lines)
    return f"| {name} | {size.files} | {size.lines:,} | {size.code:,} | {share:.0f} % |"


def sum_of(sizes: Iterable[Size]) -> Size:
    """The sum of several sizes."""
    total = Size()
    for size in sizes:
        total = total.plus(size)
    return total


def sources(folder: Path) -> Iterator[Path]:
    """Files of Python and C below a folder."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".py" or path.suffix in _C_SUFFIXES:
            yield path


def size_of(path: Path) -> Size:
    """Counts one file."""
    text = path.read_text()
    lines = text.count("\n")
    if path.suffix in _C_SUFFIXES:
        return Size(1, lines, _lines_of_c(text), 0)
    docstrings = _docstring_lines(ast.parse(text))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return Size(1, lines, len(code - docstrings), len(docstrings))


def _docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of texts that stand alone: docstrings of modules, classes, functions and fields."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _lines_of_c(text: str) -> int:
    count, is_comment = 0, False
    for line in text.splitlines():
        rest = line.strip()
        while rest:
            if is_comment:
                _, end, rest = rest.partition("*/")
                is_comment, rest = not end, rest.strip()
                continue
            if rest.startswith("//"):
                break
            if rest.startswith("/*"):
                is_comment, rest = True, rest[2:]
                continue
            count += 1
            # A comment that begins behind code and goes on in the next line.
            is_comment = rest.rfind("/*") > rest.rfind("*/")
            break
    return count


if __name__ == "__main__":
    main()
