"""200 adapters on a mesh that has room for 16: skewed traffic while they come, change and go.

    pytest tests/mesh/adapters/test_adapter_storm.py --full -s

A short one is in test_adapters.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from weft.testing.meshes.storm_checks import Scale, room_flags, weather
from weft.testing.meshes.tiny_mesh import TinyMesh

pytestmark = [pytest.mark.needs("go"), pytest.mark.full, pytest.mark.timeout(1200)]

LONG = Scale(
    names=200,
    contents=260,
    max_loras=16,
    host_adapters=40,
    clients=16,
    operators=4,
    seconds=180.0,
    lag_s=1.0,
)
KV_BYTES = 16 << 20
"""A small KV pool, of which every page has been used before memory is measured. The system gives a
page its memory at the first use, which is no growth.
"""


def test_a_long_storm(tmp_path: Path, rest_binary: Path) -> None:
    root = tmp_path / "adapters"
    root.mkdir()
    room = room_flags(LONG, tmp_path / "probe")
    mesh = TinyMesh(
        tmp_path,
        *("--decode", "3", "--prefill", "2", "--adapter-root", str(root)),
        *("--local-prefill-max-tokens", "0", "--gateway-args", "--adapter-linger-s 0.3"),
        *(f"--decode-args={room}", f"--prefill-args={room}"),
        *("--kv-memory-bytes", str(KV_BYTES)),
        gateways=2,
    )
    try:
        mesh.wait_ready()
        weather(mesh, root, LONG)
        assert mesh.stop() == 0, mesh.text
    finally:
        mesh.process.kill()
        mesh.process.wait()
