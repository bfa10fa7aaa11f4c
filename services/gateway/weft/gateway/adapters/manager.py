"""Loads and unloads adapters on all workers of a model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prometheus_client import Counter
from weft.checkpoint.adapters.digest import adapter_digest
from weft.common.adapters.manifest import Entry, LoadUnderWay, Manifest, check_name
from weft.common.tasks import log_failure
from weft.contract.errors import (
    AdapterError,
    AdapterNotFound,
    DeadlineExceeded,
    Overloaded,
    WeftError,
)
from weft.gateway.adapters.cards import AdapterCards, CopyGone
from weft.gateway.adapters.directory import AdapterDirectory
from weft.gateway.adapters.holders import HELD, Holder, holders, serving_holders
from weft.gateway.fleet.fleet import Fleet
from weft.gateway.telemetry.metrics import DURATION_BUCKETS_S, GatewayMetrics
from weft.gateway.text.model_card import ModelCard
from weft.gateway.validate import invalid

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.02
_FOLLOW_EVERY_S = 0.25
_CLEAN_EVERY_S = 1.0
_LEASE_S = 20.0
"""Seconds after its gateway's last update from which a load counts as abandoned; clocks must differ
by less.
"""
_RENEW_S = 4.0
_CLOSE_S = 3.0
"""Seconds to wait for a disk when the gateway stops."""
_COPY_TRIES = 3
_MAX_COPIES = 2
"""Most copies at once; further loads wait for their turn."""
_SHOWN_NAMES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """A caller's order to load an adapter."""

    name: str
    path: str
    """Path relative to the adapter root."""
    model: str
    """Name of the base model."""
    replaces: bool = False
    is_pinned: bool = False
    is_lenient: bool = False
    timeout_s: float | None = None
    """Time limit; None: the gateway's own, which holds in any case."""


