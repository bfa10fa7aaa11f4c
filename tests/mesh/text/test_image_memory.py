"""Memory of a mesh under many images: what a service keeps of them has a bound."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.models.tiny_vision import make_vision

FEW, MANY, MOST_GROWTH = 100, 10_000, 16 << 20
CLIENTS = 6
SAMPLES, BETWEEN = 8, 10
BOUNDS = "--trace-buffer-spans 100"
"""Spans are kept for operators, up to a number that this test would not reach soon."""


def body() -> dict[str, object]:
    """A question about an image that nobody has seen before."""
    pixels = np.random.default_rng().integers(0, 256, (48, 64, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": parts}]
    return {"model": "seeing", "messages": messages, "max_tokens": 2, "temperature": 0}


async def ask(mesh: LocalMesh, count: int) -> None:
    left = iter(range(count))
    async with httpx.AsyncClient(timeout=120) as client:

        async def go_on() -> None:
            for _ in left:
                answer = await client.post(f"{mesh.url}/v1/chat/completions", json=body())
                assert answer.status_code == 200, answer.text

        await asyncio.gather(*(go_on() for _ in range(CLIENTS)))


def memory_of(mesh: LocalMesh) -> dict[str, int]:
    """Resident bytes of each Python process of the mesh, by number and command."""
    found = {}
    for process in psutil.Process(mesh.process.pid).children(recursive=True):
        command = process.cmdline()
        if command and "python" in Path(command[0]).name:
            found[f"{process.pid} {' '.join(command[1:4])}"] = process.memory_info().rss
    return found


async def least_memory_of(mesh: LocalMesh, count: int) -> dict[str, int]:
    """After about so many images the least of some looks: what lies in memory for moments, such as
    bodies that wait for a busy process, differs by more than what is kept.
    """
    await ask(mesh, count - SAMPLES * BETWEEN)
    found = list[dict[str, int]]()
    for _ in range(SAMPLES):
        await ask(mesh, BETWEEN)
        found.append(memory_of(mesh))
    assert len({frozenset(one) for one in found}) == 1, "a process has ended"
    return {name: min(one[name] for one in found) for name in found[0]}


@pytest.mark.full
@pytest.mark.needs("go")
@pytest.mark.timeout(3600)
async def test_ten_thousand_images_take_as_much_memory_as_a_hundred(
    tmp_path: Path, rest_binary: Path
) -> None:
    folder = make_vision("idefics3", tmp_path / "seeing", random.randrange(2**31))
    flags = ("--model", str(folder), "--dtype", "float32", "--local-prefill-max-tokens", "0")
    small = f"--media-bytes {1 << 20} --num-pages 200 {BOUNDS}"
    flags += ("--decode-args", small, "--prefill-args", small)
    flags += ("--gateway-args", f"--media-memo-bytes {1 << 20} {BOUNDS}")
    (tmp_path / "mesh").mkdir()
    mesh = LocalMesh(tmp_path / "mesh", *flags)
    try:
        mesh.wait_ready()
        mesh.wait_healthy()
        before = await least_memory_of(mesh, FEW)
        after = await least_memory_of(mesh, MANY - FEW)
        print({name: (before[name] >> 20, after[name] >> 20) for name in before})
        assert set(after) == set(before), "a process has ended"
        for name, num_bytes in before.items():
            assert after[name] - num_bytes <= MOST_GROWTH, (name, num_bytes, after[name])
        assert mesh.stop() == 0, mesh.text
    finally:
        mesh.process.kill()
        mesh.process.wait()
