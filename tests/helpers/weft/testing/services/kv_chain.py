"""Chains of random pages, the calls that carry them to a KV store, and back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from numpy.typing import NDArray
from weft.common.rpc.channel import CHANNEL_OPTIONS
from weft.contract.keys import PageKeys
from weft.pages.transfer.digest import digest_pages_numpy
from weft.v1 import common_pb2, kv_pb2, kvstore_pb2, kvstore_pb2_grpc

PAGE_SIZE = 4
DATA_BYTES = 1 << 20


@dataclass(slots=True)
class Chain:
    """A prompt of whole pages and the names of its pages."""

    num_pages: int
    namespace: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    tokens: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.tokens:
            rng = np.random.default_rng()
            self.tokens = rng.integers(0, 50_000, self.num_pages * PAGE_SIZE).tolist()
        self.keys = PageKeys(self.namespace, PAGE_SIZE).upto(self.tokens, self.num_pages)


@dataclass(slots=True)
class Filled:
    """Result of one Fill."""

    events: list[kv_pb2.FillEvent]
    pages: dict[int, bytearray] = field(default_factory=dict)
    """Content by page index, where it came as data."""
    digests: dict[int, int] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """Kinds of the events, without repetitions in a row."""
        kinds = [str(event.WhichOneof("event")) for event in self.events]
        return [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]

    @property
    def last(self) -> kv_pb2.FillEvent:
        """The event that ended it."""
        return self.events[-1]


class StoreCaller:
    """A client of one store; a context manager."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        self.epoch = 0

    async def __aenter__(self) -> StoreCaller:
        info = await self.stub.GetStoreInfo(kvstore_pb2.GetStoreInfoRequest(), timeout=60)
        self.epoch = info.epoch
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    async def look_up(self, chain: Chain, first: int = 0) -> int:
        """Leading pages from page `first` on that are held."""
        request = kvstore_pb2.LookupRequest(namespace=chain.namespace, keys=chain.keys[first:])
        response = await self.stub.Lookup(request, timeout=60)
        assert response.epoch == self.epoch
        return int(response.num_pages)

    async def stats(self) -> Any:
        """Stats, after the check that every page is in one state."""
        stats = await self.stub.Stats(kvstore_pb2.StatsRequest(), timeout=60)
        counted = stats.free_pages + stats.cached_pages + stats.pinned_pages
        assert counted + stats.quarantined_pages == stats.total_pages, stats
        return stats

    async def settled(self, timeout_s: float = 60.0) -> Any:
        """Stats once nothing is pinned, quarantined or in work."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            stats = await self.stats()
            in_work = stats.counters["open_puts"] + stats.counters["open_fills"]
            if not (stats.pinned_pages or stats.quarantined_pages or in_work):
                return stats
            assert asyncio.get_running_loop().time() < deadline, stats
            await asyncio.sleep(0.02)

    async def put(
        self,
        chain: Chain,
        indices: Sequence[int],
        digests: Sequence[int],
        target: dict[str, Any],
        pages: Sequence[int],
        **changes: Any,
    ) -> Any:
        """Offers pages of a NIXL process's pool."""
        header = put_header(chain, indices, digests, pages, target["page_bytes"], **changes)
        header.source.CopyFrom(nixl_target(target))
        return await self.stub.Put(header, timeout=60)

    async def put_data(
        self,
        chain: Chain,
        indices: Sequence[int],
        contents: NDArray[np.uint8],
        digests: Sequence[int] | None = None,
        **changes: Any,
    ) -> Any:
        """Offers pages as bytes: row i of `contents` is page `indices[i]`."""
        if digests is None:
            digests = digest_pages_numpy(contents, range(len(contents))).tolist()
        header = put_header(
            chain, indices, digests, range(len(indices)), contents.shape[1], **changes
        )
        answer = await self.stub.PutData(data_parts(header, contents), timeout=60)
        return answer.result

    async def fill(
        self,
        chain: Chain,
        start: int = 0,
        end: int | None = None,
        *,
        target: dict[str, Any] | None = None,
        pages: Sequence[int] | None = None,
        **changes: Any,
    ) -> Filled:
        """Asks for pages [start, end) of a chain; over NIXL into `pages` of a process's pool."""
        handle = fill_handle(chain, start, end, self.epoch, target=target, pages=pages, **changes)
        call = await self.open_fill(handle)
        filled = Filled([])
        while isinstance(event := await call.read(), kv_pb2.FillEvent):
            take_event(filled, event)
        return filled

    async def open_fill(self, handle: kv_pb2.KvHandle) -> Any:
        """A Fill that has begun; to be read, written to or cancelled."""
        call = self.stub.Fill(timeout=60)
        await call.write(kv_pb2.FillControl(start=kv_pb2.FillControl.Start(handle=handle)))
        return call


