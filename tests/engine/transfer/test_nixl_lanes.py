"""A process knows the lanes of its reads, whatever it has loaded of NIXL before."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import numpy as np
import pytest
from weft.pages.transfer.nixl_binding import load_binding, nixl_available
from weft.pages.transfer.nixl_ranges import (
    MemoryRange,
    RangesReader,
    RangesTarget,
    SharedRanges,
)

IS_AVAILABLE, REASON = nixl_available()
pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason=f"nixl: {REASON}")
SIZE = 1 << 20


def source() -> None:
    """Shares random bytes until its input ends."""
    content = np.random.default_rng().integers(0, 256, SIZE, dtype=np.uint8)
    ranges = SharedRanges("source", [range_of(content)])
    version, name, metadata = ranges.target
    metadata_text = base64.b64encode(metadata).decode()
    print(json.dumps([version, name, metadata_text, content.ctypes.data, content.tobytes().hex()]))
    sys.stdout.flush()
    sys.stdin.read()


def reader() -> None:
    """Uses NIXL, loads it anew, and then reads from a source."""
    agent = load_binding().create_agent("before", has_device=False)
    del agent
    load_binding.cache_clear()
    version, name, metadata, address, content = json.loads(sys.stdin.readline())
    own = np.zeros(SIZE, np.uint8)
    ranges = RangesReader("reader", most_bytes=SIZE, stall_s=20.0)
    target = RangesTarget(version, name, base64.b64decode(metadata))
    ranges.read(target, [(range_of(own), MemoryRange(address, SIZE, "DRAM", 0))])
    assert own.tobytes().hex() == content
    print(ranges.lanes)


def range_of(content: np.ndarray) -> MemoryRange:
    return MemoryRange(content.ctypes.data, content.nbytes, "DRAM", 0)


def test_lanes_are_known_after_nixl_was_loaded_anew() -> None:
    def begin(part: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__, part],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    there, here = begin("source"), begin("reader")
    try:
        assert there.stdout is not None
        came, problem = here.communicate(there.stdout.readline(), timeout=120)
        assert here.returncode == 0, problem
        assert "intra-node" not in problem
        assert "/" in came
    finally:
        for process in (there, here):
            process.kill()
            process.communicate()


if __name__ == "__main__":
    {"source": source, "reader": reader}[sys.argv[1]]()
