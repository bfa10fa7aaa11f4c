"""The engine as a library: offline batches in one process."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from weft.checkpoint.adapters.digest import adapter_digest
from weft.contract.adapters import AdapterOrder, AdapterReply
from weft.contract.arrays import Float32Array
from weft.contract.experts import ExpertAction, ExpertCommand, ExpertReply, ExpertState
from weft.contract.messages import Inbox, Outbox
from weft.contract.request import SamplingParams, StopCriteria, TokenLogprob
from weft.contract.spans import Media, MediaSpan
from weft.contract.submits import Cancel, GatewayBatch, Submit, VersionSpan
from weft.contract.tasks import PoolingParams
from weft.contract.timeline import Timeline
from weft.contract.token_ids import token_ids
from weft.contract.weights import (
    DEFAULT_LIMIT_S,
    SLEEP_TAGS,
    PauseMode,
    SleepTag,
    WeightAction,
    WeightCommand,
    WeightOffer,
    WeightReply,
    WeightStatus,
)
from weft.engine.base.config import NEVER_SHIP_TOKENS, EngineConfig
from weft.engine.loop.build import load_parts
from weft.engine.loop.engine import Engine

_Reply = TypeVar("_Reply", AdapterReply, ExpertReply, WeightReply)
NO_TIMEOUT_S = 1e9
_SESSION = 0
_IDLE_S = 0.05
"""Longest wait in seconds between turns in which the engine only waits for one of its threads."""


@dataclass(slots=True)
class GeneratedSample:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens except the first."""
    vectors: list[Float32Array] = field(default_factory=list)
    """[n, width] each: vectors of the prompt, if they were wanted."""
    routes: list[NDArray[np.generic]] = field(default_factory=list)
    """[n, layers, k] each: experts of consecutive positions, if they were wanted."""
    finish_reason: str = ""
    timeline: Timeline | None = None
    weight_versions: list[VersionSpan] = field(default_factory=list)
    """Which weights have drawn its tokens; empty: those of the start."""


