"""Data-parallel attention: engines of one host that share experts and nothing else.

Each engine is a worker of its own: requests, pages, scheduler, sampler. It reads all weights but
the experts, of which it has a share. The engines find one another by a name in the host's network
namespace, behind which rank 0 listens until all have come. Then their connections only show that
they live.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ConfigError, RanksLost, WeftError, error_class
from weft.engine.base.config import EngineConfig
from weft.engine.base.device_copies import Mark
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.orders import Order
from weft.engine.executor.port import Launched
from weft.engine.executor.ranks.link import LinkClosed, RankLink
from weft.engine.executor.ranks.start import START_LIMIT_S
from weft.engine.executor.ranks.step_forms import StepForms
from weft.engine.executor.step_input import StepInput
from weft.engine.parallel.dispatch import ExchangeShape, ExpertDispatch, HostDispatch
from weft.engine.parallel.lockstep import Lockstep, lockstep_bytes
from weft.engine.parallel.segment import Segment

if TYPE_CHECKING:
    from weft.engine.parallel.device_dispatch import DeviceDispatch

_RETRY_S, _HELLO_LIMIT_S = 0.1, 10.0
_LEAVING_S = 5.0
"""Longest time from the first worker's end to the others', of those that drain together."""
_PEER = struct.Struct("3i")


class AttentionGroup:
    """One engine's membership in the group."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        device: torch.device,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until all engines of the group have come.

        Args:
            wake: As in `Lockstep`.

        Raises:
            ConfigError: Another one has other settings or another model, or is gone; or there is no
                shared memory.
        """
        assert model.moe is not None, "checked by check_combination"
        self.rank, self.size = config.attention_dp_rank, config.attention_dp
        self.incarnation = ""
        """Names the workers that have met, which end together; others that meet have another."""
        self._sockets: dict[int, socket.socket] = {}
        self._links: dict[int, RankLink] = {}
        sizes = model.hidden_size, model.moe.num_experts_per_tok, model.moe.num_experts
        shape = ExchangeShape(self.size, *sizes)
        num_bytes = lockstep_bytes(self.size) if config.is_on_gpu else shape.num_bytes
        about = {
            "size": self.size,
            "model": [model.architecture, model.num_layers, *sizes],
            "is_on_gpu": config.is_on_gpu,
        }
        try:
            if self.rank == 0:
                segment = self._gather(config.attention_dp_group, about, num_bytes)
            else:
                segment = self._join(config.attention_dp_group, about, num_bytes)
        except BaseException:
            self._close_sockets()
            raise
        self.lockstep = Lockstep(segment, self.rank, self.size, config.rank_timeout_s, wake)
        self.dispatch: ExpertDispatch
        self.on_device: DeviceDispatch | None = None
        """`dispatch`, if the engines have GPUs."""
        if config.is_on_gpu:
            from weft.engine.parallel.device_dispatch import DeviceDispatch

            self.dispatch = self.on_device = DeviceDispatch(self.lockstep, shape, device)
        else:
            self.dispatch = HostDispatch(self.lockstep, segment, shape)
        self._wake = wake
        self._is_closing = False
        self._watcher = threading.Thread(target=self._watch, name="attention-dp", daemon=True)

    def agree(self, phase: str, text: str = "") -> None:
        """Waits until all engines have come to this phase of the start. Raises ConfigError if
        another one is gone, or has another text.
        """
        message = {"phase": phase, "text": text}
        if self.rank:
            self._tell(0, message)
            self._hear(0)
            return
        for rank in self._links:
            found = self._hear(rank)
            if found != message:
                why = (
                    f"worker {rank} has the {phase} {found.get('text')}, worker 0 {text}: "
                    "attention_dp needs equal files, number formats and settings"
                )
                self._refuse_all(why)
                raise ConfigError(why, param="model_dir")
        for rank in self._links:
            self._tell(rank, message)

    def share(self, text: str) -> list[str]:
        """Gives a text to all engines, and returns those of all, by rank. Raises ConfigError if
        another one is gone.
        """
        if self.rank:
            self._tell(0, {"text": text})
            found = self._hear(0).get("texts")
        else:
            others = [self._hear(rank).get("text") for rank in sorted(self._links)]
            found = [text, *others]
            for rank in self._links:
                self._tell(rank, {"texts": found})
        if not isinstance(found, list) or len(found) != self.size:
            raise ConfigError("worker 0 has sent no texts of all workers", param="attention_dp")
        return [str(each) for each in found]

    def loaded(self, digest: str) -> None:
        """Called once this engine has its weights, which have this digest. Raises ConfigError if
        those of others differ, or GPUs do not reach each other's memory.
        """
        self.agree("model", digest)
        if self.on_device is not None:
            self.on_device.map_memory(self.share)

    def begin(self) -> None:
        """Ends the start, once all engines have come to it."""
        if self.on_device is not None:
            self.on_device.take_part()
        self.agree("ready")
        self._watcher.start()
        self.lockstep.begin_together()

    def close(self) -> None:
        self._is_closing = True
        self.lockstep.close()
        if self.on_device is not None:
            self.on_device.close()
        for one in self._sockets.values():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if self._watcher.is_alive():
            self._watcher.join()
        self._close_sockets()

    def _gather(self, name: str, about: dict[str, Any], num_bytes: int) -> Segment:
        segment = Segment.create(num_bytes, "weft-experts")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(_address(name))
            except OSError as error:
                raise ConfigError(
                    f"attention_dp_group = {name}: {error.strerror}: another group has this name",
                    param="attention_dp_group",
                ) from error
            listener.listen(self.size)
            until = time.monotonic() + START_LIMIT_S
            while len(self._links) < self.size - 1:
                self._wait_for_one(listener, until)
                self._take_one(listener.accept()[0], about)
        self.incarnation = secrets.token_hex(8)
        for rank in sorted(self._links):
            welcome = {"size": num_bytes, "incarnation": self.incarnation}
            self._tell(rank, welcome, segment.number)
        return segment

    def _wait_for_one(self, listener: socket.socket, until: float) -> None:
        """Waits until another engine calls. Raises ConfigError if one that has come is gone."""
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        for one in self._sockets.values():
            poll.register(one, select.POLLIN)
        while (left_s := until - time.monotonic()) > 0:
            found = {number for number, _ in poll.poll(1000 * min(left_s, 60.0))}
            for rank, one in self._sockets.items():
                if one.fileno() in found:
                    raise ConfigError(f"worker {rank} has ended during its start")
            if found:
                return
        missing = sorted(set(range(1, self.size)) - set(self._links))
        raise ConfigError(
            f"attention_dp = {self.size}: workers {', '.join(map(str, missing))} have not come",
            param="attention_dp",
        )

    def _take_one(self, one: socket.socket, about: dict[str, Any]) -> None:
        one.settimeout(_HELLO_LIMIT_S)
        link = RankLink(one)
        if not _is_own_user(one):
            one.close()
            return
        try:
            hello, _ = link.receive()
        except (LinkClosed, ValueError):
            one.close()
            return
        rank, why = hello.pop("rank", None), ""
        if hello != about:
            why = f"worker {rank} has {hello}, worker 0 {about}: all need equal settings"
        elif not isinstance(rank, int) or not 0 < rank < self.size or rank in self._links:
            why = f"attention_dp_rank = {rank}: each of {self.size} workers has its own, from 0"
        if why:
            with contextlib.suppress(LinkClosed):
                link.send({"error": why, "reason": ConfigError.reason})
            one.close()
            return
        one.settimeout(START_LIMIT_S)
        self._sockets[rank], self._links[rank] = one, link

    def _join(self, name: str, about: dict[str, Any], num_bytes: int) -> Segment:
        until = time.monotonic() + START_LIMIT_S
        while True:
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                one.connect(_address(name))
                break
            except OSError as error:
                one.close()
                if time.monotonic() > until:
                    raise ConfigError(
                        f"attention_dp_group = {name}: worker 0 has not come: {error.strerror}",
                        param="attention_dp_group",
                    ) from error
                time.sleep(_RETRY_S)
        one.settimeout(START_LIMIT_S)
        self._sockets[0], self._links[0] = one, RankLink(one)
        if not _is_own_user(one):
            raise ConfigError(
                f"attention_dp_group = {name}: another user listens there",
                param="attention_dp_group",
            )
        self._tell(0, {**about, "rank": self.rank})
        answer, memory = self._hear_with_memory(0)
        if memory is None or answer.get("size") != num_bytes:
            raise ConfigError("worker 0 has other memory for experts", param="attention_dp")
        self.incarnation = str(answer.get("incarnation"))
        return Segment(memory, num_bytes)

    def _tell(self, rank: int, message: dict[str, Any], memory: int | None = None) -> None:
        try:
            self._links[rank].send(message, memory)
        except LinkClosed:
            self._hear(rank)  # It may have told why.
            raise ConfigError(f"worker {rank} has ended during its start") from None

    def _hear(self, rank: int) -> dict[str, Any]:
        return self._hear_with_memory(rank)[0]

    def _hear_with_memory(self, rank: int) -> tuple[dict[str, Any], int | None]:
        try:
            message, memory = self._links[rank].receive()
        except LinkClosed:
            raise ConfigError(f"worker {rank} has ended during its start") from None
        if "error" in message:
            raise error_class(str(message.get("reason")))(f"worker {rank}: {message['error']}")
        return message, memory

    def _refuse_all(self, why: str, reason: str = ConfigError.reason) -> None:
        for link in self._links.values():
            with contextlib.suppress(LinkClosed):
                link.send({"error": why, "reason": reason})

    def fail_start(self, error: BaseException) -> None:
        """Tells the others that this engine cannot start."""
        reason = error.reason if isinstance(error, WeftError) else ConfigError.reason
        self._refuse_all(str(error), reason)
        if self.on_device is not None:
            self.on_device.close()
        self._close_sockets()

    def _watch(self) -> None:
        """Runs in a separate thread. Ends the group when another engine ends."""
        poll = select.poll()
        ranks = {one.fileno(): rank for rank, one in self._sockets.items()}
        for number in ranks:
            poll.register(number, select.POLLIN)
        first, *_ = (ranks[number] for number, _ in poll.poll())
        if not (self._is_closing or self.lockstep.is_stopped):
            self.lockstep.lose(
                f"worker {first} of {self.size} with shared experts has ended by step "
                f"{self.lockstep.num_steps}",
                first,
            )
        self._wake()

    def _close_sockets(self) -> None:
        for one in self._sockets.values():
            one.close()
        self._sockets = {}


def _address(name: str) -> str:
    return f"\0weft-attention-dp-{name}"


def _is_own_user(one: socket.socket) -> bool:
    of_peer = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, user, _ = _PEER.unpack(of_peer)
    return bool(user == os.getuid())


class LockstepExecutor:
    """Implements `Executor` for an engine that shares experts with others."""

    def __init__(self, local: LocalExecutor, group: AttentionGroup) -> None:
        self._local, self._group = local, group
        self._lockstep, self.dispatch = group.lockstep, group.dispatch
        self._forms: StepForms | None = None
        """None: the engines are on a CPU."""
        if group.on_device is not None:
            self._forms = StepForms(group.lockstep, group.on_device, local)
            group.agree("steps", self._forms.digest)
        self.page_table, self.window_tables = local.page_table, local.window_tables
        self.facts = local.facts
        self._left_at = 0.0
        """Monotonic time at which others were seen to have left; 0: they have not."""

    def launch(self, step: StepInput) -> Launched:
        """Raises RanksLost if another engine is gone, or if this one fails while others go on."""
        with self._step():
            with nullcontext() if self._forms is None else self._forms.agree(step):
                launched = self._local.launch(step)
            with torch.inference_mode():
                self.dispatch.finish()
        return launched

    def take_empty_step(self) -> None:
        """Takes part without rows in a step that another engine has begun, if there is one. Raises
        RanksLost as `launch` does.
        """
        if self._lockstep.is_awaited:
            with self._step(), torch.inference_mode():
                self._lockstep.num_empty_steps += 1
                if self._forms is not None:
                    self._forms.take_empty_step()
                self.dispatch.finish()

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """A block in which this engine computes the next step with the others, which end if it
        fails.
        """
        self._lockstep.begin()
        try:
            yield
        except RanksLost:
            raise
        except Exception as error:
            number = self._lockstep.num_steps
            self._lockstep.fail(
                f"worker {self._group.rank} with shared experts failed in step {number}: {error}",
                self._group.rank,
            )

    def counters(self) -> dict[str, int]:
        gathered, dispatched = self.dispatch.sent_rows()
        return {
            "empty_steps": self._lockstep.num_empty_steps,
            "expert_wait_us": int(self._lockstep.wait_s * 1e6),
            "gathered_rows": gathered,
            "dispatched_rows": dispatched,
        }

    def keep(self, tokens: torch.Tensor) -> None:
        self._local.keep(tokens)

    def mark(self) -> Mark:
        return self._local.mark()

    def order(self, order: Order) -> None:
        self._local.order(order)

    def check(self) -> None:
        """Others that drain with this one may leave first: this one has time to follow."""
        lockstep = self._lockstep
        if not lockstep.is_stopped:
            return
        if lockstep.drains and not lockstep.is_lost:
            self._left_at = self._left_at or time.monotonic()
            if time.monotonic() - self._left_at < _LEAVING_S:
                return
        lockstep.check()

    @property
    def drains(self) -> bool:
        return self._lockstep.drains

    def set_drain(self, drains: bool) -> None:
        self._lockstep.set_drain(drains)

    def order_hand_back(self) -> None:
        self._lockstep.order_hand_back()

    def takes_hand_back(self) -> bool:
        return self._lockstep.takes_hand_back()

    def all_idle(self, is_idle: bool) -> bool:
        return self._lockstep.all_idle(is_idle)

    def close(self) -> None:
        self._group.close()
