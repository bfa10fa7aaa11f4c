"""The engine as a library: offline batches in one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weft.engine.config import NEVER_SHIP_TOKENS, EngineConfig
from weft.engine.engine import Engine
from weft.engine.errors import WeftError, error_class
from weft.engine.lora.digest import adapter_digest
from weft.engine.messages import AdapterOrder, Cancel, Failure, Inbox, SessionBatch, Submit
from weft.engine.parts import load_parts
from weft.engine.request import SamplingParams, StopCriteria, TokenLogprob
from weft.engine.scheduler.state import Timeline

NO_TIMEOUT_S = 1e9
_SESSION = 0
_IDLE_S = 0.05
"""Between turns that have nothing to do but to wait for a thread of the engine's."""


@dataclass(slots=True)
class Sample:
    """What one sample of one prompt became."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    timeline: Timeline | None = None


def to_error(failure: Failure) -> WeftError:
    """The exception that a failure was."""
    return error_class(failure.reason)(
        failure.message,
        stage=failure.stage,
        param=failure.param,
        retry_after_s=failure.retry_after_s,
    )


class LLM:
    """Generates tokens from tokens.

    Args:
        model_dir: Hugging Face directory.
        settings: any field of `EngineConfig`.

    Raises:
        ModelError, ConfigError: the directory or the settings cannot be used.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine's threads."""
        self.engine.close()

    def load_adapter(
        self, directory: Path | str, *, is_pinned: bool = False, is_lenient: bool = False
    ) -> bytes:
        """Loads a PEFT directory, which must stay as it is; needs `enable_lora`.

        Args:
            directory: adapter_config.json and adapter_model.safetensors.
            is_pinned: It stays on the device.
            is_lenient: What cannot be applied is left out.

        Returns:
            Its digest, which names it in `generate`.

        Raises:
            AdapterError: It cannot be used.
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
        """Forgets an adapter."""
        self._order(AdapterOrder(query=next(self._ids), action="unload", digest=digest))

    def _order(self, order: AdapterOrder) -> None:
        inbox: Inbox | None = Inbox(adapter_orders=[order])
        while True:
            self._woken.clear()
            replies = self.engine.turn(inbox).adapter_replies
            inbox = None
            for reply in replies:
                if reply.failure is not None:
                    raise to_error(reply.failure)
                return
            self._wait()

    def _wait(self) -> None:
        if not self.engine.has_work:
            self._woken.wait(_IDLE_S)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: StopCriteria | None = None,
        top_logprobs: int | None = None,
        adapters: Sequence[bytes] = (),
    ) -> list[Sample]:
        """Runs prompts of token ids to their end; with n > 1 the first sample of each.

        Args:
            prompts: Of token ids.
            sampling: Of all, or of each prompt its own; greedy if not given.
            stop: Of all.
            top_logprobs: None: no log-probabilities.
            adapters: By prompt, each one's digest, or empty for the base model; none at all: the
                base model for all.

        Raises:
            WeftError: a prompt was refused; nothing else goes on.
        """
        groups = self.generate_all(prompts, sampling, stop, top_logprobs, adapters)
        return [group[0] for group in groups]

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: StopCriteria | None = None,
        top_logprobs: int | None = None,
        adapters: Sequence[bytes] = (),
    ) -> list[list[Sample]]:
        """Like `generate`, with all `n` samples of each prompt."""
        sampling = sampling or SamplingParams(temperature=0.0)
        if isinstance(sampling, SamplingParams):
            sampling = [sampling] * len(prompts)
        submits = [
            Submit(
                session=_SESSION,
                request_id=str(next(self._ids)),
                attempt=1,
                prompt=list(prompt),
                sampling=drawn,
                stop=stop or StopCriteria(),
                top_logprobs=top_logprobs,
                first_token_timeout_s=NO_TIMEOUT_S,
                total_timeout_s=NO_TIMEOUT_S,
                adapter=adapter,
            )
            for prompt, drawn, adapter in zip(
                prompts, sampling, adapters or [b""] * len(prompts), strict=True
            )
        ]
        groups = {s.request_id: [Sample() for _ in range(s.sampling.n)] for s in submits}
        try:
            self._run(submits, groups)
        except BaseException:
            cancels = [Cancel(session=_SESSION, request_id=i, attempt=1) for i in groups]
            self.engine.turn(Inbox(cancels=cancels))
            raise
        return list(groups.values())

    def _run(self, submits: list[Submit], groups: dict[str, list[Sample]]) -> None:
        num_open = sum(map(len, groups.values()))
        inbox: Inbox | None = Inbox(submits=submits)
        while num_open:
            self._woken.clear()
            outbox = self.engine.turn(inbox)
            inbox = None
            for batch in outbox.sessions:
                num_open -= _take(batch, groups)
            if num_open:
                self._wait()


def _take(batch: SessionBatch, groups: dict[str, list[Sample]]) -> int:
    """Adds a step's events; returns how many samples finished."""
    for failed in batch.failed:
        raise to_error(failed.failure)
    for tokens in batch.tokens:
        sample = groups[tokens.request_id][tokens.sample]
        sample.token_ids += tokens.ids
        sample.logprobs += tokens.logprobs
    for finished in batch.finished:
        sample = groups[finished.request_id][finished.sample]
        sample.finish_reason = finished.reason
        sample.timeline = finished.timeline
    return len(batch.finished)
