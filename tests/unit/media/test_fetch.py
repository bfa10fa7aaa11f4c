"""Images are fetched from allowed hosts alone, at addresses that were checked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpcore
import pytest
from weft.cli.certs import files_of, issue, make_authority
from weft.common.settings import load_settings
from weft.contract.errors import InvalidRequest
from weft.gateway.media.fetch import UrlFetcher
from weft.gateway.media.hosts import HostPatterns, may_connect
from weft.gateway.media.reader import FetchedFiles, MediaReader
from weft.gateway.media.sources import FetchFailed, FetchForbidden, MediaRefused
from weft.gateway.request import MediaFile
from weft.gateway.settings import GatewaySettings

FILE = b"\x89PNG" + bytes(range(256)) * 40
PUBLIC = "93.184.215.14"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(FILE) + FILE
Answer = Callable[[str, asyncio.StreamWriter], Any]


@dataclass
class Site:
    """A server on this machine that answers to any name."""

    port: int
    requests: list[str] = field(default_factory=list)
    """The heads of all requests."""
    names: list[str | None] = field(default_factory=list)
    """Names that clients asked for in TLS."""


@asynccontextmanager
async def site(
    answer: bytes | Answer, context: ssl.SSLContext | None = None
) -> AsyncIterator[Site]:
    made = Site(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            made.requests.append(head)
            if isinstance(answer, bytes):
                writer.write(answer)
            else:
                await answer(head.split()[1], writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    if context is not None:
        context.sni_callback = lambda peer, name, _: made.names.append(name)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


class Names:
    """A resolver. The nth lookup of a name gives its nth addresses, then the last ones."""

    def __init__(self, **addresses: Sequence[Sequence[str]]) -> None:
        self._addresses = {name.replace("_", "."): list(many) for name, many in addresses.items()}
        self.lookups: list[str] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.lookups.append(host)
        known = self._addresses.get(host)
        if known is None:
            raise OSError("no such name")
        return known.pop(0) if len(known) > 1 else known[0]


HERE = Names(images_test=[["127.0.0.1"]], other_test=[["127.0.0.1"]])


def settings_of(**given: Any) -> GatewaySettings:
    flags = ["--model-dir=.", "--decode=127.0.0.1:1"]
    for name, value in given.items():
        flags += [f"--{name.replace('_', '-')}={value}"]
    return load_settings(GatewaySettings, flags, {})


@asynccontextmanager
async def fetching(resolve: Callable[[str, int], Sequence[str]] = HERE, **given: Any) -> Any:
    fetcher = UrlFetcher(settings_of(**given), resolve)
    try:
        yield fetcher
    finally:
        fetcher.close()


async def fetch(fetcher: UrlFetcher, url: str) -> bytes:
    deadline = asyncio.get_running_loop().time() + 60
    return await fetcher.fetch(url, lambda num_bytes: None, deadline=deadline)


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that are connected to. Those of the internet lead to this machine."""
    addresses: list[str] = []

    class Network(httpcore.AnyIOBackend):
        async def connect_tcp(self, host: str, *args: Any, **more: Any) -> Any:
            addresses.append(host)
            return await super().connect_tcp("127.0.0.1", *args, **more)

    monkeypatch.setattr("weft.gateway.media.fetch.httpcore.AnyIOBackend", Network)
    return addresses


async def test_a_file_comes_as_it_is_with_nothing_of_this_machine() -> None:
    async with (
        site(WHOLE) as server,
        fetching(media_private_hosts=f"images.test:{server.port}") as one,
    ):
        assert await fetch(one, f"http://IMAGES.test:{server.port}/a%20b.png?x=1#y") == FILE
        (head,) = server.requests
        assert head.splitlines()[:2] == [
            "GET /a%20b.png?x=1 HTTP/1.1",
            f"Host: images.test:{server.port}",
        ]
        assert {line.split(":")[0] for line in head.splitlines()[1:] if line} == {
            "Host",
            "Accept",
            "Accept-Encoding",
            "User-Agent",
        }
        assert one.num_fetches == {"ok": 1, "forbidden": 0, "failed": 0}


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with (
        site(WHOLE) as server,
        fetching(media_private_hosts=f"images.test:{server.port}") as one,
    ):
        assert await fetch(one, f"http://images.test:{server.port}/") == FILE


