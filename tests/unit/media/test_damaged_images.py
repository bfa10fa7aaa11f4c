"""Damaged files of every format: an image or a refusal, no crash, and no growing memory."""

from __future__ import annotations

import asyncio
import base64
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from PIL import Image
from weft.common.settings import load_settings
from weft.contract.errors import InvalidRequest
from weft.gateway.media.forms import TiledForm
from weft.gateway.media.reader import FetchedFiles, MediaReader, ProcessedFile
from weft.gateway.request import MediaFile
from weft.gateway.settings import GatewaySettings
from weft.testing.models.tiny_images import encoded, random_image

FORM = TiledForm(longest_edge=64, tile_edge=32, tile_tokens=4, resample=1)
MAX_PIXELS = 250_000
Damage = Callable[[random.Random, bytes], bytes]


def whole_files() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [random_image(seed, 24, 16) for seed in range(3)]
    save_all: dict[str, Any] = {"save_all": True, "append_images": frames[1:]}
    rgb, rgba = random_image(1, 40, 30), random_image(2, 30, 40, "RGBA")
    return [
        encoded(rgb, "JPEG", exif=exif),
        encoded(rgb, "JPEG", progressive=True, quality=40),
        encoded(rgb.convert("CMYK"), "JPEG"),
        encoded(rgb.convert("L"), "JPEG"),
        encoded(rgb, "PNG"),
        encoded(rgba, "PNG", exif=exif),
        encoded(rgb.quantize(16), "PNG", transparency=3),
        encoded(rgb.convert("L").convert("I;16"), "PNG"),
        encoded(frames[0], "PNG", **save_all),
        encoded(rgba, "WEBP", lossless=True, exif=exif),
        encoded(rgb, "WEBP", quality=50),
        encoded(frames[0], "WEBP", **save_all),
        encoded(rgb, "GIF"),
        encoded(frames[0], "GIF", **save_all),
    ]


def flipped(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 2, 8, 40])):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def flipped_in_front(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 2, 4])):
        changed[draw.randrange(min(64, len(changed)))] = draw.choice([0, 1, 127, 128, 254, 255])
    return bytes(changed)


def cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def moved(draw: random.Random, data: bytes) -> bytes:
    a, b = sorted(draw.choices(range(len(data)), k=2))
    at = draw.randrange(len(data))
    return data[:at] + data[a:b] + data[at:]


def enlarged(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(min(48, len(data)))
    size = draw.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 65535, draw.randrange(1 << 32)])
    form = draw.choice([">I", "<I"])
    return data[:at] + struct.pack(form, size) + data[at + 4 :]


def noise(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(16)] + draw.randbytes(draw.randrange(400))


DAMAGES: tuple[Damage, ...] = (flipped, flipped_in_front, cut, moved, enlarged, noise)


async def run_files(seed: int, count: int) -> None:
    draw, files = random.Random(seed), whole_files()
    flags = [
        "--model-dir=.",
        "--decode=127.0.0.1:1",
        "--media-memo-bytes=0",
        f"--max-image-pixels={MAX_PIXELS}",
        "--media-timeout-s=120",
    ]
    reader = MediaReader(load_settings(GatewaySettings, flags, {}))
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(8)
    results = {"image": 0, "refusal": 0}

    async def read(image: MediaFile) -> ProcessedFile:
        nothing = FetchedFiles(lambda num_bytes: None)
        sources = await reader.sources([image], nothing, deadline=loop.time() + 600)
        (found,) = await reader.process(
            {"image": FORM}, [image], sources, lambda done: None, deadline=loop.time() + 600
        )
        return found

    async def one(data: bytes) -> None:
        source = base64.b64encode(data).decode()
        image = MediaFile(source=source, where="here", kind="image", type_param="here")
        async with places:
            (found,) = await asyncio.gather(read(image), return_exceptions=True)
        if isinstance(found, BaseException):
            assert isinstance(found, InvalidRequest)
            assert found.param == "here"
            assert len(found.message) < 200
            results["refusal"] += 1
            return
        plan = FORM.plan(*found.size)
        assert len(plan.lengths) == len(found.media)
        assert math.prod(found.size) <= MAX_PIXELS
        results["image"] += 1

    try:
        await asyncio.gather(*[one(data) for data in files])
        assert results == {"image": len(files), "refusal": 0}
        pids = sorted(reader.pool.pids)
        for start in range(0, count, 500):
            damaged = [
                draw.choice(DAMAGES)(draw, draw.choice(files))
                for _ in range(min(500, count - start))
            ]
            await asyncio.gather(*[one(data) for data in damaged])
        assert sum(results.values()) == count + len(files)
        assert min(results.values()) > count // 20
        # None has died or was replaced, and none has grown beyond what an image may take.
        assert sorted(reader.pool.pids) == pids
        assert reader.pool.num_failures == {"timeout": 0, "crash": 0}
        for pid in pids:
            assert psutil.Process(pid).memory_info().rss < 192 << 20
    finally:
        reader.close()


async def test_damaged_files_are_images_or_refused() -> None:
    await run_files(1, 2000)


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_many_damaged_files_are_images_or_refused() -> None:
    await run_files(2, 20_000)