class FleetAdapterManager:
    """Changes the registry on behalf of callers, and cleans it up.

    Args:
        cards: Cards of the models, which tokenizers of adapters must fit.
        num_using: Number of this gateway's requests with an adapter of a content.
        load_timeout_s: Longest load, and longest wait for an unloaded one's requests.
        linger_s: Seconds for which a retired content stays after its last request.
        max_bytes: A larger adapter is refused.
    """

    def __init__(
        self,
        directory: AdapterDirectory,
        fleet: Fleet,
        metrics: GatewayMetrics,
        models: Mapping[str, ModelCard],
        cards: AdapterCards,
        num_using: Callable[[bytes], int],
        *,
        load_timeout_s: float,
        linger_s: float,
        max_bytes: int,
    ) -> None:
        self._directory = directory
        self._fleet = fleet
        self._loads = Counter(
            "weft_adapter_loads",
            "Loads of LoRA adapters asked of this gateway, by outcome: ok, or the failure's reason "
            "in lower case.",
            ["outcome"],
            registry=metrics.registry,
        )
        self._loads.labels("ok")
        self._load_time = metrics.histogram(
            "weft_adapter_load_seconds",
            "From such a call to its answer, copying and all workers' loads included.",
            DURATION_BUCKETS_S,
        )
        self._models = models
        self._cards = cards
        self._num_running = num_using
        self._load_timeout_s = load_timeout_s
        self._linger_s = linger_s
        self._max_bytes = max_bytes
        self._idle_since: dict[Entry, float] = {}
        self._has_copies = True
        """Whether there may be copies without an entry, of failed loads or of earlier gateways."""
        self._calling_off: set[asyncio.Task[None]] = set()
        self._loading: list[Entry] = []
        """Entries whose load this gateway waits for."""
        self._copy_places = asyncio.Semaphore(_MAX_COPIES)

    async def run(self) -> None:
        """Follows the registry and drops unused entries, until cancelled."""
        if not self._directory.is_on:
            return
        cleaned_at = 0.0
        while True:
            try:
                await self._directory.refresh()
                now = asyncio.get_running_loop().time()
                if now - cleaned_at >= _CLEAN_EVERY_S:
                    cleaned_at = now
                    await self._tidy(now)
            except WeftError as error:
                _log.warning("cleaning up adapters failed: %s", error.message)
            except Exception:
                # An error of one look must not end the following ones.
                _log.exception("following the adapters failed")
            await asyncio.sleep(_FOLLOW_EVERY_S)

    async def close(self) -> None:
        """Cancels the loads of this gateway, once it accepts no more calls."""
        for entry in self._loading:
            self._start(self._drop(entry))
        if self._calling_off:
            await asyncio.wait(self._calling_off, timeout=_CLOSE_S)

    async def load(self, order: LoadOrder) -> Entry:
        """Registers an adapter and waits until all serving workers of its model hold it. Returns
        the entry that the name refers to now. Raises WeftError if the load failed; the name then
        means what it meant before, and the message says which worker failed, and why.
        """
        loop = asyncio.get_running_loop()
        began, outcome = loop.time(), "error"
        try:
            entry = await self._load(order)
            outcome = "ok"
            _log.info("adapter loaded", extra={"adapter": entry.name, "digest": entry.digest})
            return entry
        except WeftError as error:
            outcome = error.reason.lower()
            self._has_copies = True
            _log.warning("adapter %s was not loaded: %s", order.name[:128], error.message)
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            self._has_copies = True
            raise
        finally:
            self._loads.labels(outcome).inc()
            self._load_time.observe(loop.time() - began)

    async def _load(self, order: LoadOrder) -> Entry:
        self._check(order)
        timeout_s = _bounded(order.timeout_s, self._load_timeout_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        entry = await self._begin(order, deadline)
        if entry.state == "serving":
            return entry
        try:
            async with self._renewed(entry):
                await self._wait_held(entry, deadline)
            manifest = await self._directory.change(lambda old: old.commit(entry, time.time()))
        except BaseException:
            # This also runs when the caller goes away: the name then means what it meant before.
            await self._call_off(entry)
            raise
        served = manifest.of(entry.name, "serving")
        assert served is not None
        return served

    def _check(self, order: LoadOrder) -> None:
        check_name(order.name)
        if order.name in self._models:
            raise invalid("name", f"`{order.name}` is the name of a model")

    async def _begin(self, order: LoadOrder, deadline: float) -> Entry:
        registry = self._directory.registry
        under_way: LoadUnderWay | None = None
        for _ in range(_COPY_TRIES):
            digest = await self._copy(order, deadline)
            now = time.time()
            wanted = Entry(
                name=order.name,
                digest=digest.hex(),
                model=order.model,
                path=order.path,
                state="loading",
                generation=0,
                created=now,
                is_pinned=order.is_pinned,
                is_lenient=order.is_lenient,
                until=now + _LEASE_S,
            )
            if not await self._check_texts(wanted, deadline):
                continue

            def begin(old: Manifest, wanted: Entry = wanted, now: float = now) -> Manifest:
                if not registry.directory(wanted.digest_bytes).is_dir():
                    return old  # Another gateway has removed the copy in between.
                return old.begin(wanted, replaces=order.replaces, now=now)

            try:
                manifest = await self._register(begin, wanted)
            except LoadUnderWay as error:
                if not (
                    await self._has_ended(wanted, deadline)
                    or await self._was_given_up(order.name, deadline)
                ):
                    raise
                under_way = error
                continue
            under_way = None
            serving = manifest.of(order.name, "serving")
            if serving is not None and serving.covers(wanted):
                return serving
            loading = manifest.of(order.name, "loading")
            if loading is not None and loading.means_as(wanted):
                return loading
        raise under_way or Overloaded(
            "the adapter's copy was removed again and again; try once more", stage="queue"
        )

    async def _copy(self, order: LoadOrder, deadline: float) -> bytes:
        """A disk may not answer. A caller that leaves before the end leaves the thread running."""
        digest_of = partial(adapter_digest, is_lenient=order.is_lenient)
        add_copy = self._directory.registry.add_copy
        copying: asyncio.Task[bytes] | None = None
        try:
            async with asyncio.timeout_at(deadline):
                await self._copy_places.acquire()
                copying = asyncio.create_task(
                    asyncio.to_thread(add_copy, order.path, digest_of, self._max_bytes)
                )
                copying.add_done_callback(self._copied)
                return await asyncio.shield(copying)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the adapter `{order.name}` was not copied in time", stage="adapter"
            ) from None
        finally:
            if copying is not None and not copying.done():
                copying.add_done_callback(self._left_alone)

    async def _check_texts(self, wanted: Entry, deadline: float) -> bool:
        """False: the copy was removed meanwhile."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._cards.of(wanted, self._models[wanted.model])
        except CopyGone:
            return False
        except TimeoutError:
            raise DeadlineExceeded(
                f"the tokenizer of the adapter `{wanted.name}` was not read in time",
                stage="adapter",
            ) from None
        return True

    def _copied(self, copying: asyncio.Task[bytes]) -> None:
        self._copy_places.release()

    def _left_alone(self, copying: asyncio.Task[bytes]) -> None:
        self._has_copies = True

    async def _register(self, begin: Callable[[Manifest], Manifest], wanted: Entry) -> Manifest:
        """Removes the entry again if the caller goes away meanwhile."""
        adding = asyncio.create_task(self._directory.change(begin))
        try:
            return await asyncio.shield(adding)
        except asyncio.CancelledError:
            await self._finish(self._take_back(adding, wanted))
            raise

    async def _take_back(self, adding: asyncio.Task[Manifest], wanted: Entry) -> None:
        """Waits until the entry has been added, since until then there is nothing to drop."""
        with suppress(WeftError):  # If the entry was refused, there is nothing to take back.
            manifest = await adding
            loading = manifest.in_state("loading")
            gone = [one for one in loading if replace(one, generation=0) == wanted]
            await self._directory.change(lambda old: old.drop(gone))
        self._has_copies = True

    async def _has_ended(self, wanted: Entry, deadline: float) -> bool:
        """Waits for another caller's load of the content. False: the name is still being loaded,
        perhaps with another content or by a gateway that died.
        """
        loop = asyncio.get_running_loop()
        await self._directory.refresh()
        while (found := self._directory.manifest.of(wanted.name, "loading")) is not None:
            is_alive = found.until > time.time()
            if not found.means_as(wanted) or not is_alive or loop.time() >= deadline:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)
        return True

    async def _was_given_up(self, name: str, deadline: float) -> bool:
        """Waits until a load of the name is dropped, since its gateway has died, or renewed."""
        loop = asyncio.get_running_loop()
        await self._directory.refresh()
        found = self._directory.manifest.of(name, "loading")
        while found is not None and loop.time() < deadline:
            if self._is_own(found):
                return False
            await asyncio.sleep(_FOLLOW_EVERY_S)
            await self._directory.refresh()
            now = self._directory.manifest.of(name, "loading")
            if now is not None and now != found:
                return False
            if now is None or now.until <= time.time():
                return True
        return found is None

    def _is_own(self, entry: Entry) -> bool:
        return any(entry.is_same(one) for one in self._loading)

    @asynccontextmanager
    async def _renewed(self, entry: Entry) -> AsyncIterator[None]:
        """Renews an entry while the block runs, so that all gateways see that its load is still
        awaited.
        """
        self._loading.append(entry)
        renewing = asyncio.create_task(self._renew(entry))
        renewing.add_done_callback(log_failure)
        try:
            yield
        finally:
            self._loading.remove(entry)
            renewing.cancel()

    async def _renew(self, entry: Entry) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            with suppress(WeftError):  # The next renewal may succeed.
                until = time.time() + _LEASE_S
                await self._directory.change(partial(Manifest.renew, entry=entry, until=until))

    async def _wait_held(self, entry: Entry, deadline: float) -> None:
        """Returns once every serving worker of the model holds it, a decode worker among them.
        Raises Overloaded if an unload cancels the load.
        """
        loop = asyncio.get_running_loop()
        while True:
            found = serving_holders(self._fleet, entry, loop.time())
            if failed := [one for one in found if one.state == "failed" or one.error]:
                told = "; ".join(f"{one.worker_id}: {one.error}" for one in failed)
                raise AdapterError(
                    f"the adapter `{entry.name}` was not loaded, since workers failed: {told}",
                    stage="adapter",
                    worker_id=failed[0].worker_id,
                )
            if all(one.has(entry) for one in found) and any(one.role == "decode" for one in found):
                return
            if not self._directory.manifest.has(entry):
                raise Overloaded(
                    f"the load of the adapter `{entry.name}` was cancelled", stage="adapter"
                )
            if loop.time() >= deadline:
                raise DeadlineExceeded(
                    f"the adapter `{entry.name}` was not loaded in time: {_missing(found, entry)}",
                    stage="adapter",
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _call_off(self, entry: Entry) -> None:
        await self._finish(self._drop(entry))

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Completes an operation even if this task is cancelled."""
        await asyncio.wait([self._start(work)])

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._calling_off.add(task)
        task.add_done_callback(self._calling_off.discard)
        task.add_done_callback(log_failure)
        return task

    async def _drop(self, entry: Entry) -> None:
        await self._directory.change(lambda old: old.drop([entry]))

    async def unload(self, name: str, timeout_s: float | None) -> Entry:
        """Removes a name, waits until no request uses the content that it referred to, and returns
        that entry. None as `timeout_s` means the gateway's own bound.

        Raises:
            AdapterNotFound: The name refers to no adapter.
            DeadlineExceeded: Requests still use it. The name is gone.
        """
        directory, loop = self._directory, asyncio.get_running_loop()
        deadline = loop.time() + _bounded(timeout_s, self._load_timeout_s)
        meant: list[Entry] = []

        def retire(old: Manifest) -> Manifest:
            found = old.of(name, "serving") or old.of(name, "loading")
            meant[:] = [] if found is None else [found]
            return old.retire(name)

        await directory.change(retire)
        if not meant:
            serving = [f"`{one.name}`" for one in directory.serving()]
            names = ", ".join(serving[:_SHOWN_NAMES]) or "none"
            if len(serving) > _SHOWN_NAMES:
                names += f" and {len(serving) - _SHOWN_NAMES} more"
            raise AdapterNotFound(
                f"no adapter is loaded as `{name[:128]}`; there are: {names}",
                stage="validate",
                param="name",
            )
        _log.info("adapter unloaded", extra={"adapter": name, "digest": meant[0].digest})
        while num_using := self._num_left(meant[0]):
            if loop.time() >= deadline:
                raise DeadlineExceeded(
                    f"the adapter `{name}` is unloaded, and {num_using} requests still use it",
                    stage="adapter",
                )
            await asyncio.sleep(_LOOK_EVERY_S)
        return meant[0]

    def holders(self, entry: Entry) -> list[Holder]:
        """Holders of an entry among the workers that were met."""
        return holders(self._fleet, entry)

    def _num_left(self, entry: Entry) -> int:
        """No request counts for a content that another name refers to."""
        serving = self._directory.manifest.in_state("serving")
        return 0 if any(one.means_as(entry) for one in serving) else self._num_using(entry)

    def _num_using(self, entry: Entry) -> int:
        """Only as far as this gateway can tell. The workers' counts include requests of other
        gateways.
        """
        reported = sum(one.num_requests for one in holders(self._fleet, entry))
        return max(self._num_running(entry.digest_bytes), reported)

    async def _tidy(self, now: float) -> None:
        """Drops retired entries that have been unused for a while, since a request that lost its
        worker may need a content for which no worker counts a request. Drops loads whose gateway
        died.
        """
        manifest = self._directory.manifest
        retired = set(manifest.in_state("retired"))
        for entry in retired:
            if self._num_left(entry):
                self._idle_since.pop(entry, None)
            else:
                self._idle_since.setdefault(entry, now)
        self._idle_since = {one: at for one, at in self._idle_since.items() if one in retired}
        gone = [one for one, since in self._idle_since.items() if now - since >= self._linger_s]
        own = tuple(self._loading)

        def tidied(old: Manifest) -> Manifest:
            # Only the newest manifest shows which loads are late, since an entry may just have been
            # renewed.
            return old.drop(gone).drop_given_up(own, time.time())

        is_tidy = not gone and manifest.drop_given_up(own, time.time()).entries == manifest.entries
        if not is_tidy:
            await self._directory.change(tidied)
        if not is_tidy or self._has_copies:
            self._has_copies = False
            await asyncio.to_thread(self._directory.registry.clean)


def _bounded(given_s: float | None, limit_s: float) -> float:
    return limit_s if given_s is None else min(max(0.0, given_s), limit_s)


def _missing(found: Collection[Holder], entry: Entry) -> str:
    if not any(one.role == "decode" for one in found):
        return "no decode worker is healthy"
    told = {"loading": "still loads it"} | dict.fromkeys(HELD, "has not pinned it yet")
    unseen = "has not seen it; is its root the same?"
    waiting = [one for one in found if not one.has(entry)]
    return "; ".join(f"{one.worker_id} {told.get(one.state, unseen)}" for one in waiting)
