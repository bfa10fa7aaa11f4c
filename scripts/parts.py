"""Files of generated texts: each is a part, made from a seed of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path


def missing_parts(
    first: Path, count: int, *, worker: int, seed: int, end_s: float
) -> Iterator[tuple[Path, int]]:
    """Parts that are not written yet, until the time is over.

    Args:
        first: Folder and name of the files, to which the numbers of worker and part are added.
        count: Parts of a process.
        worker: Number of this process among those that write side by side.
        seed: Of all parts.
        end_s: When no part begins any more, as `time.monotonic` shows it.

    Yields:
        File and seed of a part.
    """
    for number in range(count):
        path = first.with_stem(f"{first.stem}-{worker:02d}-{number:04d}")
        if path.exists():
            continue
        if time.monotonic() > end_s:
            return
        yield path, (seed << 32) + (worker << 16) + number
