"""Turns the images of requests into media: bounds, memo, processes."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from weft.contract.errors import Overloaded
from weft.contract.spans import Media
from weft.gateway.media.forms import ImageForm
from weft.gateway.media.pool import MediaPool
from weft.gateway.media.sources import (
    FetchFailed,
    ImageRefused,
    Source,
    SourceLimits,
    check_number,
    read_sources,
    too_large,
    url_of,
)
from weft.gateway.request import ImageFile
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
    "is a URL, and this gateway fetches none (--media-url-hosts); send the image itself as "
    "data:image/...;base64,..."
)


class _BadFile(Exception):
    """A file that its media process refuses."""


class ProcessedImage(NamedTuple):
    """An image as a model's encoder takes it."""

    height: int
    """Of the upright image, in pixels."""
    width: int
    media: tuple[Media, ...]

    @property
    def num_bytes(self) -> int:
        """Memory that it is counted as."""
        return _ENTRY_BYTES + sum(len(one.data) for one in self.media)


@dataclass(slots=True)
class _Flight:
    """The work on one image, for which several requests may wait."""

    task: asyncio.Task[ProcessedImage]
    num_waiters: int = 0


class FetchedFiles:
    """What a request's URLs gave: each is fetched once."""

    def __init__(self, count: Callable[[int], None]) -> None:
        """`count` gets the number of bytes that arrive; what it raises fails the request."""
        self.by_url: dict[str, bytes] = {}
        self.problems: dict[str, str] = {}
        self.num_bytes = 0
        self.count = count


