"""Chooses where a request goes: one decode worker, and prefill workers that may help it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.contract.errors import Asleep, PeerUnavailable, WeftError, WeightsIncomplete
from weft.contract.spans import Media
from weft.gateway.admission.slo.forecast import IndexedPool, LatencyForecaster
from weft.gateway.fleet.discovery import Role
from weft.gateway.fleet.fleet import ModelFleet
from weft.gateway.fleet.session import DecodeSession
from weft.gateway.fleet.worker import FleetWorker
from weft.gateway.request import GenerateRequest, WorkerChoice
from weft.gateway.routing import FleetPageIndex, Policy, PoolView, RoutingRequest
from weft.gateway.validate import invalid
from weft.v1 import common_pb2, decode_pb2

_RETRY_AFTER_S = 5.0
"""Time in which a restarted worker loads its model."""
_SHOWN_WORKERS, _SHOWN_CHARS = 16, 100
_DIGITS = re.compile(r"([0-9]+)")
_NOBODY = PoolView(())
_MAX_EARLY_BYTES = 64 << 20
"""Media that may be on their way to one worker before their prompts are routed."""
_EARLY_TIMEOUT_S = 30.0
_DEVICE_REQUESTS = 8
"""Requests by which a worker with the adapter on its device may exceed the least busy holder and
still be preferred.
"""


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where one attempt of a request runs, and its weight there."""

    worker: FleetWorker
    session: DecodeSession
    candidates: tuple[decode_pb2.PrefillCandidate, ...]
    """Possible fillers, best first."""
    filler: FleetWorker | None
    """The first of those; None once the decode worker computes the prompt."""
    num_tokens: int
    """Number of tokens of the prompt."""
    to_compute: int
    """Tokens of the prompt that neither of the two workers holds."""
    companions: frozenset[tuple[str, int]] = frozenset()
    """Incarnations of decode workers that end when this one does."""
    _is_computed: bool = True
    _brought_to: FleetWorker | None = None
    """The filler that alone was brought the prompt's media."""

    async def bring(self, media: Sequence[Media], timeout_s: float) -> None:
        """Brings the prompt's media to the owner and to the first filler. What the filler does not
        take is computed by the owner. Raises WeftError if the owner does not take them; if it has
        no encoder, if the filler does not.
        """
        if not _encodes(self.worker):
            filler = self._brought_to = self.filler
            assert filler is not None, "such an owner was chosen with a filler"
            assert filler.info is not None
            await filler.media.bring(media, filler.info.epoch, timeout_s)
            return
        of_owner = self.worker.media.bring(media, self.session.worker_epoch, timeout_s)
        filler = self.filler
        if filler is None or filler.info is None:
            await of_owner
            return
        of_filler = filler.media.bring(media, filler.info.epoch, timeout_s)
        result, _ = await asyncio.gather(of_owner, of_filler, return_exceptions=True)
        if isinstance(result, BaseException):
            raise result

    def forget(self, media: Sequence[Media]) -> None:
        """Notes that the workers may have lost the prompt's media."""
        self.worker.media.forget(media)
        if self._brought_to is not None:
            self._brought_to.media.forget(media)

    def begin(self) -> None:
        """Adds the request to the workers' loads, once it was sent."""
        self._is_computed = False
        self.worker.breaker.begin()
        self.worker.load.begin(self.num_tokens, 0 if self.filler else self.to_compute)
        if self.filler is not None:
            self.filler.breaker.begin()
            self.filler.load.begin(self.num_tokens, self.to_compute)

    def stays(self) -> None:
        """Moves the prompt from the queue of its prefill worker to that of its decode worker, which
        computes it.
        """
        if self._is_computed or self.filler is None:
            return
        self._leave_filler(self.filler)
        self.filler = None
        self.worker.load.stays(self.to_compute)

    def computed(self) -> None:
        """Removes the prompt from the loads, since the request has its first token."""
        if self._is_computed:
            return
        self._is_computed = True
        if self.filler is None:
            self.worker.load.computed(self.to_compute)
        else:
            self._leave_filler(self.filler)

    def _leave_filler(self, filler: FleetWorker) -> None:
        # `Router.filled` reports the outcome later.
        filler.breaker.abandoned()
        filler.load.computed(self.to_compute)
        filler.load.end(self.num_tokens)

    def end(self, error: WeftError | None, *, is_proven: bool) -> None:
        """Notes that the request has left its owner.

        Args:
            error: How the worker failed it, if it did.
            is_proven: Whether the request had received anything from the worker.
        """
        self.computed()
        self.worker.load.end(self.num_tokens)
        self.worker.judge_request(error, is_proven=is_proven)

    @property
    def incarnation(self) -> tuple[str, int]:
        """Address and epoch, which later attempts avoid."""
        return (self.worker.endpoint.address, self.session.worker_epoch)


