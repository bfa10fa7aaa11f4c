"""Turns the images and clips of requests into media: bounds, memo, processes."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from weft.contract.errors import Overloaded
from weft.contract.spans import Media
from weft.gateway.media.pool import MediaPool
from weft.gateway.media.prompts import BadFile, MediaForm
from weft.gateway.media.sources import (
    FetchFailed,
    MediaRefused,
    Source,
    SourceLimits,
    check_number,
    read_sources,
    too_large,
    url_of,
)
from weft.gateway.request import FileKind, MediaFile
from weft.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from weft.gateway.media.fetch import UrlFetcher  # httpx takes a quarter of a second to load

T = TypeVar("T")

_RETRY_AFTER_S = 1.0
_FETCHES = 8
"""At once for one request."""
_ENTRY_BYTES = 512
"""Assumed size of an entry of the memo, its media's data apart."""
_IS_OFF = (
    "is a URL, and this gateway fetches none (--media-url-hosts); send the file itself as "
    "data:...;base64,..."
)


class ProcessedFile(NamedTuple):
    """An image, or a clip, as a model's encoder takes it."""

    size: tuple[int, ...]
    """Height and width in pixels of an upright image; the samples of a clip."""
    media: tuple[Media, ...]

    @property
    def num_bytes(self) -> int:
        """Memory that it is counted as."""
        return _ENTRY_BYTES + sum(len(one.data) for one in self.media)


class _Job(NamedTuple):
    form: MediaForm
    file: MediaFile
    source: Source
    key: bytes
    """Names the result in the memo."""


@dataclass(slots=True)
class _Flight:
    """The work on one file, for which several requests may wait."""

    task: asyncio.Task[ProcessedFile]
    num_waiters: int = 0


@dataclass(slots=True)
class HeardFiles:
    """Audio of chats that was decoded so far."""

    num_files: int = 0
    num_samples: int = 0
    num_clips: int = 0
    """Media that were made of them."""

    def count(self, file: ProcessedFile) -> None:
        self.num_files += 1
        self.num_samples += sum(file.size)
        self.num_clips += len(file.media)


class FetchedFiles:
    """What a request's URLs gave: each is fetched once."""

    def __init__(self, count: Callable[[int], None]) -> None:
        """`count` gets the number of bytes that arrive; what it raises fails the request."""
        self.by_url: dict[str, bytes] = {}
        self.problems: dict[str, str] = {}
        self.num_bytes = 0
        self.count = count


