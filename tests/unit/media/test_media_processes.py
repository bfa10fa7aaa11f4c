"""Media processes: bounded, replaced when they hang or die, and no trouble to other requests."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from weft.common.settings import load_settings
from weft.contract.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
)
from weft.gateway.long_text import LongText
from weft.gateway.media.forms import TiledForm
from weft.gateway.media.reader import FetchedFiles, HeldMedia, MediaReader, ProcessedFile
from weft.gateway.media.sources import Source
from weft.gateway.request import MediaFile
from weft.gateway.settings import GatewaySettings
from weft.testing.models.tiny_images import encoded, random_image

FORM = TiledForm(longest_edge=128, tile_edge=64, tile_tokens=4, resample=1)


@asynccontextmanager
async def reading(**settings: Any) -> AsyncIterator[MediaReader]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    made = MediaReader(
        load_settings(GatewaySettings, ["--model-dir=.", "--decode=127.0.0.1:1", *flags], {})
    )
    try:
        yield made
    finally:
        made.close()


def file_of(data: bytes, where: str = "messages[0].content[0].image_url.url") -> MediaFile:
    return MediaFile(
        source=base64.b64encode(data).decode(), where=where, kind="image_url", type_param=where
    )


async def sources_of(reader: MediaReader, images: Sequence[MediaFile]) -> list[Source]:
    deadline = asyncio.get_running_loop().time() + 60
    return await reader.sources(images, FetchedFiles(lambda num_bytes: None), deadline=deadline)


async def process(reader: MediaReader, images: Sequence[MediaFile]) -> list[ProcessedFile]:
    sources = await sources_of(reader, images)
    deadline = asyncio.get_running_loop().time() + 60
    return await reader.process(
        {"image": FORM}, images, sources, lambda done: None, deadline=deadline
    )


def picture(seed: int, size: int = 100) -> MediaFile:
    return file_of(encoded(random_image(seed, size, size // 2)))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_processes_start_with_the_first_image_and_give_what_the_form_gives() -> None:
    async with reading() as reader:
        assert reader.pool.pids == []
        (found,) = await process(reader, [picture(1)])
        assert found.media == tuple(FORM.process(random_image(1, 100, 50)))
        assert found.size == (50, 100)
        assert len(reader.pool.pids) == 1
        (pid,) = reader.pool.pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_images_that_come_back_are_not_decoded_again() -> None:
    async with reading() as reader:
        first = await process(reader, [picture(1), picture(2), picture(1)])
        assert first[0] == first[2]
        for pid in reader.pool.pids:
            os.kill(pid, signal.SIGSTOP)  # Nothing could be decoded any more.
        again = await process(reader, [picture(2), picture(1)])
        assert again == [first[1], first[0]]
        assert reader.num_repeated >= 2
        assert reader.num_images == 5


async def test_known_images_do_not_wait_for_new_ones() -> None:
    async with reading(media_processes=1) as reader:
        (known,) = await process(reader, [picture(1)])
        (pid,) = reader.pool.pids
        os.kill(pid, signal.SIGSTOP)
        images = [picture(2), picture(1), picture(2)]
        sources, told = await sources_of(reader, images), list[ProcessedFile]()
        deadline = asyncio.get_running_loop().time() + 60
        work = reader.process({"image": FORM}, images, sources, told.append, deadline=deadline)
        task = asyncio.create_task(work)
        await until(lambda: told)
        assert told == [known]
        os.kill(pid, signal.SIGCONT)
        found = await task
        assert found[1] == known
        assert found[0] == found[2]
        assert found[0].media == tuple(FORM.process(random_image(2, 100, 50)))
        assert sorted(map(id, told)) == sorted(map(id, found))
        assert (reader.num_repeated, reader.num_images) == (2, 4)


async def test_the_memo_is_bounded_in_bytes() -> None:
    most = 200_000
    async with reading(media_memo_bytes=most) as reader:
        for seed in range(12):
            await process(reader, [picture(seed)])
            assert reader.memo.num_bytes <= most
        assert reader.memo.num_bytes > most // 2


async def test_coarse_images_are_other_images() -> None:
    fine = picture(1)
    coarse = MediaFile(
        source=fine.source, where="x", kind="image_url", type_param="x", is_coarse=True
    )
    async with reading() as reader:
        found = await process(reader, [fine, coarse])
        assert [len(one.media) for one in found] == [3, 1]


async def test_a_process_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading(media_processes=1, media_timeout_s=60) as reader:
        await process(reader, [picture(1)])
        (pid,) = reader.pool.pids
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:  # Processes need longer to start.
            patch.setattr(reader.pool, "_timeout_s", 1.0)
            with pytest.raises(DeadlineExceeded, match="longer than 1 s"):
                await process(reader, [picture(2)])
        assert not psutil.pid_exists(pid)
        await process(reader, [picture(2)])
        assert reader.pool.pids != [pid]
        assert reader.pool.num_failures["timeout"] == 1


async def test_a_process_that_dies_fails_its_own_request_alone() -> None:
    async with reading(media_processes=2) as reader:
        seeds = itertools.count(10)
        while len(reader.pool.pids) < 2:  # One process may have worked on both.
            images = [picture(next(seeds)) for _ in range(2)]
            await asyncio.gather(*[process(reader, [image]) for image in images])
        # Both jobs wait on stopped processes; one of them is killed.
        for pid in reader.pool.pids:
            os.kill(pid, signal.SIGSTOP)
        jobs = [asyncio.create_task(process(reader, [picture(seed)])) for seed in (3, 4)]
        await until(lambda: reader.pool.num_running == 2)
        killed, other = reader.pool.pids
        os.kill(killed, signal.SIGKILL)
        os.kill(other, signal.SIGCONT)
        results = await asyncio.gather(*jobs, return_exceptions=True)
        failures = [one for one in results if isinstance(one, BaseException)]
        assert len(failures) <= 1
        for failure in failures:
            assert isinstance(failure, PeerUnavailable)
        assert len(await process(reader, [picture(5), picture(6)])) == 2


async def test_an_idle_process_that_died_costs_no_request() -> None:
    async with reading(media_processes=1) as reader:
        await process(reader, [picture(1)])
        (pid,) = reader.pool.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        assert len(await process(reader, [picture(2)])) == 1


async def test_more_images_than_may_wait_are_refused() -> None:
    async with reading(media_processes=1, max_queued_media=2, media_timeout_s=30) as reader:
        await process(reader, [picture(0)])
        (pid,) = reader.pool.pids
        os.kill(pid, signal.SIGSTOP)
        jobs = [asyncio.create_task(process(reader, [picture(seed)])) for seed in range(1, 4)]
        await until(lambda: reader.pool.num_queued == 2)
        with pytest.raises(Overloaded):
            await process(reader, [picture(9)])
        os.kill(pid, signal.SIGCONT)
        assert len(await asyncio.gather(*jobs)) == 3


async def test_who_leaves_takes_no_one_elses_image_away() -> None:
    async with reading(media_processes=1, media_timeout_s=30) as reader:
        await process(reader, [picture(0)])
        (pid,) = reader.pool.pids
        os.kill(pid, signal.SIGSTOP)
        jobs = [asyncio.create_task(process(reader, [picture(1)])) for _ in range(2)]
        await until(lambda: reader.pool.num_running == 1)
        jobs[0].cancel()
        os.kill(pid, signal.SIGCONT)
        assert len(await jobs[1]) == 1
        with pytest.raises(asyncio.CancelledError):
            await jobs[0]


BOUNDS: Sequence[tuple[dict[str, int], int, str]] = [
    ({"max_images": 2}, 3, "is file 3 of 3; at most 2"),
    ({"max_image_bytes": 1000}, 1, "at most 1000"),
    ({"max_request_image_bytes": 20_000}, 3, "more than 20000 bytes"),
    ({"max_image_pixels": 4000}, 1, "pixels"),
]


@pytest.mark.parametrize(("settings", "count", "problem"), BOUNDS)
async def test_bounds_are_told(settings: dict[str, int], count: int, problem: str) -> None:
    async with reading(**settings) as reader:
        with pytest.raises(InvalidRequest, match=problem) as caught:
            await process(reader, [picture(seed) for seed in range(count)])
        assert caught.value.param == "messages[0].content[0].image_url.url"


SOURCES = [
    ("", "is missing"),
    ("http://example.com/a.png", r"fetches none \(--media-url-hosts\)"),
    ("HTTPS://example.com/a.png", "fetches none"),
    ("file:///etc/passwd", "`file:`, which is not read"),
    ("data:image/png,abc", "must have the form"),
    ("data:image/png;base64,####", "not valid base64"),
    ("data:image/png;base64,", "is empty"),
    ("iVBORw0KGgo=", "no image that can be read"),
    ("/etc/passwd", "base64|no image"),
]


@pytest.mark.parametrize(("source", "problem"), SOURCES)
async def test_what_is_no_file_is_refused(source: str, problem: str) -> None:
    image = MediaFile(source=source, where="here", kind="image_url", type_param="here")
    async with reading() as reader:
        with pytest.raises(InvalidRequest, match=problem) as caught:
            await process(reader, [image])
        assert caught.value.param == "here"


async def test_lines_of_base64_and_urls_are_the_same_file() -> None:
    data = encoded(random_image(1, 60, 60))
    plain = base64.b64encode(data).decode()
    forms = [plain, f"data:image/png;base64,{plain}", base64.encodebytes(data).decode()]
    async with reading() as reader:
        images = [MediaFile(source=one, where="", kind="image", type_param="") for one in forms]
        plain_source, of_url, _ = await sources_of(reader, images)
        assert plain_source.digest == of_url.digest
        first, *others = await process(reader, images)
        assert all(one.media == first.media for one in others)
        assert reader.num_repeated == 0


async def test_files_that_are_no_base64_are_refused() -> None:
    text = base64.b64encode(encoded(random_image(1, 60, 61))).decode().rstrip("=")
    text += "A" * (-len(text) % 4)
    forms = [
        f"{text[:400]}AAA={text[404:]}",
        text[:-1],
        f"{text}=AAA",
        f"{text[:-1]}é",
        "data:;base64,#",
    ]
    async with reading() as reader:
        for source in (*forms, LongText(forms[0].encode(), 0, len(forms[0]))):
            image = MediaFile(source=source, where="a", kind="image", type_param="a")
            with pytest.raises(InvalidRequest, match="a: is not valid base64"):
                await process(reader, [image])
        image = MediaFile(source="data:;base64,", where="a", kind="image", type_param="a")
        with pytest.raises(InvalidRequest, match="a: is empty"):
            await process(reader, [image])


async def test_texts_within_a_body_are_the_same_files() -> None:
    plain = base64.b64encode(encoded(random_image(2, 60, 60)))
    begin = b"data:image/png;base64,"
    body = b'["' + begin + plain + b'"]'
    sources = [LongText(body, 2, len(body) - 2), LongText(plain, 0, len(plain)), plain.decode()]
    async with reading() as reader:
        images = [MediaFile(source=one, where="", kind="image", type_param="") for one in sources]
        assert len({one.digest for one in await sources_of(reader, images)}) == 1


async def test_an_error_names_the_part_of_its_own_request() -> None:
    async with reading(media_processes=1, media_timeout_s=30) as reader:
        await process(reader, [picture(0)])
        (pid,) = reader.pool.pids
        os.kill(pid, signal.SIGSTOP)
        jobs = [
            asyncio.create_task(process(reader, [file_of(b"no image", where)]))
            for where in ("a", "b")
        ]
        await until(lambda: reader.pool.num_running == 1)
        os.kill(pid, signal.SIGCONT)
        errors = await asyncio.gather(*jobs, return_exceptions=True)
        assert [getattr(error, "param", None) for error in errors] == ["a", "b"]


async def test_memory_does_not_grow_with_images() -> None:
    async with reading(media_processes=1, media_memo_bytes=0) as reader:
        pictures = [picture(seed, 300 + 100 * seed) for seed in range(6)]
        for number in range(24):
            await process(reader, [pictures[number % 6]])
        (pid,) = reader.pool.pids
        before = psutil.Process(pid).memory_info().rss
        for number in range(120):
            await process(reader, [pictures[number % 6]])
        assert reader.pool.pids == [pid]
        assert psutil.Process(pid).memory_info().rss - before < 16 << 20


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_memory_does_not_grow_with_ten_thousand_images() -> None:
    async with reading(media_processes=1, media_memo_bytes=300_000) as reader:
        pictures = [picture(seed, 60 + 10 * seed) for seed in range(40)]

        def memory() -> int:
            (pid,) = reader.pool.pids
            return sum(psutil.Process(one).memory_info().rss for one in (pid, os.getpid()))

        async def run(count: int) -> None:
            for number in range(0, count, 8):
                await process(reader, [pictures[(number + n) % 40] for n in range(8)])

        await run(104)
        before = memory()
        await run(10_000)
        assert memory() - before < 16 << 20


def test_a_gateway_without_images_loads_no_decoder(tmp_path: Path) -> None:
    code = "import sys, weft.gateway.app; print('PIL' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert ran.stdout.strip() == "False"


async def test_images_that_nobody_waits_for_leave_the_queue() -> None:
    async with reading(media_processes=1, media_timeout_s=30) as reader:
        await process(reader, [picture(0)])
        (pid,) = reader.pool.pids
        os.kill(pid, signal.SIGSTOP)
        first = asyncio.create_task(process(reader, [picture(1)]))
        await until(lambda: reader.pool.num_running == 1)
        left = [asyncio.create_task(process(reader, [picture(2)])) for _ in range(3)]
        await until(lambda: reader.pool.num_queued == 1)
        for job in left:
            job.cancel()
        await until(lambda: reader.pool.num_queued == 0)
        again = asyncio.create_task(process(reader, [picture(2)]))
        os.kill(pid, signal.SIGCONT)
        assert len(await first) == len(await again) == 1


async def test_images_behind_a_bad_one_are_not_worked_on() -> None:
    async with reading(media_processes=1, media_timeout_s=30) as reader:
        await process(reader, [picture(0)])
        with pytest.raises(InvalidRequest):
            await process(reader, [file_of(b"no image"), *(picture(seed) for seed in range(1, 9))])
        await until(lambda: not reader.pool.num_running and not reader.pool.num_queued)
        assert reader.num_images <= 3


def test_one_request_may_hold_any_amount() -> None:
    held = HeldMedia(100)
    held.take("a", 60)
    held.take("a", 600)
    with pytest.raises(Overloaded):
        held.take("b", 1)
    held.give_back("a")
    held.take("b", 60)
    held.take("c", 40)
    with pytest.raises(Overloaded):
        held.take("b", 1)
    held.give_back("b")
    held.give_back("c")
    assert held.num_bytes == 0


async def test_processes_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_GATEWAY_RESPONSE_STORE_URL", "valkey://user:password@host")
    async with reading() as reader:
        await process(reader, [picture(1)])
        (pid,) = reader.pool.pids
        assert "password" not in str(psutil.Process(pid).environ())


def test_processes_end_with_a_gateway_that_was_killed() -> None:
    code = (
        "import asyncio, sys, time\n"
        "from weft.gateway.media.pool import MediaPool\n"
        "async def main():\n"
        "    pool, until = MediaPool(1, 1, 30.0), asyncio.get_running_loop().time() + 30\n"
        "    head = {'form': 'tiled', 'max_pixels': 1, 'measures': True, 'is_base64': False}\n"
        "    await pool.run(head, b'x', deadline=until)\n"
        "    print(*pool.pids, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        media = psutil.Process(int(ran.stdout.readline()))
        ran.kill()
    media.wait(60)
