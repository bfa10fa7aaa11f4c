"""Loads a model and prints how much of the host's memory that took at most; a program."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

from weft.engine.model.loader import load_model

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ", re.ASCII)


def mapped_bytes() -> int:
    """Resident pages of safetensors files."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if _MAPPING.match(line):
            counts = line.endswith(".safetensors")
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def anonymous_bytes() -> int:
    """Resident memory that no file backs."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def main(warm_dir: Path, model_dir: Path) -> None:
    """Loads `warm_dir` first, so that what libraries need is there."""
    load_model(warm_dir, "float32")
    calls = itertools.count()
    before, together = anonymous_bytes(), [0]

    def sample(done: int, total: int) -> None:
        if next(calls) % 4:
            return
        # Read so far, the model has of it as much.
        together.append(mapped_bytes() + anonymous_bytes() - before - done)

    loaded = load_model(model_dir, "float32", progress=sample)
    print(json.dumps({"beyond": max(together), "left": mapped_bytes()}))
    del loaded


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