class MediaReader:
    """Reads images and clips for all models of a gateway. Belongs to the event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.limits = SourceLimits(
            settings.max_images,
            settings.max_request_image_bytes,
            settings.max_image_bytes,
            settings.max_audio_bytes,
            settings.max_video_bytes,
        )
        """Bounds of a request's files."""
        self._max_pixels = settings.max_image_pixels
        self._max_seconds = settings.max_audio_seconds
        self._max_video_seconds = settings.max_video_seconds
        self._max_running = settings.num_media_processes
        self.pool = MediaPool(
            settings.num_media_processes, settings.max_queued_media, settings.media_timeout_s
        )
        """The processes that do the work."""
        self.videos = MediaPool(1, settings.max_queued_media, settings.media_timeout_s)
        """The process of videos, whose decoders are many."""
        self.memo = MediaMemo(settings.media_memo_bytes)
        """Files that were processed before."""
        self.fetcher: UrlFetcher | None = None
        """Fetches files that requests have as URLs; None: such are refused."""
        if settings.media_url_hosts or settings.media_private_hosts:
            from weft.gateway.media.fetch import UrlFetcher

            self.fetcher = UrlFetcher(settings)
        self.held = HeldMedia(settings.media_held_bytes)
        """What running requests hold."""
        self._flights: dict[bytes, _Flight] = {}
        self.num_images = 0
        """Images of requests so far."""
        self.num_repeated = 0
        """Those among them that the memo had."""
        self.heard = HeardFiles()
        """Audio of chats so far."""

    def close(self) -> None:
        """Ends the processes."""
        if self.fetcher is not None:
            self.fetcher.close()
        self.pool.close()
        self.videos.close()

    async def sources(
        self,
        files: Sequence[MediaFile],
        fetched: FetchedFiles,
        *,
        deadline: float,
        tenant: str = "",
    ) -> list[Source]:
        """The content of files. `deadline` bounds the wait for a place to fetch one.

        Raises:
            MediaRefused: One has no content, or its URL gave none.
            InvalidRequest: There are too many or too large ones.
            Overloaded: Too many fetches wait.
            DeadlineExceeded: No place became free in time.
        """
        check_number(files, self.limits.max_files)
        await self._fetch(files, fetched, deadline, tenant)
        return await asyncio.to_thread(read_sources, files, self.limits, fetched.by_url)

    async def _fetch(
        self, files: Sequence[MediaFile], fetched: FetchedFiles, deadline: float, tenant: str
    ) -> None:
        by_url: dict[str, list[MediaFile]] = {}
        for file in files:
            if url := url_of(file):
                by_url.setdefault(url, []).append(file)
        places = asyncio.Semaphore(_FETCHES)

        async def one(url: str, files: Sequence[MediaFile]) -> None:
            def count(num_bytes: int) -> None:
                fetched.count(num_bytes)
                fetched.num_bytes += num_bytes
                if fetched.num_bytes > self.limits.max_bytes:
                    raise too_large(files[0], self.limits.max_bytes)

            if url not in fetched.by_url and url not in fetched.problems:
                try:
                    if self.fetcher is None:
                        raise FetchFailed(_IS_OFF)
                    async with places:
                        fetched.by_url[url] = await self.fetcher.fetch(
                            url, count, deadline=deadline, tenant=tenant
                        )
                except FetchFailed as error:
                    fetched.problems[url] = str(error)
            for file in files:
                # Without a file of the user the request fails. A text takes the place of one
                # that only tools have returned.
                if url in fetched.problems and not file.is_of_tool:
                    raise MediaRefused(file, fetched.problems[url])

        await _all(one(url, those) for url, those in by_url.items())
        for url, those in by_url.items():
            if url in fetched.problems:
                raise MediaRefused(those[0], fetched.problems[url])

    async def sizes(
        self,
        forms: Mapping[FileKind, MediaForm],
        files: Sequence[MediaFile],
        sources: Sequence[Source],
        *,
        deadline: float,
        tenant: str = "",
    ) -> list[tuple[int, ...]]:
        """`ProcessedFile.size` of files, of images by their headers alone. Raises as `process`
        does.
        """

        async def measured(job: _Job) -> tuple[int, ...]:
            work = self._run(job, deadline, tenant, measures=True)
            reply, _ = await _blamed(work, job.file)
            return tuple(reply["size"])

        jobs = _jobs(forms, files, sources)
        return await self._each(jobs, lambda _, known: known.size, measured)

    async def process(
        self,
        forms: Mapping[FileKind, MediaForm],
        files: Sequence[MediaFile],
        sources: Sequence[Source],
        on_file: Callable[[ProcessedFile], None],
        *,
        deadline: float,
        tenant: str = "",
    ) -> list[ProcessedFile]:
        """Decodes and processes files in the forms of their kinds. `on_file` gets each that is
        done. `deadline`, in the event loop's time, bounds the wait for a process.

        Raises:
            MediaRefused: A file is of another kind, is damaged, or is too large or too long.
            Overloaded: Too many files wait.
            DeadlineExceeded: One took too long, or no process became free in time.
            PeerUnavailable: A process died.
        """

        def repeated(job: _Job, known: ProcessedFile) -> ProcessedFile:
            if job.file.modality == "image":
                self.num_repeated += 1
                self.num_images += 1
            on_file(known)
            return known

        async def made(job: _Job) -> ProcessedFile:
            if (known := self.memo.get(job.key)) is not None:
                return repeated(job, known)  # Meanwhile, or the request has the file twice.
            self.num_images += job.file.modality == "image"
            flight = self._flights.get(job.key)
            if flight is None:
                work = self._process(job, deadline, tenant)
                flight = self._flights[job.key] = _Flight(asyncio.create_task(work))
                flight.task.add_done_callback(lambda done: self._landed(job.key, done))
            flight.num_waiters += 1
            try:
                new = await _blamed(asyncio.shield(flight.task), job.file)
            finally:
                flight.num_waiters -= 1
                if not flight.num_waiters and not flight.task.done():
                    # All have left. Whoever comes now begins anew.
                    del self._flights[job.key]
                    flight.task.cancel()
            on_file(new)
            return new

        return await self._each(_jobs(forms, files, sources), repeated, made)

    async def _each(
        self,
        jobs: Sequence[_Job],
        repeated: Callable[[_Job, ProcessedFile], T],
        work: Callable[[_Job], Awaitable[T]],
    ) -> list[T]:
        """What `repeated` makes of the files that the memo has, at once, and `work` of the others.
        A request has no more jobs in the queue than there are processes.
        """
        found: dict[int, T] = {}
        places = asyncio.Semaphore(self._max_running)

        async def placed(index: int) -> None:
            async with places:
                found[index] = await work(jobs[index])

        lacking = []
        for index, job in enumerate(jobs):
            known = self.memo.get(job.key)
            if known is None:
                lacking.append(index)
            else:
                found[index] = repeated(job, known)
        await _all(map(placed, lacking))
        return [found[index] for index in range(len(jobs))]

    def _landed(self, key: bytes, flight: asyncio.Task[ProcessedFile]) -> None:
        known = self._flights.get(key)
        if known is not None and known.task is flight:
            del self._flights[key]
        # Reads the error, since all that waited may have left.
        if not flight.cancelled() and flight.exception() is None:
            self.memo.put(key, flight.result())

    async def _process(self, job: _Job, deadline: float, tenant: str) -> ProcessedFile:
        reply, data = await self._run(job, deadline, tenant, measures=False)
        media, at, view = [], 0, memoryview(data)
        for told in reply["media"]:
            shape = tuple(told["shape"])
            end = at + shape[0] * shape[1] * shape[2]
            digest, content = bytes.fromhex(told["digest"]), bytes(view[at:end])
            media.append(
                Media(
                    kind="audio" if job.file.modality == "audio" else "image",
                    processor=told["processor"],
                    shape=shape,
                    data=content,
                    digest=digest,
                )
            )
            at = end
        made = ProcessedFile(tuple(reply["size"]), tuple(media))
        if job.file.modality == "audio":
            self.heard.count(made)
        return made

    async def _run(
        self, job: _Job, deadline: float, tenant: str, *, measures: bool
    ) -> tuple[dict[str, Any], bytearray]:
        form, file, source, _ = job
        is_video = file.modality == "video"
        head = {
            "form": form.name,
            "options": form.options(),
            "is_coarse": file.is_coarse,
            "max_pixels": self._max_pixels,
            "max_seconds": self._max_video_seconds if is_video else self._max_seconds,
            "measures": measures,
            "is_base64": source.is_base64,
        }
        pool = self.videos if is_video else self.pool
        reply, data = await pool.run(head, source.data, deadline=deadline, tenant=tenant)
        if "bad" in reply:
            raise BadFile(reply["bad"])
        return reply, data


