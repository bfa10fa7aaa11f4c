"""Writes docs/reference/causal-models.md: the path of every architecture that transformers
registers for causal language models.

python scripts/causal_table.py [--print]
"""

from __future__ import annotations

import sys
from pathlib import Path

from weft.checkpoint.architectures import is_run_by_transformers, supported_architectures
from weft.checkpoint.refused import missing_part
from weft.checkpoint.transformers_registry import known_to_transformers
from weft.testing.models.unread_models import PLANNED, UNREAD

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "causal-models.md"
_HEAD = """# Causal models of transformers

Made by `scripts/causal_table.py` from the registry of the installed transformers. *Weft*: layers of its own, compared as [architectures](architectures.md) says. *transformers*: [its code over Weft's pages](../architecture/executor-and-model.md#models-that-transformers-computes); where `tests/engine/models/test_by_transformers.py` compares it, tokens of a tiny random model equal plain transformers' together, in chunks, behind cached pages, from a prefill worker, and in int8 (*and ranks*: also divided); the others are checked when they are loaded, and may be refused then.

| architecture | path | compared |
| --- | --- | --- |
"""  # noqa: E501
_COMPARED = frozenset(name for name, _ in UNREAD.values())
_PLANNED = frozenset(UNREAD[kind][0] for kind in PLANNED)


def page() -> str:
    lines = [_line(name) for name in sorted(known_to_transformers())]
    return _HEAD + "\n".join(lines) + "\n"


def _line(name: str) -> str:
    if name in supported_architectures():
        return f"| {name} | Weft | yes |"
    if is_run_by_transformers(name, {}):
        compared = "yes" if name in _COMPARED else "at load"
        compared += ", and ranks" if name in _PLANNED else ""
        return f"| {name} | transformers | {compared} |"
    return f"| {name} | refused: {missing_part(name)} | |"


def main() -> int:
    if "--print" in sys.argv[1:]:
        print(page(), end="")
    else:
        PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