class ImageReader:
    """Reads images for all models of a gateway. Belongs to the event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.limits = SourceLimits(
            settings.max_images, settings.max_request_image_bytes, settings.max_image_bytes
        )
        """Bounds of a request's images."""
        self._max_pixels = settings.max_image_pixels
        self._max_running = settings.media_processes
        self.pool = MediaPool(
            settings.media_processes, settings.max_queued_media, settings.media_timeout_s
        )
        """The processes that do the work."""
        self.memo = MediaMemo(settings.media_memo_bytes)
        """Images that were processed before."""
        self.fetcher: UrlFetcher | None = None
        """Fetches images that requests have as URLs; None: such are refused."""
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

    def close(self) -> None:
        """Ends the processes."""
        if self.fetcher is not None:
            self.fetcher.close()
        self.pool.close()

    async def sources(
        self,
        images: Sequence[ImageFile],
        fetched: FetchedFiles,
        *,
        deadline: float,
        tenant: str = "",
    ) -> list[Source]:
        """The files of images. `deadline` bounds the wait for a place to fetch one.

        Raises:
            ImageRefused: One is no file, or its URL gave none.
            InvalidRequest: There are too many or too large ones.
            Overloaded: Too many fetches wait.
            DeadlineExceeded: No place became free in time.
        """
        check_number(images, self.limits.max_files)
        await self._fetch(images, fetched, deadline, tenant)
        return await asyncio.to_thread(read_sources, images, self.limits, fetched.by_url)

    async def _fetch(
        self, images: Sequence[ImageFile], fetched: FetchedFiles, deadline: float, tenant: str
    ) -> None:
        by_url: dict[str, list[ImageFile]] = {}
        for image in images:
            if url := url_of(image):
                by_url.setdefault(url, []).append(image)
        places = asyncio.Semaphore(_FETCHES)

        async def one(url: str, images: Sequence[ImageFile]) -> None:
            def count(num_bytes: int) -> None:
                fetched.count(num_bytes)
                fetched.num_bytes += num_bytes
                if fetched.num_bytes > self.limits.max_bytes:
                    raise too_large(images[0], self.limits.max_bytes)

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
            for image in images:
                # The request fails. Where tools have returned the images, it goes on without.
                if url in fetched.problems and not image.is_of_tool:
                    raise ImageRefused(image, fetched.problems[url])

        await _all(one(url, those) for url, those in by_url.items())
        for url, those in by_url.items():
            if url in fetched.problems:
                raise ImageRefused(those[0], fetched.problems[url])

    async def sizes(
        self,
        form: ImageForm,
        images: Sequence[ImageFile],
        sources: Sequence[Source],
        *,
        deadline: float,
        tenant: str = "",
    ) -> list[tuple[int, int]]:
        """Height and width of images, by their headers alone. Raises as `process` does."""

        async def size(image: ImageFile, source: Source) -> tuple[int, int]:
            known = self.memo.get(_key(form, image, source))
            if known is not None:
                return known.height, known.width
            work = self._run(form, image, source, deadline, tenant, measures=True)
            reply, _ = await _blamed(work, image)
            height, width = reply["size"]
            return height, width

        return await self._each(size, images, sources)

    async def process(
        self,
        form: ImageForm,
        images: Sequence[ImageFile],
        sources: Sequence[Source],
        *,
        deadline: float,
        tenant: str = "",
    ) -> list[ProcessedImage]:
        """Decodes and processes images. `deadline`, in the event loop's time, bounds the wait for
        a process.

        Raises:
            ImageRefused: A file is no image, is damaged or has too many pixels.
            Overloaded: Too many images wait.
            DeadlineExceeded: An image took too long, or no process became free in time.
            PeerUnavailable: A process died.
        """

        async def one(image: ImageFile, source: Source) -> ProcessedImage:
            key = _key(form, image, source)
            known = self.memo.get(key)
            self.num_repeated += known is not None
            self.num_images += 1
            if known is not None:
                return known
            flight = self._flights.get(key)
            if flight is None:
                work = self._process(form, image, source, deadline, tenant)
                flight = self._flights[key] = _Flight(asyncio.create_task(work))
                flight.task.add_done_callback(lambda done: self._landed(key, done))
            flight.num_waiters += 1
            try:
                return await _blamed(asyncio.shield(flight.task), image)
            finally:
                flight.num_waiters -= 1
                if not flight.num_waiters and not flight.task.done():
                    # All have left. Whoever comes now begins anew.
                    del self._flights[key]
                    flight.task.cancel()

        return await self._each(one, images, sources)

    async def _each(
        self,
        work: Callable[[ImageFile, Source], Awaitable[T]],
        images: Sequence[ImageFile],
        sources: Sequence[Source],
    ) -> list[T]:
        """A request has no more jobs in the queue than there are processes."""
        places = asyncio.Semaphore(self._max_running)

        async def placed(image: ImageFile, source: Source) -> T:
            async with places:
                return await work(image, source)

        pairs = zip(images, sources, strict=True)
        return await _all(placed(image, source) for image, source in pairs)

    def _landed(self, key: bytes, flight: asyncio.Task[ProcessedImage]) -> None:
        known = self._flights.get(key)
        if known is not None and known.task is flight:
            del self._flights[key]
        # Reads the error, since all that waited may have left.
        if not flight.cancelled() and flight.exception() is None:
            self.memo.put(key, flight.result())

    async def _process(
        self, form: ImageForm, image: ImageFile, source: Source, deadline: float, tenant: str
    ) -> ProcessedImage:
        reply, data = await self._run(form, image, source, deadline, tenant, measures=False)
        height, width = reply["size"]
        media, at, view = [], 0, memoryview(data)
        for told in reply["media"]:
            shape = tuple(told["shape"])
            end = at + shape[0] * shape[1] * shape[2]
            digest, content = bytes.fromhex(told["digest"]), bytes(view[at:end])
            media.append(
                Media(
                    kind="image",
                    processor=told["processor"],
                    shape=shape,
                    data=content,
                    digest=digest,
                )
            )
            at = end
        return ProcessedImage(height, width, tuple(media))

    async def _run(
        self,
        form: ImageForm,
        image: ImageFile,
        source: Source,
        deadline: float,
        tenant: str,
        *,
        measures: bool,
    ) -> tuple[dict[str, Any], bytearray]:
        head = {
            "form": form.name,
            "options": form.options(),
            "is_coarse": image.is_coarse,
            "max_pixels": self._max_pixels,
            "measures": measures,
            "is_base64": source.is_base64,
        }
        reply, data = await self.pool.run(head, source.data, deadline=deadline, tenant=tenant)
        if "bad" in reply:
            raise _BadFile(reply["bad"])
        return reply, data


class HeldMedia:
    """Counts what requests hold of their images until they end."""

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
                f"images of requests hold {self.num_bytes} bytes already (the bound is "
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
    """Processed images by what they were made of; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> ProcessedImage | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, image: ProcessedImage) -> None:
        """Keeps an image, unless it is larger than the memo."""
        if image.num_bytes > self._max_bytes or key in self._entries:
            return
        self._entries[key] = image
        self.num_bytes += image.num_bytes
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


async def _blamed(work: Awaitable[T], image: ImageFile) -> T:
    """Several requests may wait for one file, each of which has its own name for it."""
    try:
        return await work
    except _BadFile as error:
        raise ImageRefused(image, str(error)) from None


def _key(form: ImageForm, image: ImageFile, source: Source) -> bytes:
    how = json.dumps([form.name, form.options(), image.is_coarse], sort_keys=True)
    return source.digest + how.encode()