class HeldMedia:
    """Counts what requests hold of their files until they end."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_request: dict[str, int] = {}
        self.num_bytes = 0

    def take(self, request_id: str, num_bytes: int) -> None:
        """Counts bytes for a request, until `give_back`. Raises Overloaded if all requests would
        hold too much; one alone may hold any amount.
        """
        is_alone = self.num_bytes == self._by_request.get(request_id, 0)
        if not is_alone and self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                f"files of requests hold {self.num_bytes} bytes already (the bound is "
                f"{self._max_bytes}); send the request again later",
                stage="prepare",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._by_request[request_id] = self._by_request.get(request_id, 0) + num_bytes
        self.num_bytes += num_bytes

    def give_back(self, request_id: str) -> None:
        """The request has ended; it may hold nothing."""
        self.num_bytes -= self._by_request.pop(request_id, 0)


class MediaMemo:
    """Processed files by what they were made of; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, ProcessedFile] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> ProcessedFile | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, file: ProcessedFile) -> None:
        """Keeps a file, unless it is larger than the memo."""
        if file.num_bytes > self._max_bytes or key in self._entries:
            return
        self._entries[key] = file
        self.num_bytes += file.num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.num_bytes


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all at once, until one fails: the others are not worth their work then."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _blamed(work: Awaitable[T], file: MediaFile) -> T:
    """Several requests may wait for one file, each of which has its own name for it."""
    try:
        return await work
    except BadFile as error:
        raise MediaRefused(file, str(error)) from None


def _jobs(
    forms: Mapping[FileKind, MediaForm], files: Sequence[MediaFile], sources: Sequence[Source]
) -> list[_Job]:
    jobs = []
    for file, source in zip(files, sources, strict=True):
        form = forms[file.modality]
        jobs.append(_Job(form, file, source, source.digest + _how(form, file.is_coarse)))
    return jobs


@lru_cache(maxsize=64)
def _how(form: MediaForm, is_coarse: bool) -> bytes:
    """What processing depends on beside the file."""
    return json.dumps([form.name, form.options(), is_coarse], sort_keys=True).encode()