def take_event(filled: Filled, event: kv_pb2.FillEvent) -> None:
    """Adds an event and what it brings."""
    kind = event.WhichOneof("event")
    if kind == "data":
        data = event.data
        page = filled.pages.setdefault(data.page_start_token // PAGE_SIZE, bytearray())
        assert len(page) == data.offset
        page += data.data
        event.data.data = b""
    elif kind == "written":
        first = event.written.start_token // PAGE_SIZE
        filled.digests |= {first + i: digest for i, digest in enumerate(event.written.digests)}
    filled.events.append(event)


def fill_handle(
    chain: Chain,
    start: int,
    end: int | None,
    epoch: int,
    *,
    target: dict[str, Any] | None = None,
    pages: Sequence[int] | None = None,
    **changes: Any,
) -> kv_pb2.KvHandle:
    """A handle for pages [start, end) of a chain."""
    end = chain.num_pages if end is None else end
    pages = range(end - start) if pages is None else pages
    handle = kv_pb2.KvHandle(
        owner_id="test-worker",
        owner_epoch=7,
        lease_id=secrets.token_bytes(16),
        lease_duration=Duration(seconds=60),
        namespace=chain.namespace,
        planes=["target"],
        page_size=PAGE_SIZE,
        tokens=common_pb2.TokenIds(ids=chain.tokens[: end * PAGE_SIZE]),
        start_token=start * PAGE_SIZE,
        end_token=end * PAGE_SIZE,
        page_runs=[kv_pb2.PageRun(first_page=page, num_pages=1) for page in pages],
        filler_epoch=epoch,
    )
    if target is not None:
        handle.nixl.CopyFrom(nixl_target(target))
    for name, value in changes.items():
        if isinstance(value, Duration):
            getattr(handle, name).CopyFrom(value)
        else:
            setattr(handle, name, value)
    return handle


def put_header(
    chain: Chain,
    indices: Sequence[int],
    digests: Sequence[int],
    pages: Sequence[int],
    page_bytes: int,
    **changes: Any,
) -> kvstore_pb2.PutRequest:
    """A put of pages `indices` of a chain, which lie at `pages` of the source."""
    header = kvstore_pb2.PutRequest(
        source_id="test-worker",
        source_epoch=7,
        namespace=chain.namespace,
        page_bytes=page_bytes,
        pages=[
            kvstore_pb2.PutPage(
                key=chain.keys[index],
                digest=digest,
                page=page,
                parent_key=chain.keys[index - 1] if index else b"",
            )
            for index, digest, page in zip(indices, digests, pages, strict=True)
        ],
    )
    for name, value in changes.items():
        setattr(header, name, value)
    return header


async def data_parts(
    header: kvstore_pb2.PutRequest, contents: NDArray[np.uint8]
) -> AsyncIterator[kvstore_pb2.PutDataRequest]:
    """The messages of a PutData call."""
    yield kvstore_pb2.PutDataRequest(header=header)
    for index, content in enumerate(contents):
        for offset in range(0, len(content), DATA_BYTES):
            data = content[offset : offset + DATA_BYTES].tobytes()
            yield kvstore_pb2.PutDataRequest(index=index, offset=offset, data=data)


def nixl_target(target: dict[str, Any]) -> kv_pb2.NixlTarget:
    """The target that a `NixlProcess` told, for the wire."""
    binary = ("agent_metadata", "agent_metadata_digest")
    return kv_pb2.NixlTarget(
        **{k: bytes.fromhex(v) if k in binary else v for k, v in target.items()}
    )


def random_pages(num_pages: int, page_bytes: int) -> NDArray[np.uint8]:
    """Fresh random bytes, uint8 `[num_pages, page_bytes]`."""
    return np.random.default_rng().integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)
