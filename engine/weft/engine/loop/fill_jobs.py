"""The jobs of a filler that computes pages: prompts in the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from weft.contract.clock import Clock
from weft.contract.errors import InvalidRequest, MediaMissing
from weft.contract.handle import KvHandle
from weft.contract.token_ids import are_below
from weft.engine.base.config import EngineConfig
from weft.engine.loop.intake import Intake
from weft.engine.requests.media_rows import MediaRows, check_media
from weft.engine.requests.request import Request
from weft.engine.scheduler.scheduler import Scheduler
from weft.pages.fills.lease import FillJob


class ComputeJobs:
    """Implements `Jobs` with the scheduler: each fill is a prompt that is computed.

    Args:
        config: Bounds of queued work.
        look_up: Asks the KV store about a new request.
        has_adapter: Whether pages can be computed with the adapter of this digest.
        media: Rows of the media in prompts; None: prompts have none.
    """

    def __init__(
        self,
        config: EngineConfig,
        intake: Intake,
        scheduler: Scheduler,
        max_tokens: int,
        num_pages: int,
        look_up: Callable[[Request], None],
        has_adapter: Callable[[bytes], bool],
        clock: Clock,
        media: MediaRows | None = None,
    ) -> None:
        self._media = media
        self._max_queued_tokens = config.max_queued_fill_tokens
        self._max_waiting = config.max_waiting_requests
        self._intake = intake
        self._scheduler = scheduler
        self._max_tokens = max_tokens
        self._num_pages = num_pages
        self._look_up = look_up
        self._has_adapter = has_adapter
        self._clock = clock

    def why_not(self, handle: KvHandle) -> tuple[str, str]:
        if handle.namespace != self._intake.namespace(handle.cache_salt, handle.adapter):
            what = ", or what adapters may change (lora_projections)" if handle.adapter else ""
            return "namespace", f"model, dtype or layout differ{what}"
        if handle.adapter and not self._has_adapter(handle.adapter):
            return "namespace", f"adapter {handle.adapter.hex()[:16]} is not loaded here"
        room = (self._num_pages - handle.companion_pages) * handle.page_size
        if handle.end_token > (most := min(self._max_tokens, room)):
            return "too_long", f"{handle.end_token} tokens, at most {most}"
        if not are_below(handle.tokens, self._intake.vocab_size):
            return "invalid", f"a token id is not below {self._intake.vocab_size}"
        if handle.encoder_digest and handle.encoder_digest != self._intake.encoder_digest:
            return "namespace", "the encoder of images differs"
        try:
            check_media(self._media, handle.spans, handle.end_token, is_part=True)
            if handle.tail_spans:
                _check_tail(handle)
                check_media(self._media, handle.tail_spans, handle.tail_spans[-1].end)
        except MediaMissing as error:
            return "media_missing", error.message
        except InvalidRequest as error:
            return "invalid", error.message
        if self._scheduler.num_waiting >= self._max_waiting:
            return "busy", f"{self._scheduler.num_waiting} fills wait"
        if self._scheduler.num_tokens_before(handle.adapter) > self._max_queued_tokens:
            return "busy", f"over {self._max_queued_tokens} tokens are queued"
        return "", ""

    def begin(self, handle: KvHandle, request_id: str, traceparent: str) -> Request:
        request = self._intake.from_handle(handle, request_id, traceparent, self._clock())
        self._look_up(request)
        self._scheduler.add(request)
        return request

    def waits_s(self, job: FillJob) -> tuple[float, float]:
        assert isinstance(job, Request)
        timeline = job.timeline
        return timeline.admitted_s or 0.0, timeline.local_prefill_began_s or 0.0

    def end(self, job: FillJob) -> None:
        assert isinstance(job, Request)
        self._scheduler.finish(job)


def _check_tail(handle: KvHandle) -> None:
    begin, end = max(0, handle.end_token - 1), handle.end_token + handle.page_size
    if handle.tail_spans[0].position < begin or handle.tail_spans[-1].end > end:
        raise InvalidRequest(
            f"rows of media are wanted outside of the positions {begin} to {end - 1}, which follow "
            "the fill's last page",
            stage="validate",
            param="tail_spans",
        )