class LLM:
    """Generates token ids from token ids.

    Args:
        model_dir: Hugging Face directory.
        settings: Any field of `EngineConfig`.

    Raises:
        ModelError, ConfigError: The directory or the settings cannot be used.
    """

    def __init__(self, model_dir: Path | str, **settings: Any) -> None:
        alone: dict[str, Any] = {"transport": "data", "local_prefill_max_tokens": NEVER_SHIP_TOKENS}
        settings = alone | settings
        config = EngineConfig(model_dir=Path(model_dir), **settings)
        self._woken = threading.Event()
        self.engine = Engine(config, load_parts(config, wake=self._woken.set))
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.engine.close()

    def load_adapter(
        self, directory: Path | str, *, is_pinned: bool = False, is_lenient: bool = False
    ) -> bytes:
        """Loads a PEFT directory, which must stay unchanged; needs `enable_lora`. Returns the
        adapter's digest, which names it in `generate`.

        Args:
            is_pinned: Whether the adapter stays on the device.
            is_lenient: Whether parts that cannot be applied are ignored.

        Raises:
            AdapterError: The adapter cannot be used.
            ConfigError: `enable_lora` is off.
        """
        digest = adapter_digest(Path(directory), is_lenient=is_lenient)
        order = AdapterOrder(
            query=next(self._ids),
            action="load",
            digest=digest,
            name=Path(directory).name,
            directory=str(directory),
            is_pinned=is_pinned,
            is_lenient=is_lenient,
        )
        self._order(order)
        return digest

    def unload_adapter(self, digest: bytes) -> None:
        self._order(AdapterOrder(query=next(self._ids), action="unload", digest=digest))

    def _order(self, order: AdapterOrder) -> None:
        self._ask(Inbox(adapter_orders=[order]), lambda outbox: outbox.adapter_replies)

    def refit(self, folder: Path | str, version: str = "") -> WeightStatus:
        """Changes the model's weights to those in a folder of safetensors. Raises WeftError if
        they could not be read; `weights` then says whether the old ones are left.
        """
        return self._command("refit", folder=str(folder), version=version)

    def offer_weights(self) -> WeightOffer:
        """Lets other processes read the packed weights over NIXL, for `copy_weights` or as
        `weights_offer`. Raises WeftError if they cannot.
        """
        offer = self._reply("offer").offer
        assert offer is not None
        return offer

    def copy_weights(self, offer: WeightOffer, version: str = "") -> WeightStatus:
        """Changes the model's weights to those of another process, as `refit` does."""
        return self._command("copy", offer=offer, version=version)

    def command_weights(self, action: WeightAction, **options: Any) -> WeightStatus:
        """Obeys a command with the fields of `WeightCommand`."""
        return self._command(action, **options)

    def pause(self, mode: PauseMode = "keep", limit_s: float = DEFAULT_LIMIT_S) -> WeightStatus:
        """Stops steps between two of them, until `resume` or for `limit_s`."""
        return self._command("pause", mode=mode, limit_s=limit_s)

    def resume(self) -> WeightStatus:
        return self._command("resume")

    def sleep(
        self,
        level: int = 1,
        tags: Sequence[SleepTag] = SLEEP_TAGS,
        mode: PauseMode = "abort",
    ) -> WeightStatus:
        """Gives memory back to the system, until `wake`. After level 2 the weights are gone, and
        `refit` must bring others.
        """
        return self._command("sleep", level=level, tags=list(tags), mode=mode)

    def wake(self, tags: Sequence[SleepTag] = SLEEP_TAGS) -> WeightStatus:
        return self._command("wake", tags=list(tags))

    def command_experts(self, action: ExpertAction) -> ExpertState:
        """Counts experts, tells what was counted, or gives experts other ranks by it."""
        command = ExpertCommand(query=next(self._ids), action=action)
        inbox = Inbox(expert_commands=[command])
        reply = self._ask(inbox, lambda outbox: outbox.expert_replies)
        assert reply.state is not None
        return reply.state

    @property
    def weights(self) -> WeightStatus:
        return self.engine.weights.status

    def _command(self, action: WeightAction, **options: Any) -> WeightStatus:
        return self._reply(action, **options).status

    def _reply(self, action: WeightAction, **options: Any) -> WeightReply:
        command = WeightCommand(query=next(self._ids), action=action, **options)
        return self._ask(Inbox(weight_commands=[command]), lambda outbox: outbox.weight_replies)

    def _ask(self, order: Inbox, replies: Callable[[Outbox], Sequence[_Reply]]) -> _Reply:
        inbox: Inbox | None = order
        while True:
            self._woken.clear()
            outbox = self.engine.turn(inbox)
            inbox = None
            for reply in replies(outbox):
                if reply.failure is not None:
                    raise reply.failure.to_error()
                return reply
            self._wait()

    def _wait(self) -> None:
        if not self.engine.has_work:
            self._woken.wait(_IDLE_S)

    def put(self, media: Sequence[Media]) -> None:
        """Brings media that prompts may name from now on, as far as `media_bytes` has room."""
        self.engine.turn(Inbox(media=list(media)))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: StopCriteria | Sequence[StopCriteria] | None = None,
        top_logprobs: int | None = None,
        adapters: Sequence[bytes] = (),
        max_at_once: int | None = None,
        prompt_logprobs: int | None = None,
        spans: Sequence[Sequence[MediaSpan]] = (),
        *,
        scales_logprobs: bool = False,
        routes_from: int | None = None,
    ) -> list[GeneratedSample]:
        """Runs prompts of token ids to their end and returns the first sample of each.

        Args:
            sampling: For all prompts, or one for each; None: greedy.
            top_logprobs: None: no log-probabilities.
            adapters: Digest of each prompt's adapter. An empty digest, or an empty list, is the
                base model.
            max_at_once: Most prompts under way; further prompts begin as these end. None: all at
                once.
            prompt_logprobs: Alternatives for each token of the prompts; None: none are computed.
            spans: Media of each prompt, whose content `put` has brought; empty: there are none.
            scales_logprobs: Whether log-probabilities of generated tokens are of logits divided by
                the temperature.
            routes_from: Position from which on the experts of tokens are wanted, which needs
                `enable_return_routed_experts`; None: they are not.

        Raises:
            ValueError: `max_at_once` is less than one.
            WeftError: A prompt was refused. All other prompts are cancelled.
        """
        groups = self.generate_all(
            prompts,
            sampling,
            stop,
            top_logprobs,
            adapters,
            max_at_once,
            prompt_logprobs,
            spans,
            scales_logprobs=scales_logprobs,
            routes_from=routes_from,
        )
        return [group[0] for group in groups]

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: StopCriteria | Sequence[StopCriteria] | None = None,
        top_logprobs: int | None = None,
        adapters: Sequence[bytes] = (),
        max_at_once: int | None = None,
        prompt_logprobs: int | None = None,
        spans: Sequence[Sequence[MediaSpan]] = (),
        *,
        scales_logprobs: bool = False,
        routes_from: int | None = None,
    ) -> list[list[GeneratedSample]]:
        """`generate` with all `n` samples of each prompt."""
        if max_at_once is not None and max_at_once < 1:
            raise ValueError(f"max_at_once = {max_at_once}: at least one prompt must be under way")
        sampling = sampling or SamplingParams(temperature=0.0)
        if isinstance(sampling, SamplingParams):
            sampling = [sampling] * len(prompts)
        stop = stop or StopCriteria()
        if isinstance(stop, StopCriteria):
            stop = [stop] * len(prompts)
        submits = [
            Submit(
                gateway=_SESSION,
                request_id=str(next(self._ids)),
                attempt=1,
                prompt=token_ids(prompt),
                sampling=drawn,
                stop=ends,
                top_logprobs=top_logprobs,
                scales_logprobs=scales_logprobs,
                prompt_logprobs=prompt_logprobs,
                routes_from=routes_from,
                first_token_timeout_s=NO_TIMEOUT_S,
                total_timeout_s=NO_TIMEOUT_S,
                adapter=adapter,
                spans=list(own),
            )
            for prompt, drawn, ends, adapter, own in zip(
                prompts,
                sampling,
                stop,
                adapters or [b""] * len(prompts),
                spans or [()] * len(prompts),
                strict=True,
            )
        ]
        return self._finish(submits, max_at_once or len(submits))

    def pool(
        self,
        prompts: Sequence[Sequence[int]],
        pool: PoolingParams,
        adapters: Sequence[bytes] = (),
        spans: Sequence[Sequence[MediaSpan]] = (),
    ) -> list[Float32Array]:
        """Makes vectors of prompts of token ids: [n, width] of each prompt, one vector or one for
        each of its tokens.

        Args:
            adapters: Digest of each prompt's adapter; empty: the base model.
            spans: Media of each prompt, which `put` has brought.

        Raises:
            WeftError: A prompt was refused. All other prompts are cancelled.
        """
        submits = [
            Submit(
                gateway=_SESSION,
                request_id=str(next(self._ids)),
                attempt=1,
                prompt=token_ids(prompt),
                sampling=SamplingParams(temperature=0.0),
                stop=StopCriteria(),
                pool=pool,
                first_token_timeout_s=NO_TIMEOUT_S,
                total_timeout_s=NO_TIMEOUT_S,
                adapter=adapter,
                spans=list(media),
            )
            for prompt, adapter, media in zip(
                prompts,
                adapters or [b""] * len(prompts),
                spans or [()] * len(prompts),
                strict=True,
            )
        ]
        # Prompts come one step's worth at a time, since taking them in takes long beside their
        # steps.
        groups = self._finish(submits, len(submits), self.engine.config.max_step_tokens)
        return [np.concatenate(samples[0].vectors) for samples in groups]

    def _finish(
        self, submits: list[Submit], max_at_once: int, tokens_each: float = math.inf
    ) -> list[list[GeneratedSample]]:
        """Cancels all submits if one fails. A turn of the engine takes in no more submits once
        their prompts have `tokens_each` tokens.
        """
        groups = {s.request_id: [GeneratedSample() for _ in range(s.sampling.n)] for s in submits}
        try:
            self._run(submits, groups, max_at_once, tokens_each)
        except BaseException:
            cancels = [Cancel(gateway=_SESSION, request_id=i, attempt=1) for i in groups]
            self.engine.turn(Inbox(cancels=cancels))
            raise
        return list(groups.values())

    def _run(
        self,
        submits: list[Submit],
        groups: dict[str, list[GeneratedSample]],
        max_at_once: int,
        tokens_each: float,
    ) -> None:
        waiting = deque(submits)
        open_samples: dict[str, int] = {}
        max_waiting = self.engine.config.max_waiting_requests
        while waiting or open_samples:
            new: list[Submit] = []
            num_tokens = 0
            num_open = sum(open_samples.values()) if waiting else 0
            while waiting and len(open_samples) < max_at_once and num_tokens < tokens_each:
                num_samples = waiting[0].sampling.n
                if num_open and num_open + num_samples > max_waiting:
                    break
                new.append(waiting.popleft())
                open_samples[new[-1].request_id] = num_samples
                num_open += num_samples
                num_tokens += len(new[-1].prompt)
            self._woken.clear()
            outbox = self.engine.turn(Inbox(submits=new) if new else None)
            for batch in outbox.gateways:
                for request_id in _take(batch, groups):
                    open_samples[request_id] -= 1
                    if not open_samples[request_id]:
                        del open_samples[request_id]
            if open_samples:
                self._wait()


def _take(batch: GatewayBatch, groups: dict[str, list[GeneratedSample]]) -> list[str]:
    for failed in batch.failed:
        raise failed.failure.to_error()
    for scores in batch.prompt_logprobs:
        groups[scores.request_id][0].prompt_logprobs += scores.logprobs
    for vectors in batch.vectors:
        made = np.frombuffer(vectors.values, "<f4").reshape(-1, vectors.width)
        held = groups[vectors.request_id][0].vectors
        # A prompt that was preempted sends its first ones again.
        num_known = sum(map(len, held)) - vectors.first_row
        assert num_known >= 0, "vectors are missing"
        held.append(made[num_known:])
    for routes in batch.routes:
        groups[routes.request_id][routes.sample].routes.append(routes.array())
    for tokens in batch.all_tokens():
        sample = groups[tokens.request_id][tokens.sample]
        sample.token_ids += tokens.ids
        sample.logprobs += tokens.logprobs
    for finished in batch.finished:
        sample = groups[finished.request_id][finished.sample]
        sample.finish_reason = finished.reason
        sample.timeline = finished.timeline
        sample.weight_versions = finished.weight_versions
    return [finished.request_id for finished in batch.finished]
