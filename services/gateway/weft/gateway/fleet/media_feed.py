"""Brings media of prompts to one worker, each once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import grpc
from weft.common.media_stream import parts_of
from weft.common.rpc.errors import from_rpc_error
from weft.contract.spans import Media
from weft.v1 import worker_pb2_grpc

_MAX_KNOWN = 4096
"""Media that are remembered as brought. A forgotten one is brought again."""


class MediaFeed:
    """What an incarnation of a worker was brought, as far as it is known. The worker may have
    dropped some since; it then fails the request, and `forget` is called.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> None:
        self._stub = stub
        self._epoch = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def bring(self, media: Sequence[Media], epoch: int, timeout_s: float) -> None:
        """Brings the media that the incarnation `epoch` does not have yet. Raises WeftError if the
        worker does not take them in time.
        """
        if epoch != self._epoch:
            self._epoch, self._known = epoch, OrderedDict()
        lacking = [one for one in media if one.digest not in self._known]
        if not lacking:
            return
        try:
            await self._stub.PutMedia(iter(parts_of(lacking)), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        for one in lacking:
            self._known[one.digest] = None
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def forget(self, media: Iterable[Media]) -> None:
        for one in media:
            self._known.pop(one.digest, None)