class Router:
    """Applies each pool's policy to the workers of one model."""

    def __init__(
        self,
        fleet: ModelFleet,
        decode: Policy,
        prefill: Policy,
        max_prefill_candidates: int,
        num_replicas: int = 1,
    ) -> None:
        self._fleet = fleet
        self._decode = decode
        self._prefill = prefill
        self._max_prefill_candidates = max_prefill_candidates
        self._early: set[asyncio.Task[None]] = set()
        self.forecaster = LatencyForecaster(
            partial(self._indexed, "prefill"), partial(self._indexed, "decode"), num_replicas
        )
        """Forecast of the service that a request would get now."""

    def bring_early(self, media: Sequence[Media]) -> None:
        """Begins to bring media to workers before their prompt is routed, so that they travel while
        the prompt's other files are decoded. Only a worker that is the only one of its role with an
        encoder gets them; the route decides between several. What fails is tried again once the
        prompt is routed.
        """
        now, chosen = asyncio.get_running_loop().time(), dict[str, FleetWorker]()
        roles: Sequence[Role] = (
            ("decode", "prefill") if self._max_prefill_candidates else ("decode",)
        )
        for role in roles:
            found = [one for one in self._fleet.workers(role) if _encodes(one)]
            if len(found) == 1 and not found[0].health_problem(now):
                chosen[found[0].endpoint.address] = found[0]
        for worker in chosen.values():
            assert worker.info is not None, "it has told that it has an encoder"
            if worker.media.num_coming_bytes <= _MAX_EARLY_BYTES:
                work = worker.media.bring(media, worker.info.epoch, _EARLY_TIMEOUT_S)
                task = asyncio.create_task(_quietly(work))
                self._early.add(task)
                task.add_done_callback(self._early.discard)

    def _indexed(self, role: Role) -> IndexedPool:
        if role == "prefill" and not self._max_prefill_candidates:
            return IndexedPool(_NOBODY, None)
        view = self._fleet.pool(role).view(asyncio.get_running_loop().time())
        return IndexedPool(view, self.index(role))

    def place(
        self, request: RoutingRequest, excluded: Collection[tuple[str, int]] = ()
    ) -> Placement:
        """Chooses the workers of one attempt. `excluded` are incarnations of decode workers that
        failed this request before.

        Raises:
            PeerUnavailable: No decode worker with the context that was promised is healthy.
            Asleep, WeightsIncomplete: None will be, until a trainer or an operator acts.
        """
        now = asyncio.get_running_loop().time()
        fillers = [] if request.is_computed_anew else self._choose_prefill(request, now)
        has_media = bool(request.spans)
        if fillers and (member := fillers[0][0].member) is not None:
            request = request.beside(member.host)

        def is_excluded(worker: FleetWorker) -> bool:
            if request.worker_id and _id(worker) != request.worker_id:
                return True
            session = worker.session
            if session is None or (worker.endpoint.address, session.worker_epoch) in excluded:
                return True
            if has_media and not (_encodes(worker) or (fillers and _takes_filled(worker))):
                return True
            # The worker may have come after the answer's length was settled, and would cut the
            # answer.
            return not worker.has_context(request.context_tokens)

        least = self._fleet.max_context_tokens(request.context_tokens)
        is_bound = bool(excluded or request.worker_id or least < request.context_tokens)
        may_not = is_excluded if is_bound or has_media else None
        owners = self._choose("decode", self._decode, request, 1, now, may_not)
        if not owners or owners[0][0].session is None:
            if has_media and not fillers:
                raise PeerUnavailable(
                    "no worker can take images: no decode worker with an image tower is ready, and "
                    "no prefill worker with one; send the request again",
                    stage="route",
                    retry_after_s=_RETRY_AFTER_S,
                )
            raise self._nobody(request.worker_id)
        worker, match_tokens = owners[0]
        # A worker of both roles does not fill its own pages.
        fillers = [one for one in fillers if one[0].endpoint.address != worker.endpoint.address]
        num_tokens = len(request.prompt_ids)
        if fillers:
            match_tokens = max(match_tokens, fillers[0][1])
        return Placement(
            worker=worker,
            session=owners[0][0].session,
            candidates=tuple(_candidate(filler, match) for filler, match in fillers),
            filler=fillers[0][0] if fillers else None,
            num_tokens=num_tokens,
            to_compute=num_tokens - match_tokens,
            companions=self._companions(worker),
        )

    def _companions(self, worker: FleetWorker) -> frozenset[tuple[str, int]]:
        if not (group := worker.expert_group):
            return frozenset()
        return frozenset(
            (one.endpoint.address, one.session.worker_epoch)
            for one in self._fleet.workers("decode")
            if one is not worker and one.session is not None and one.expert_group == group
        )

    def check_owners(self, digest: bytes) -> None:
        """Raises PeerUnavailable, Asleep or WeightsIncomplete while no decode worker can own a
        request for the adapter with a content digest; empty: for the base model.
        """
        if not self.has_holder(digest):
            raise self._nobody()

    def _nobody(self, worker_id: str = "") -> WeftError:
        found = list(self._fleet.workers("decode"))
        if found and all(one.asleep for one in found):
            tags = sorted({tag for one in found for tag in one.asleep})
            return Asleep(
                f"all decode workers are asleep ({', '.join(tags)}); wake them by /wake_up",
                stage="route",
                retry_after_s=_RETRY_AFTER_S,
            )
        if found and all(one.asleep or one.lacks_weights for one in found):
            problems = (one.weights_problem for one in found)
            why = next(filter(None, problems), "an update failed, or /sleep has dropped them")
            return WeightsIncomplete(
                f"no decode worker that is awake has a version of the weights: {why}; send the "
                "whole update again, or restart the workers",
                stage="route",
            )
        return PeerUnavailable(
            f"the decode worker {worker_id} is not ready; send the request again"
            if worker_id
            else "no decode worker is ready; send the request again",
            stage="route",
            retry_after_s=_RETRY_AFTER_S,
        )

    def named(self, choice: WorkerChoice) -> str:
        """The id of the decode worker that a request names.

        Raises:
            InvalidRequest: The model has no such worker.
        """
        known = sorted(filter(None, map(_id, self._fleet.workers("decode"))), key=_in_order)
        if choice.rank is not None:
            if choice.rank < len(known):
                return known[choice.rank]
            raise invalid(
                choice.param,
                f"{choice.rank} is not one of this model's {len(known)} decode workers",
            )
        if choice.worker_id not in known:
            shown = ", ".join(known[:_SHOWN_WORKERS]) + (", ..." * (len(known) > _SHOWN_WORKERS))
            name = choice.worker_id[:_SHOWN_CHARS]
            raise invalid(
                choice.param, f"{name!r} is not a decode worker of this model, which has: {shown}"
            )
        return choice.worker_id

    def end_session(self, owner: DecodeSession, request: GenerateRequest) -> None:
        """Tells the workers that a chat session has ended, except the owner of its last request,
        which learns it from that request.
        """
        for worker in self._fleet.workers("decode"):
            if worker.session is not None and worker.session is not owner:
                worker.session.end_session(request.cache_salt, request.session_id)

    def has_holder(self, digest: bytes) -> bool:
        """Whether a healthy decode worker can serve requests for the adapter with a content
        digest.
        """
        now = asyncio.get_running_loop().time()
        workers = self._fleet.workers("decode")
        return any(one.holds(digest) and not one.health_problem(now) for one in workers)

    def filled(self, fills: Iterable[common_pb2.FillTimeline], media: Sequence[Media] = ()) -> None:
        """Reports the outcomes of fills, which their owner has sent, to prefill workers'
        breakers. A worker that has declined a prompt may lack its media.
        """
        fillers = {
            worker.info.worker_id: worker
            for worker in self._fleet.workers("prefill")
            if worker.info is not None
        }
        now = asyncio.get_running_loop().time()
        for fill in fills:
            filler = fillers.get(fill.worker_id)
            if filler is None:
                continue
            if fill.filler_failed:
                filler.breaker.failed(now, fill.failure)
            elif not fill.failure:
                filler.breaker.succeeded()
            else:
                filler.media.forget(media)

    def index(self, role: Role) -> FleetPageIndex | None:
        """Prefix index of a pool's policy; None if the policy needs none."""
        return (self._decode if role == "decode" else self._prefill).index

    def flush(self) -> int:
        """Forgets the pages sent to workers; returns the number of entries."""
        return self._decode.flush() + self._prefill.flush()

    def _choose_prefill(self, request: RoutingRequest, now: float) -> list[tuple[FleetWorker, int]]:
        if not self._max_prefill_candidates:
            return []
        count, may_not = self._max_prefill_candidates, None
        if request.spans:
            may_not = partial(_is_without, _encodes)
        return self._choose("prefill", self._prefill, request, count, now, may_not)

    def _choose(
        self,
        role: Role,
        policy: Policy,
        request: RoutingRequest,
        count: int,
        now: float,
        is_excluded: Callable[[FleetWorker], bool] | None = None,
    ) -> list[tuple[FleetWorker, int]]:
        """Only workers that hold the request's adapter can be chosen. Those with the adapter on
        their device come before those that must load it, unless they are much busier.
        """
        pool, digest = self._fleet.pool(role), request.adapter
        if not digest:
            return pool.choose(policy, request, count, now, is_excluded)
        holders = [worker for worker in self._fleet.workers(role) if worker.holds(digest)]
        if is_excluded is not None:
            holders = [worker for worker in holders if not is_excluded(worker)]
        healthy = [worker for worker in holders if not worker.problem(now)]
        most = min((one.load.num_requests for one in healthy), default=0) + _DEVICE_REQUESTS
        ready = {
            worker
            for worker in healthy
            if worker.holds(digest, on_device=True) and worker.load.num_requests <= most
        }
        chosen: list[tuple[FleetWorker, int]] = []
        for group in (ready, set(healthy) - ready):
            left = count - len(chosen)
            if group and left:
                chosen += pool.choose(policy, request, left, now, partial(_is_outside, group))
        return chosen