async def test_the_address_that_was_checked_is_the_one_that_is_used(dialled: list[str]) -> None:
    names = Names(images_test=[[PUBLIC], ["127.0.0.1"], ["127.0.0.1"]])
    async with site(WHOLE) as server:
        url = f"http://images.test:{server.port}/"
        async with fetching(names, media_url_hosts=f"images.test:{server.port}") as one:
            assert await fetch(one, url) == FILE
            assert (names.lookups, dialled) == (["images.test"], [PUBLIC])
            with pytest.raises(FetchForbidden, match="no address that may be used"):
                await fetch(one, url)
            assert (len(names.lookups), dialled) == (2, [PUBLIC])


async def test_one_bad_address_of_a_name_spoils_all(dialled: list[str]) -> None:
    names = Names(images_test=[[PUBLIC, "10.0.0.1"]])
    async with fetching(names, media_url_hosts="*") as one:
        with pytest.raises(FetchForbidden):
            await fetch(one, "http://images.test/")
    assert dialled == []


async def test_tls_has_the_name_and_checks_it(
    tmp_path: Path, dialled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = make_authority(tmp_path)
    issue(authority, tmp_path, "rest", ["images.test"])
    files = files_of(tmp_path, "rest")
    monkeypatch.setenv("SSL_CERT_FILE", str(files.ca))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    names = Names(images_test=[[PUBLIC]], other_test=[[PUBLIC]])
    async with (
        site(WHOLE, context) as server,
        fetching(names, media_url_hosts=f"*:{server.port}") as one,
    ):
        assert await fetch(one, f"https://images.test:{server.port}/") == FILE
        assert (server.names, dialled) == (["images.test"], [PUBLIC])
        with pytest.raises(FetchFailed, match="ConnectError"):
            await fetch(one, f"https://other.test:{server.port}/")


FORBIDDEN = [
    "http://127.0.0.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://017700000001/",
    "http://127.1/",
    "http://localhost/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:8.8.8.8]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[fe80::1%25eth0]/",
    "http://[2002:7f00:1::]/",
    "http://user:secret@images.test/",
    "http://images.test\\@other.test/",
    "http://images.test:8080/",
    "https://images.test:80/",
    "http://images.test./",
    "http:///a.png",
    "http://",
    "http://images.test:99999/",
    "ftp://images.test/",
    "file:///etc/passwd",
    "http://" + "a" * 9000 + ".test/",
    "http://no.such.name.test/",
]


@pytest.mark.parametrize("url", FORBIDDEN)
async def test_urls_that_are_never_followed(url: str, dialled: list[str]) -> None:
    def names(host: str, port: int) -> Sequence[str]:
        if host.endswith(".test"):
            return HERE(host, port)
        # As a system's resolver reads numbers.
        loop_back = ("2130706433", "0x7f000001", "017700000001", "127.1", "localhost")
        return ["127.0.0.1"] if host in loop_back else [host]

    async with fetching(names, media_url_hosts="*") as one:
        with pytest.raises(FetchForbidden):
            await fetch(one, url)
    assert dialled == []
    assert one.num_fetches["forbidden"] == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://other.test:{port}/",
        "//169.254.169.254/",
        "file:///etc/passwd",
        "http://a:b@images.test:{port}/",
        "\x00",
        "",
    ],
)
async def test_redirects_are_checked_at_each_hop(location: str) -> None:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/":
            there = location.format(port=server.port)
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: {there}\r\n\r\n".encode())
        else:
            writer.write(WHOLE)

    async with (
        site(answer) as server,
        fetching(media_private_hosts=f"images.test:{server.port}") as one,
    ):
        with pytest.raises(FetchFailed):
            await fetch(one, f"http://images.test:{server.port}/")
        assert len(server.requests) <= 4


async def test_a_redirect_of_an_allowed_host_to_a_private_address(dialled: list[str]) -> None:
    names = Names(images_test=[[PUBLIC]], inside_test=[["192.168.0.1"]])
    there = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://inside.test:%d/\r\n\r\n"
    async with (
        site(lambda path, writer: _write(writer, there % server.port)) as server,
        fetching(names, media_url_hosts=f"*:{server.port}") as one,
    ):
        with pytest.raises(FetchForbidden, match=r"inside\.test, which has no address"):
            await fetch(one, f"http://images.test:{server.port}/")
    assert dialled == [PUBLIC]


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)


