"""Pauses and changes of weights of a whole mesh, which so looks like one server to a trainer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.contract.codec.pairs import PAUSE_MODES, WEIGHT_STATUS
from weft.contract.errors import PeerUnavailable, WeftError, error_class
from weft.contract.weights import MAX_LIMIT_S, PauseMode, WeightStatus
from weft.gateway.console.relay import OperatorsRelay
from weft.gateway.fleet.fleet import Fleet
from weft.v1 import admin_pb2, weights_pb2

_log = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 10.0
_SHOW_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class MeshWeights:
    """Passes each order to all workers at once, with the operators' token. Each method returns what
    the workers answer, by their ids.

    Raises:
        PeerUnavailable: There is no worker.
        WeftError: What the first worker that did not obey says, with its id. The others have
            obeyed.
    """

    fleet: Fleet
    relay: OperatorsRelay

    async def pause(self, mode: PauseMode, token: str) -> Mapping[str, WeightStatus]:
        request = weights_pb2.PauseRequest(mode=PAUSE_MODES.numbers[mode])
        return await self._on_all("Pause", request, token, MAX_LIMIT_S)

    async def resume(self, token: str) -> Mapping[str, WeightStatus]:
        return await self._on_all("Resume", weights_pb2.ResumeRequest(), token, _SHOW_TIMEOUT_S)

    async def refit(self, folder: str, version: str, token: str) -> Mapping[str, WeightStatus]:
        request = weights_pb2.RefitRequest(folder=folder, version=version)
        return await self._on_all("Refit", request, token, MAX_LIMIT_S)

    async def show(self, token: str, *, packed_digest: bool) -> Mapping[str, WeightStatus]:
        request = weights_pb2.ShowWeightsRequest(packed_digest=packed_digest)
        return await self._on_all("ShowWeights", request, token, _SHOW_TIMEOUT_S)

    async def flush(self, token: str) -> int:
        """Drops cached pages that no request uses; returns how many."""
        request = admin_pb2.FlushCacheRequest()
        answers = await self._call_all("FlushCache", request, token, _FLUSH_TIMEOUT_S)
        return sum(answer.flushed_pages for answer in answers.values())

    async def _on_all(
        self, method: str, request: Any, token: str, timeout_s: float
    ) -> Mapping[str, WeightStatus]:
        answers = await self._call_all(method, request, token, timeout_s)
        decode: Callable[[Any], WeightStatus] = WEIGHT_STATUS.decode
        return {worker: decode(answer.status) for worker, answer in answers.items()}

    async def _call_all(
        self, method: str, request: Any, token: str, timeout_s: float
    ) -> Mapping[str, Any]:
        workers = [one.info.worker_id for one in self.fleet.workers() if one.info is not None]
        if not workers:
            raise PeerUnavailable("there is no worker", stage="weights")
        calls = (self._call(worker, method, request, token, timeout_s) for worker in workers)
        found = await asyncio.gather(*calls, return_exceptions=True)
        answers = dict(zip(workers, found, strict=True))
        for worker, answer in answers.items():
            if isinstance(answer, WeftError):
                _log.warning("a worker did not obey", extra={"worker": worker, "order": method})
                message = f"{worker}: {answer.message}"
                raise error_class(answer.reason)(
                    message, stage="weights", param=answer.param, worker_id=worker
                )
            if isinstance(answer, BaseException):
                raise answer
        return answers

    async def _call(
        self, worker: str, method: str, request: Any, token: str, timeout_s: float
    ) -> Any:
        metadata = (("authorization", f"Bearer {token}"),)
        async with self.relay.reach(worker) as stub:
            return await getattr(stub, method)(request, timeout=timeout_s, metadata=metadata)
