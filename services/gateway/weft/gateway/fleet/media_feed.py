"""Brings media of prompts to one worker, each once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc
from weft.common.media_stream import parts_of
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import DeadlineExceeded
from weft.contract.spans import Media
from weft.v1 import worker_pb2_grpc

_MAX_KNOWN = 4096
"""Media that are remembered as brought. A forgotten one is brought again."""


@dataclass(slots=True)
class _Call:
    """A call under way that brings some media, for which several requests may wait."""

    task: asyncio.Task[None]
    num_bytes: int
    num_waiters: int = 0


class MediaFeed:
    """What an incarnation of a worker was brought, as far as it is known. The worker may have
    dropped some since; it then fails the request, and `forget` is called.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        self._stub = stub
        self._epoch = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._coming: dict[bytes, _Call] = {}

    @property
    def num_coming_bytes(self) -> int:
        """Bytes of the media that are on their way now."""
        calls = {id(call): call for call in self._coming.values()}
        return sum(call.num_bytes for call in calls.values())

    async def bring(self, media: Sequence[Media], epoch: int, timeout_s: float) -> None:
        """Brings the media that the incarnation `epoch` does not have yet, and waits for those
        among them that another call brings. Raises WeftError if the worker does not take them in
        time.
        """
        if epoch != self._epoch:
            self._epoch, self._known, self._coming = epoch, OrderedDict(), {}
        lacking = [one for one in media if one.digest not in self._known]
        new = [one for one in lacking if one.digest not in self._coming]
        if new:
            task = asyncio.create_task(self._put(new, epoch, timeout_s))
            call = _Call(task, sum(len(one.data) for one in new))
            self._coming.update({one.digest: call for one in new})
            task.add_done_callback(self._landed)
        calls = {id(call): call for call in (self._coming[one.digest] for one in lacking)}
        await asyncio.gather(*(self._wait(call, timeout_s) for call in calls.values()))

    async def _wait(self, call: _Call, timeout_s: float) -> None:
        call.num_waiters += 1
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(call.task)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the worker did not take the prompt's media in {timeout_s:.1f} s", stage="route"
            ) from None
        finally:
            call.num_waiters -= 1
            if not call.num_waiters and not call.task.done():
                # All have left. Whoever comes now begins anew.
                self._drop(call.task)
                call.task.cancel()

    async def _put(self, media: Sequence[Media], epoch: int, timeout_s: float) -> None:
        try:
            await self._stub.PutMedia(iter(parts_of(media)), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if epoch != self._epoch:
            return
        self._known.update({one.digest: None for one in media})
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._drop(task)
        # Reads the error, since all that waited may have left.
        if not task.cancelled():
            task.exception()

    def _drop(self, task: asyncio.Task[None]) -> None:
        self._coming = {key: call for key, call in self._coming.items() if call.task is not task}

    def forget(self, media: Iterable[Media]) -> None:
        for one in media:
            self._known.pop(one.digest, None)
