"""Fetches images by their URLs, from hosts that the operator allows. Nothing else in the gateway
follows a client's URL.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpcore
import httpx
from weft.gateway.admission.admission import Admission
from weft.gateway.media.hosts import HostPatterns, is_host, may_connect
from weft.gateway.media.sources import FetchFailed, FetchForbidden
from weft.gateway.settings import GatewaySettings

_MAX_REDIRECTS = 3
_MAX_URL_CHARS = 8192
_MAX_RUNNING = 32
_MAX_ADDRESSES = 4
_CONNECT_S = 5.0
_RESOLVER_THREADS = 8
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_TYPES = ("image/", "application/octet-stream", "binary/octet-stream")

Resolve = Callable[[str, int], Sequence[str]]
Take = Callable[[int], None]
"""Counts bytes that have arrived; what it raises ends the fetch."""


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host. Raises OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class UrlFetcher:
    """Fetches files for all models of a gateway. Belongs to the event loop."""

    def __init__(self, settings: GatewaySettings, resolve: Resolve = resolve) -> None:
        self._public = HostPatterns(settings.media_url_hosts)
        self._private = HostPatterns(settings.media_private_hosts, has_wildcards=False)
        self._timeout_s = settings.media_url_timeout_s
        self._max_bytes = settings.max_image_bytes
        self._admission = Admission(_MAX_RUNNING, settings.max_queued_media)
        self._resolve = resolve
        self._threads: ThreadPoolExecutor | None = None
        self._context: ssl.SSLContext | None = None
        self.num_fetches: dict[str, int] = {"ok": 0, "forbidden": 0, "failed": 0}
        """Fetches so far, by how they ended."""

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, url: str, take: Take, *, deadline: float, tenant: str = "") -> bytes:
        """The file of a URL. `deadline`, in the event loop's time, bounds the wait for a place.

        Raises:
            FetchFailed: The URL is not allowed, or gave no file within the bounds.
            Overloaded: Too many fetches wait.
            DeadlineExceeded: No place became free in time.
        """
        try:
            target = self._checked(url)
            with await self._admission.admit(1, deadline, tenant):
                data = await self._fetch(target, take)
        except FetchForbidden:
            self.num_fetches["forbidden"] += 1
            raise
        except FetchFailed:
            self.num_fetches["failed"] += 1
            raise
        self.num_fetches["ok"] += 1
        return data

    async def _fetch(self, url: httpx.URL, take: Take) -> bytes:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_RESOLVER_THREADS, thread_name_prefix="resolve")
            self._context = await asyncio.to_thread(httpx.create_ssl_context)
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._context,
            network_backend=_CheckedNetwork(self._addresses),
        )
        try:
            async with asyncio.timeout(self._timeout_s), pool:
                return await self._follow(pool, url, take)
        except TimeoutError:
            raise FetchFailed(f"did not arrive within {self._timeout_s:g} s") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise FetchFailed(f"was not fetched: {type(error).__name__}") from None

    async def _follow(
        self, pool: httpcore.AsyncConnectionPool, url: httpx.URL, take: Take
    ) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            target = httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            )
            headers = [
                (b"Host", url.netloc),
                (b"Accept", b"image/*"),
                (b"Accept-Encoding", b"identity"),
                (b"User-Agent", b"weft"),
            ]
            async with pool.stream("GET", target, headers=headers) as response:
                fields = httpx.Headers(response.headers)
                if response.status not in _REDIRECTS:
                    return await self._read(response, fields, take)
            url = self._next(url, fields.get("location", ""))
        raise FetchFailed(f"leads on more than {_MAX_REDIRECTS} times")

    async def _read(self, response: httpcore.Response, fields: httpx.Headers, take: Take) -> bytes:
        if response.status != 200:
            raise FetchFailed(f"was answered with status {response.status}")
        kind = fields.get("content-type", _TYPES[0]).strip().lower()
        if not kind.startswith(_TYPES):
            raise FetchFailed(f"was answered with content of type `{quote(kind, '/;=+ ')[:40]}`")
        if fields.get("content-encoding", "identity").strip().lower() != "identity":
            raise FetchFailed("was answered with compressed content, which was not asked for")
        length = fields.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        num_bytes = 0
        async for part in response.aiter_stream():
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            take(len(part))
            parts.append(part)
        return b"".join(parts)

    def _too_large(self) -> FetchFailed:
        return FetchFailed(f"has more than {self._max_bytes} bytes")

    def _next(self, url: httpx.URL, location: str) -> httpx.URL:
        try:
            target = self._checked(str(url.join(location)))
        except httpx.InvalidURL:
            raise FetchForbidden("leads on to what is no URL") from None
        except FetchForbidden as error:
            raise FetchForbidden(f"leads on to a URL that {error}") from None
        if url.scheme == "https" != target.scheme:
            raise FetchForbidden("leads on from https to http")
        return target

    def _checked(self, text: str) -> httpx.URL:
        if len(text) > _MAX_URL_CHARS:
            raise FetchForbidden(f"has more than {_MAX_URL_CHARS} characters")
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL:
            raise FetchForbidden("is no valid URL") from None
        host = url.raw_host.decode("ascii")
        default_port = _PORTS.get(url.scheme)
        if default_port is None or not is_host(host):
            raise FetchForbidden("is no URL of http or https with a host")
        if url.userinfo:
            raise FetchForbidden("has a user or password; give one without")
        port = default_port if url.port is None else url.port
        if not any(one.allows(host, port, default_port) for one in (self._public, self._private)):
            raise FetchForbidden(
                f"is of {host[:100]}, port {port}, which is not among --media-url-hosts"
            )
        return url

    async def _addresses(self, host: str, port: int) -> list[str]:
        """Addresses of a host, all of which may be connected to."""
        assert self._threads is not None
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, self._resolve, host, port)
        except (OSError, UnicodeError):
            found = ()
        default_ports = _PORTS.values()
        allows_private = any(self._private.allows(host, port, one) for one in default_ports)
        if not found or not all(may_connect(one, allows_private=allows_private) for one in found):
            # Nobody learns which names a private network has.
            raise FetchForbidden(f"is of {host[:100]}, which has no address that may be used")
        return list(found[:_MAX_ADDRESSES])


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, never to a name that is resolved once more."""

    def __init__(self, addresses: Callable[[str, int], Awaitable[list[str]]]) -> None:
        self._addresses = addresses
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        error: Exception | None = None
        for address in await self._addresses(host, port):
            try:
                return await self._network.connect_tcp(
                    address, port, _CONNECT_S, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as one:
                error = one
        raise error or httpcore.ConnectError
