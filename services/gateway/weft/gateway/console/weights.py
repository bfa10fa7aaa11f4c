"""Pauses and changes of weights of a whole mesh, which so looks like one server to a trainer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.contract.codec.pairs import (
    EXPERT_STATE,
    PAUSE_MODES,
    SENT_TENSOR,
    WEIGHT_GROUP,
    WEIGHT_STATUS,
)
from weft.contract.errors import InvalidRequest, PeerUnavailable, WeftError, error_class
from weft.contract.experts import ExpertAction, ExpertState
from weft.contract.weights import MAX_LIMIT_S, PauseMode, SentTensor, WeightGroup, WeightStatus
from weft.gateway.console.relay import OperatorsRelay
from weft.gateway.fleet.fleet import Fleet
from weft.v1 import admin_pb2, experts_pb2, weights_pb2, worker_pb2

_log = logging.getLogger(__name__)

_UPDATES = ("Refit", "ReceiveWeights", "EndRefit")
_ABOUT_EXPERTS: Mapping[ExpertAction, tuple[str, Callable[[], Any]]] = {
    "start": ("StartExpertCounts", experts_pb2.StartExpertCountsRequest),
    "stop": ("StopExpertCounts", experts_pb2.StopExpertCountsRequest),
    "dump": ("ReadExpertCounts", experts_pb2.ReadExpertCountsRequest),
    "balance": ("BalanceExperts", experts_pb2.BalanceExpertsRequest),
}
_FLUSH_TIMEOUT_S = 10.0
_SHOW_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class MeshWeights:
    """Passes each order to all workers at once, with the operators' token. Each method returns what
    the workers answer, by their ids.

    Raises:
        InvalidRequest: The order is to change or drop weights, and there are several models.
        PeerUnavailable: There is no worker.
        WeftError: What the first worker that did not obey says, with its id. The others have
            obeyed. After an update only those that have its weights get requests.
    """

    fleet: Fleet
    relay: OperatorsRelay

    async def pause(self, mode: PauseMode, token: str) -> Mapping[str, WeightStatus]:
        request = weights_pb2.PauseRequest(mode=PAUSE_MODES.numbers[mode])
        return await self._on_all("Pause", request, token, MAX_LIMIT_S)

    async def resume(self, token: str) -> Mapping[str, WeightStatus]:
        return await self._on_all("Resume", weights_pb2.ResumeRequest(), token, _SHOW_TIMEOUT_S)

    async def refit(self, folder: str, version: str, token: str) -> Mapping[str, WeightStatus]:
        self.check_one_model()
        request = weights_pb2.RefitRequest(folder=folder, version=version)
        return await self._on_all("Refit", request, token, MAX_LIMIT_S)

    async def copy(self, worker_id: str, version: str, token: str) -> Mapping[str, WeightStatus]:
        """Copies one worker's weights to all others of its model. Raises InvalidRequest if there is
        no such worker, or no other.
        """
        workers = {one.info.worker_id: one for one in self.fleet.workers() if one.info is not None}
        source = workers.get(worker_id)
        if source is None:
            known = ", ".join(sorted(workers))
            message = f"worker: there is no {worker_id!r}, but {known}"
            raise InvalidRequest(message, stage="weights", param="worker")
        others = [
            name for name, one in workers.items() if one is not source and one.model == source.model
        ]
        if not others:
            message = f"worker: {worker_id} is the only one of its model"
            raise InvalidRequest(message, stage="weights", param="worker")
        request = weights_pb2.RefitRequest(peer=source.endpoint.address, version=version)
        orders = dict.fromkeys(others, request)
        return _statuses(await self._call_each("Refit", orders, token, MAX_LIMIT_S))

    async def experts(self, action: ExpertAction, token: str) -> Mapping[str, ExpertState]:
        """Counts experts, tells what was counted, or balances them by that."""
        method, request = _ABOUT_EXPERTS[action]
        limit_s = MAX_LIMIT_S if action == "balance" else _SHOW_TIMEOUT_S
        found = await self._call_all(method, request(), token, limit_s)
        decode: Callable[[Any], ExpertState] = EXPERT_STATE.decode
        return {worker: decode(answer.state) for worker, answer in found.items()}

    def loads(self) -> Mapping[str, worker_pb2.WatchLoadResponse]:
        """Each worker's newest report; known without asking."""
        found = [(one.info, one.report) for one in self.fleet.workers()]
        return {info.worker_id: report for info, report in found if info and report}

    async def join(self, group: WeightGroup, token: str) -> Mapping[str, WeightStatus]:
        """Joins a trainer's group with all ranks of all workers, the first as `group.rank`. Raises
        InvalidRequest if the group has too few places.
        """
        self.check_one_model()
        known = await self.show(token)
        total = sum(status.num_ranks for status in known.values())
        if group.rank + total > group.size:
            raise InvalidRequest(
                f"world_size: {group.size} with rank_offset {group.rank} leaves "
                f"{group.size - group.rank} places for the mesh's {total} ranks "
                "(GET /get_world_size)",
                stage="weights",
                param="world_size",
            )
        requests, rank = dict[str, Any](), group.rank
        for worker in sorted(known):
            own = WEIGHT_GROUP.encode(replace(group, rank=rank))
            requests[worker] = weights_pb2.JoinWeightGroupRequest(group=own)
            rank += known[worker].num_ranks
        return _statuses(await self._call_each("JoinWeightGroup", requests, token, MAX_LIMIT_S))

    async def leave(self, name: str, token: str) -> Mapping[str, WeightStatus]:
        request = weights_pb2.LeaveWeightGroupRequest(name=name)
        return await self._on_all("LeaveWeightGroup", request, token, _SHOW_TIMEOUT_S)

    async def begin(self, token: str) -> Mapping[str, WeightStatus]:
        self.check_one_model()
        return await self._on_all("BeginRefit", weights_pb2.BeginRefitRequest(), token, MAX_LIMIT_S)

    async def receive(
        self,
        group_name: str,
        tensors: Sequence[SentTensor],
        token: str,
        *,
        packed_bytes: int | None = None,
        version: str = "",
    ) -> Mapping[str, WeightStatus]:
        self.check_one_model()
        request = weights_pb2.ReceiveWeightsRequest(
            group_name=group_name,
            tensors=[SENT_TENSOR.plain(one) for one in tensors],
            packed_bytes=packed_bytes,
            version=version,
        )
        return await self._on_all("ReceiveWeights", request, token, MAX_LIMIT_S)

    async def end(self, version: str, token: str) -> Mapping[str, WeightStatus]:
        self.check_one_model()
        request = weights_pb2.EndRefitRequest(version=version)
        return await self._on_all("EndRefit", request, token, MAX_LIMIT_S)

    async def sleep(
        self, level: int, tags: Sequence[str], mode: PauseMode, token: str
    ) -> Mapping[str, WeightStatus]:
        if level > 1:
            self.check_one_model()
        numbers = PAUSE_MODES.numbers
        request = weights_pb2.SleepRequest(level=level, tags=tags, mode=numbers[mode])
        return await self._on_all("Sleep", request, token, MAX_LIMIT_S)

    async def wake(self, tags: Sequence[str], token: str) -> Mapping[str, WeightStatus]:
        request = weights_pb2.WakeRequest(tags=tags)
        return await self._on_all("Wake", request, token, MAX_LIMIT_S)

    async def show(self, token: str, *, packed_digest: bool = False) -> Mapping[str, WeightStatus]:
        request = weights_pb2.ShowWeightsRequest(packed_digest=packed_digest)
        return await self._on_all("ShowWeights", request, token, _SHOW_TIMEOUT_S)

    async def flush(self, token: str) -> int:
        """Drops cached pages that no request uses; returns how many."""
        request = admin_pb2.FlushCacheRequest()
        answers = await self._call_all("FlushCache", request, token, _FLUSH_TIMEOUT_S)
        return sum(answer.flushed_pages for answer in answers.values())

    def check_one_model(self) -> None:
        """Raises InvalidRequest if there are several models, since the workers of all would take
        the same weights, or drop theirs.
        """
        if len(models := self.fleet.models) > 1:
            names = ", ".join(f"`{name}`" for name in models)
            raise InvalidRequest(
                f"this gateway serves {names}, and weights are changed for all of its workers: "
                "serve the model that is trained by a mesh of its own",
                stage="weights",
            )

    async def _on_all(
        self, method: str, request: Any, token: str, timeout_s: float
    ) -> Mapping[str, WeightStatus]:
        return _statuses(await self._call_all(method, request, token, timeout_s))

    async def _call_all(
        self, method: str, request: Any, token: str, timeout_s: float
    ) -> Mapping[str, Any]:
        workers = [one.info.worker_id for one in self.fleet.workers() if one.info is not None]
        if not workers:
            raise PeerUnavailable("there is no worker", stage="weights")
        return await self._call_each(method, dict.fromkeys(workers, request), token, timeout_s)

    async def _call_each(
        self, method: str, requests: Mapping[str, Any], token: str, timeout_s: float
    ) -> Mapping[str, Any]:
        calls = (
            self._call(worker, method, request, token, timeout_s)
            for worker, request in requests.items()
        )
        found = await asyncio.gather(*calls, return_exceptions=True)
        answers = dict(zip(requests, found, strict=True))
        if method in _UPDATES:
            self._note(answers)
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

    def _note(self, answers: Mapping[str, Any]) -> None:
        """Notes who has ended an update."""
        digests = {
            worker: bytes(answer.status.model_digest)
            for worker, answer in answers.items()
            if not isinstance(answer, BaseException) and answer.status.state == "ready"
        }
        models = {one.info.worker_id: one.model for one in self.fleet.workers() if one.info}
        for model in set(models.values()):
            own = {worker: digest for worker, digest in digests.items() if models[worker] == model}
            self.fleet.versions.update(model, own)

    async def _call(
        self, worker: str, method: str, request: Any, token: str, timeout_s: float
    ) -> Any:
        metadata = (("authorization", f"Bearer {token}"),)
        async with self.relay.reach(worker) as stub:
            return await getattr(stub, method)(request, timeout=timeout_s, metadata=metadata)


def _statuses(answers: Mapping[str, Any]) -> Mapping[str, WeightStatus]:
    decode: Callable[[Any], WeightStatus] = WEIGHT_STATUS.decode
    return {worker: decode(answer.status) for worker, answer in answers.items()}