@pytest.mark.parametrize(("hops", "is_followed"), [(3, True), (4, False)])
async def test_redirects_are_bounded(hops: int, is_followed: bool) -> None:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        left = int(path.strip("/"))
        moved = f"HTTP/1.1 301 Moved\r\nContent-Length: 0\r\nLocation: /{left - 1}\r\n\r\n"
        writer.write(moved.encode() if left else WHOLE)

    async with (
        site(answer) as server,
        fetching(media_private_hosts=f"images.test:{server.port}") as one,
    ):
        url = f"http://images.test:{server.port}/{hops}"
        if is_followed:
            assert await fetch(one, url) == FILE
        else:
            with pytest.raises(FetchFailed, match="more than 3 times"):
                await fetch(one, url)
        assert len(server.requests) == 4


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BAD_ANSWERS = [
    (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
    (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>", "type `text/html`"),
    (HEAD + b"Content-Encoding: gzip\r\n\r\nabc", "compressed"),
    (HEAD + b"Content-Length: 100000\r\n\r\n", "more than 50000 bytes"),
    (HEAD + b"\r\n" + bytes(60_000), "more than 50000 bytes"),
    (CHUNKED + b"ffff\r\n" + bytes(65_535) + b"\r\n0\r\n\r\n", "more than 50000 bytes"),
    (HEAD + b"Content-Length: 100\r\n\r\nabc", "RemoteProtocolError"),
    (HEAD + b"X: " + b"x" * 300_000, "RemoteProtocolError"),
    (b"\x00\x01", "RemoteProtocolError"),
    (b"", "RemoteProtocolError"),
]


@pytest.mark.parametrize(("answer", "problem"), BAD_ANSWERS)
async def test_answers_that_are_no_file(answer: bytes, problem: str) -> None:
    async with site(answer) as server:
        private = f"images.test:{server.port}"
        async with fetching(media_private_hosts=private, max_image_bytes=50_000) as one:
            with pytest.raises(FetchFailed, match=problem):
                await fetch(one, f"http://{private}/")
            assert one.num_fetches == {"ok": 0, "forbidden": 0, "failed": 1}


@pytest.mark.parametrize("begin", [b"", HEAD, HEAD + b"\r\nabc"])
async def test_slow_and_endless_answers_end(begin: bytes) -> None:
    async def drip(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while begin.endswith(b"abc"):
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.05)
        await asyncio.sleep(60)

    async with site(drip) as server:
        private = f"images.test:{server.port}"
        async with fetching(media_private_hosts=private, media_url_timeout_s=0.5) as one:
            with pytest.raises(FetchFailed, match=r"did not arrive within 0\.5 s"):
                await fetch(one, f"http://{private}/")


async def test_nobody_listens() -> None:
    async with site(WHOLE) as server:
        pass
    async with fetching(media_private_hosts=f"images.test:{server.port}") as one:
        with pytest.raises(FetchFailed, match="ConnectError"):
            await fetch(one, f"http://images.test:{server.port}/")


ADDRESSES = {
    "public": f"{PUBLIC} 8.8.8.8 2606:4700::1111 64:ff9b::808:808",
    "private": "10.1.2.3 172.31.0.1 192.168.1.1 127.0.0.1 127.9.9.9 ::1 fd12::1 100.64.0.1 "
    "64:ff9b::a00:1",
    "never": "169.254.169.254 168.63.129.16 100.100.100.200 fd00:ec2::254 fe80::1 224.0.0.1 "
    "255.255.255.255 0.0.0.0 :: ff02::1 240.0.0.1 192.0.2.1 ::ffff:10.0.0.1 ::ffff:8.8.8.8 "
    "2002:a00:1:: 2001:0:1:: 192.88.99.1 x ::7f00:1 64:ff9b:1::a00:1 fe80::1%eth0 "
    "64:ff9b::a9fe:a9fe fec0::1",
}


@pytest.mark.parametrize(
    ("kind", "address"), [(kind, one) for kind, many in ADDRESSES.items() for one in many.split()]
)
def test_addresses(kind: str, address: str) -> None:
    assert may_connect(address, allows_private=False) == (kind == "public")
    assert may_connect(address, allows_private=True) == (kind != "never")


def test_patterns_of_hosts() -> None:
    hosts = HostPatterns(["a.test", "*.b.test", "c.test:8443", "[2606:4700::1111]"])
    allowed = [("a.test", 443), ("x.b.test", 443), ("y.x.b.test", 443), ("c.test", 8443)]
    for host, port in [*allowed, ("2606:4700::1111", 443)]:
        assert hosts.allows(host, port, 443)
    refused = [("b.test", 443), ("xb.test", 443), ("a.test", 8443), ("c.test", 443)]
    for host, port in [*refused, ("a.test.evil.test", 443), ("xa.test", 443)]:
        assert not hosts.allows(host, port, 443)


@pytest.mark.parametrize(
    "flag",
    [
        "--media-url-hosts=https://a.test",
        "--media-url-hosts=a*.test",
        "--media-url-hosts=*.*.test",
        "--media-url-hosts=a.test:0",
        "--media-url-hosts=a.test:70000",
        "--media-url-hosts=*.",
        "--media-private-hosts=*",
        "--media-private-hosts=*.test",
    ],
)
def test_wrong_hosts_are_refused_at_the_start(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(GatewaySettings, ["--model-dir=.", "--decode=127.0.0.1:1", flag], {})
    assert "is not HOST" in capsys.readouterr().err


def image(url: str, *, is_of_tool: bool = False, where: str = "here") -> MediaFile:
    return MediaFile(
        source=url, where=where, kind="image_url", type_param=where, is_of_tool=is_of_tool
    )


async def read(reader: MediaReader, images: Iterable[MediaFile], fetched: FetchedFiles) -> Any:
    deadline = asyncio.get_running_loop().time() + 60
    return await reader.sources(list(images), fetched, deadline=deadline)


async def test_a_requests_urls_are_fetched_once() -> None:
    async with site(WHOLE) as server:
        reader = MediaReader(settings_of(media_private_hosts=f"127.0.0.1:{server.port}"))
        base, counted = f"http://127.0.0.1:{server.port}", []
        fetched = FetchedFiles(counted.append)
        images = [image(f"{base}/a"), image(f"{base}/a"), image(f"{base}/b")]
        for _ in range(2):
            assert [one.data for one in await read(reader, images, fetched)] == [FILE] * 3
        assert len(server.requests) == 2
        assert sum(counted) == 2 * len(FILE)
        await read(reader, images, FetchedFiles(counted.append))
        assert len(server.requests) == 4
        reader.close()


async def test_an_image_of_a_tool_that_is_not_there_stops_no_other() -> None:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE if path == "/a" else b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")

    async with site(answer) as server:
        reader = MediaReader(settings_of(media_private_hosts=f"127.0.0.1:{server.port}"))
        base, fetched = f"http://127.0.0.1:{server.port}", FetchedFiles(lambda num_bytes: None)
        lost = image(f"{base}/b", is_of_tool=True)
        images = [lost, image(f"{base}/a")]
        with pytest.raises(MediaRefused, match="status 404") as caught:
            await read(reader, images, fetched)
        assert caught.value.file is lost
        assert [one.data for one in await read(reader, images[1:], fetched)] == [FILE]
        assert len(server.requests) == 2
        same = replace(lost, is_of_tool=False, where="there")
        with pytest.raises(MediaRefused) as caught:
            await read(reader, [lost, same], FetchedFiles(lambda num_bytes: None))
        assert caught.value.param == "there"
        reader.close()


async def test_fetched_files_count_among_a_requests() -> None:
    async with site(WHOLE) as server:
        host = f"127.0.0.1:{server.port}"
        most = len(FILE) * 2 + 1
        reader = MediaReader(settings_of(media_private_hosts=host, max_request_image_bytes=most))
        urls = [f"http://{host}/{number}" for number in range(3)]
        fetched = FetchedFiles(lambda num_bytes: None)
        assert len(await read(reader, map(image, urls[:2]), fetched)) == 2
        with pytest.raises(InvalidRequest, match=f"more than {most} bytes"):
            await read(reader, map(image, urls), FetchedFiles(lambda num_bytes: None))
        reader.close()