def _id(worker: FleetWorker) -> str:
    return "" if worker.info is None else worker.info.worker_id


def _in_order(worker_id: str) -> list[tuple[int, str]]:
    """The order that people expect: decode-2 comes before decode-10."""
    parts = _DIGITS.split(worker_id)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(WeftError):
        await work


def _encodes(worker: FleetWorker) -> bool:
    """Whether a worker has an encoder of media."""
    return worker.info is not None and not worker.info.lacks_encoder


def _takes_filled(worker: FleetWorker) -> bool:
    """Whether a worker takes prompts with media that other workers compute."""
    return worker.info is not None and bool(worker.info.encoder_digest)


def _is_without(has: Callable[[FleetWorker], bool], worker: FleetWorker) -> bool:
    return not has(worker)


def _is_outside(group: Collection[FleetWorker], worker: FleetWorker) -> bool:
    return worker not in group


def _candidate(worker: FleetWorker, match_tokens: int) -> decode_pb2.PrefillCandidate:
    assert worker.info is not None
    return decode_pb2.PrefillCandidate(
        worker_id=worker.info.worker_id,
        address=worker.info.advertised_address or worker.endpoint.address,
        epoch=worker.info.epoch,
        match_tokens=match_tokens,
        queued_tokens=worker.load.queued_tokens,
        tokens_per_second=worker.tokens_per_second,
    )
