"""A decode or prefill worker without an engine: scripted tokens over the real contract.

In a test: `worker = FakeWorker(...)`, `await worker.start()`. As a process, it answers every prompt
by the tokens of one text:
`python -m weft.testing.services.fake_decode --model-dir DIR --model NAME --text TEXT --ready-file
FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from weft.common.media_stream import media_of
from weft.common.worker.kv_feed import KvFeed
from weft.contract.keys import ROOT_KEY, PageKeys, namespace_digest
from weft.contract.layout import CacheLayout, PagedPlane
from weft.contract.spans import Media
from weft.pages.memory.events import KvEvents
from weft.testing.services.fake_adapters import FakeAdapters
from weft.testing.services.fake_weights import FakeWeights
from weft.v1 import (
    admin_pb2_grpc,
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kv_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

Event = decode_pb2.SessionEvent
PAGE_SIZE = 16
LAYOUT = CacheLayout.of_plane(PagedPlane(layers=2, heads=3, dim=8, dtype="float32"), PAGE_SIZE)
CUT_DELAY_S = 0.02


@dataclass
class Script:
    """The scripted answer to one request."""

    tokens: Sequence[Sequence[int]]
    """Tokens of each sample; sample i of n gets entry i modulo their number."""
    chunk: int = 1
    """Tokens of a sample per step."""
    score_chunk: int = 5
    """Prompt tokens whose log-probabilities are sent per step, before any token."""
    fail: Event.Failed | None = None
    """Failure sent instead of step `fail_after`."""
    fail_after: int = 10**9
    break_after: int = 10**9
    """Steps after which the whole Session is cut."""
    hang_after: int = 10**9
    """Steps after which nothing more comes."""
    hides_end: bool = False
    """The end of a sample is never told."""
    repeat_deltas: bool = False
    """Send every delta twice, the second time together with the one before."""
    top_logprobs: int | None = None
    logprob: float | None = None
    """Log-probability of each token; None: it depends on its index."""
    fill_by: int | None = None
    """Number of the prefill candidate that filled the prompt's full pages; None = nobody was
    asked."""
    fill_failure: str = ""
    """Why the fill failed."""
    is_computed_here: bool = False
    """Whether the worker tells at its first step that it computes the prompt itself."""
    timelines: Sequence[common_pb2.Timeline] = ()
    """Of each sample, instead of the usual one."""


@dataclass
class Partial:
    """The received parts of a submit."""

    submit: decode_pb2.Submit
    prompt: list[int]
    generated: dict[int, list[int]]

    def is_complete(self) -> bool:
        return len(self.prompt) == self.submit.prompt_length and all(
            len(self.generated[entry.sample]) == entry.num_tokens for entry in self.submit.progress
        )


@dataclass
class Run:
    """A request in progress."""

    submit: decode_pb2.Submit
    prompt: list[int]
    script: Script
    num_scored: int = 1
    """Prompt tokens whose log-probabilities were sent; the first one has none."""
    steps: int = 0
    sent: dict[int, int] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)


_KEPT_PORTS: dict[int, socket.socket] = {}
"""Sockets that are bound and do not listen, by port."""


class FakeWorker(decode_pb2_grpc.DecodeServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """Serves DecodeService, WorkerService and trainers' orders on one port."""

    lacks_encoder = False
    """Whether it has left out its model's image tower."""

    def __init__(
        self,
        model: str,
        vocabulary_size: int,
        script: Callable[[decode_pb2.Submit, list[int]], Script],
        *,
        worker_id: str = "decode-1",
        role: worker_pb2.WorkerRole.ValueType = worker_pb2.WORKER_ROLE_DECODE,
        max_context_tokens: int = 512,
        step_s: float = 0.002,
    ) -> None:
        self.model = model
        self.vocabulary_size = vocabulary_size
        self.script = script
        self.worker_id = worker_id
        self.role = role
        self.max_context_tokens = max_context_tokens
        self.step_s = step_s
        self.epoch = secrets.randbits(64)
        self.submits: list[decode_pb2.Submit] = []
        self.prompts: list[list[int]] = []
        self.generated: list[dict[int, list[int]]] = []
        """By submit: tokens of its samples that other attempts have generated."""
        self.media: dict[bytes, Media] = {}
        """All media that it was brought."""
        self.arrivals: list[bytes] = []
        """Digests of all media in the order in which they came."""
        self.largest_message_bytes = 0
        self.cancels: list[decode_pb2.Cancel] = []
        self.session_ends: list[decode_pb2.EndSession] = []
        self.num_sessions = 0
        self.num_pings = 0
        self.expects_constraints = False
        """Value from the newest ping."""
        self.accepts_nothing = False
        """Whether it never says that it has accepted a submit."""
        self.num_submits_to_lose = 0
        self.num_ends_to_lose = 0
        """Messages that never come through, one after the other."""
        self.is_frozen = False
        self.is_draining = False
        self.weights_state, self.weights_problem = "ready", ""
        self.role_now: worker_pb2.RoleState | None = None
        """What it is used for, of a worker of both roles."""
        self.loop_age_s = 0.0
        self.stale_after_s = 2.0
        self.running_requests = self.waiting_requests = 0
        self.total_pages = self.free_pages = self.cached_pages = 0
        self.queued_tokens = 0
        self.prefill_tokens_per_second = 0.0
        self.decode_step_s = 0.0
        self.decode_step_requests = 0.0
        self.model_digest = bytes(range(32))
        self.weights = FakeWeights()
        self.request_tokens = 0
        self.kv: KvFeed
        """The pages that it reports as held."""
        self._kv_events: KvEvents
        self.lost_changes: set[int] = set()
        """Changes that watchers are not told."""
        self.adapters: FakeAdapters | None = None
        """Absent: it was started without an adapter root."""
        self._sessions_runs: list[dict[str, Run]] = []
        self.others: list[FakeWorker] = []
        """Workers that may fill for it."""
        self.address = ""
        self._server: grpc.aio.Server | None = None

    def follow_adapters(self, root: Path) -> FakeAdapters:
        """Makes the worker follow a registry from now on."""
        self.adapters = FakeAdapters(root, self.model, self.num_using)
        return self.adapters

    def num_using(self, digest: bytes) -> int:
        """Requests under way that name an adapter."""
        runs = [run for runs in self._sessions_runs for run in runs.values()]
        return sum(run.submit.adapter.digest == digest for run in runs)

    def hold(
        self, ids: list[int], salt: str = "", num_pages: int | None = None, adapter: bytes = b""
    ) -> None:
        """Makes the worker hold the first pages of a prompt; all full ones by default."""
        keys = self._page_keys(ids, salt, adapter)[:num_pages]
        for parent, key in zip([ROOT_KEY, *keys], keys, strict=False):
            self._kv_events.stored(key, parent)
        self.kv.take(self._kv_events.take())

    def drop(self, ids: list[int], salt: str = "", num_pages: int = 0) -> None:
        """Makes the worker drop a prompt's pages beyond the first ones."""
        for key in self._page_keys(ids, salt)[num_pages:]:
            self._kv_events.removed(key)
        self.kv.take(self._kv_events.take())

    def _page_keys(self, ids: list[int], salt: str, adapter: bytes = b"") -> list[bytes]:
        namespace = namespace_digest(
            self.model_digest, LAYOUT.describe(), adapter_digest=adapter, cache_salt=salt
        )
        return PageKeys(namespace, PAGE_SIZE).upto(ids, len(ids) // PAGE_SIZE)

    async def start(self, port: int = 0) -> str:
        self.kv = KvFeed(self.worker_id, self.epoch, min_interval_s=0.0)
        self._kv_events = KvEvents(PAGE_SIZE)
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self.weights, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()
        if (kept := _KEPT_PORTS.pop(bound, None)) is not None:
            kept.close()
        return self.address

    async def stop(self, *, keeps_port: bool = False) -> None:
        """Stops it; nobody else gets its port until `start` if it keeps that."""
        if self.adapters is not None:
            self.adapters.stop()
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
        if keeps_port:
            kept = socket.socket()
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = int(self.address.rpartition(":")[2])
            kept.bind(("127.0.0.1", port))
            _KEPT_PORTS[port] = kept

    # WorkerService

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.GetInfoResponse:
        takes = self.adapters is not None
        return worker_pb2.GetInfoResponse(
            adapters=worker_pb2.AdapterLimits(max_rank=64) if takes else None,
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=self.role,
            model=self.model,
            max_context_tokens=self.max_context_tokens,
            vocabulary_size=self.vocabulary_size,
            page_size=PAGE_SIZE,
            num_pages=1000,
            model_digest=self.model_digest,
            admin_port=int(self.address.rpartition(":")[2]),
            lacks_encoder=self.lacks_encoder,
            planes=[
                kv_pb2.Plane(
                    name="target",
                    layers=LAYOUT.plane.layers,
                    heads=LAYOUT.plane.heads,
                    parts=[
                        kv_pb2.PlanePart(name=name, dim=LAYOUT.plane.dim, dtype=LAYOUT.plane.dtype)
                        for name in LAYOUT.plane.parts
                    ],
                )
            ],
        )

    async def PutMedia(self, request_iterator: Any, context: Any) -> worker_pb2.PutMediaResponse:
        async for one in media_of(request_iterator):
            self.media[one.digest] = one
            self.arrivals.append(one.digest)
        return worker_pb2.PutMediaResponse()

    async def WatchKv(
        self, request: worker_pb2.WatchKvRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchKvResponse]:
        async for response in self.kv.watch(request):
            kept = [one for one in response.changes if one.sequence not in self.lost_changes]
            if kept or not response.changes:
                del response.changes[:]
                response.changes.extend(kept)
                yield response

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        told: int | None = None
        while True:
            while self.is_frozen:
                await asyncio.sleep(0.01)
            response = worker_pb2.WatchLoadResponse(
                worker_id=self.worker_id,
                epoch=self.epoch,
                loop_age=duration(self.loop_age_s),
                stale_after=duration(self.stale_after_s),
                draining=self.is_draining,
                running_requests=self.running_requests,
                waiting_requests=self.waiting_requests,
                total_pages=self.total_pages,
                free_pages=self.free_pages,
                cached_pages=self.cached_pages,
                queued_tokens=self.queued_tokens,
                request_tokens=self.request_tokens,
                prefill_tokens_per_second=self.prefill_tokens_per_second,
                decode_step=duration(self.decode_step_s),
                decode_step_requests=self.decode_step_requests,
                role=self.role_now,
            )
            response.weights.state = self.weights_state
            response.weights.problem = self.weights_problem
            if self.adapters is not None:
                news = self.adapters.news(told)
                response.adapters.extend(news.statuses)
                response.gone_adapters.extend(news.gone)
                response.adapters_are_changes = not news.is_all
                response.adapter_generation = self.adapters.generation
                told = news.sequence if request.adapter_changes else None
            yield response
            await asyncio.sleep(request.interval.ToNanoseconds() / 1e9 or 0.2)

    # DecodeService

    async def Session(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> None:
        self.num_sessions += 1
        runs: dict[str, Run] = {}
        self._sessions_runs.append(runs)
        partial: dict[str, Partial] = {}
        extra = Event()
        arrived = asyncio.Event()

        async def receive() -> None:
            async for message in requests:
                self.largest_message_bytes = max(self.largest_message_bytes, message.ByteSize())
                kind = message.WhichOneof("request")
                if kind == "submit":
                    submit = message.submit
                    if self.num_submits_to_lose:
                        self.num_submits_to_lose -= 1
                        continue
                    if not self.accepts_nothing:
                        extra.accepted.add(request_id=submit.request_id, attempt=submit.attempt)
                    partial[submit.request_id] = Partial(
                        submit,
                        list(submit.prompt.ids),
                        {entry.sample: list(entry.tokens.ids) for entry in submit.progress},
                    )
                    self._take(submit.request_id, partial, runs)
                elif kind == "prompt_part":
                    part = message.prompt_part
                    partial[part.request_id].prompt.extend(part.tokens.ids)
                    self._take(part.request_id, partial, runs)
                elif kind == "generated_part":
                    more = message.generated_part
                    partial[more.request_id].generated[more.sample].extend(more.tokens.ids)
                    self._take(more.request_id, partial, runs)
                elif kind == "cancel":
                    self.cancels.append(message.cancel)
                    self._cancel(message.cancel, runs, extra)
                elif kind == "end_session":
                    self.session_ends.append(message.end_session)
                elif kind == "ping":
                    self.num_pings += 1
                    self.expects_constraints = message.ping.constraints
                    if not self.is_frozen:
                        extra.pong.nonce = message.ping.nonce
                        for asked in message.ping.asked:
                            if not {asked.request_id} & {*runs, *partial}:
                                extra.pong.unknown.append(asked)
                elif kind == "hello":
                    extra.welcome.worker_id = self.worker_id
                    extra.welcome.worker_epoch = self.epoch
                arrived.set()

        receiver = asyncio.create_task(receive())
        try:
            while not receiver.done():
                if not runs and not extra.ByteSize():
                    arrived.clear()
                    await asyncio.wait(
                        [receiver, waiting := asyncio.create_task(arrived.wait())],
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    waiting.cancel()
                event = Event()
                event.CopyFrom(extra)
                extra.Clear()
                if not self.is_frozen and not self._step(runs, event):
                    # What was sent before is to arrive: the end of a stream can overtake it.
                    await asyncio.sleep(CUT_DELAY_S)
                    return
                if event.ByteSize():
                    await context.write(event)
                if runs:
                    await asyncio.sleep(self.step_s)
        finally:
            self._sessions_runs.remove(runs)
            receiver.cancel()

    def _take(self, request_id: str, partial: dict[str, Partial], runs: dict[str, Run]) -> None:
        known = partial[request_id]
        if not known.is_complete():
            return
        del partial[request_id]
        submit = known.submit
        self.submits.append(submit)
        self.prompts.append(known.prompt)
        self.generated.append(known.generated)
        run = Run(submit, known.prompt, self.script(submit, known.prompt))
        run.open = set(range(max(1, submit.sampling.n)))
        run.open -= {entry.sample for entry in submit.progress if entry.finished}
        run.sent = {entry.sample: entry.num_tokens for entry in submit.progress}
        runs[request_id] = run

    def _cancel(self, cancel: decode_pb2.Cancel, runs: dict[str, Run], event: Event) -> None:
        run = runs.get(cancel.request_id)
        if run is None or run.submit.attempt != cancel.attempt:
            return
        samples = {cancel.sample} if cancel.HasField("sample") else set(run.open)
        for sample in samples & run.open:
            run.open.discard(sample)
            self._finish(run, sample, common_pb2.FINISH_REASON_CANCELLED, None, event)
        if not run.open:
            del runs[cancel.request_id]

    def _step(self, runs: dict[str, Run], event: Event) -> bool:
        """Runs one step of all requests; False ends the Session."""
        for request_id, run in list(runs.items()):
            if run.steps >= run.script.break_after:
                return False
            if run.steps >= run.script.hang_after:
                continue
            if run.steps >= run.script.fail_after and run.script.fail is not None:
                failed = event.failed.add()
                failed.CopyFrom(run.script.fail)
                failed.request_id, failed.attempt = request_id, run.submit.attempt
                del runs[request_id]
                continue
            run.steps += 1
            if run.script.is_computed_here and run.steps == 1:
                event.computed_here.add(request_id=request_id, attempt=run.submit.attempt)
                continue
            if run.submit.HasField("prompt_logprobs") and run.num_scored < len(run.prompt):
                self._score(run, event)
                if run.num_scored < len(run.prompt):
                    continue
            for sample in sorted(run.open):
                self._advance(run, sample, event)
            if not run.open:
                del runs[request_id]
        return True

    def _score(self, run: Run, event: Event) -> None:
        end = min(len(run.prompt), run.num_scored + run.script.score_chunk)
        self._send_scores(run, run.num_scored, run.prompt[run.num_scored : end], event)
        run.num_scored = end

    def _send_scores(self, run: Run, first: int, ids: Sequence[int], event: Event) -> None:
        num_top = run.submit.prompt_logprobs.top_logprobs
        event.prompt_logprobs.add(
            request_id=run.submit.request_id,
            attempt=run.submit.attempt,
            first_position=first,
            logprobs=[
                prompt_score(position, token_id, num_top, self.vocabulary_size)
                for position, token_id in enumerate(ids, first)
            ],
        )

    def _advance(self, run: Run, sample: int, event: Event) -> None:
        script, stop = run.script, run.submit.stop
        tokens = script.tokens[sample % len(script.tokens)]
        first = run.sent.get(sample, 0)
        ids: list[int] = []
        reason, stop_id = None, None
        while len(ids) < script.chunk and reason is None:
            position = first + len(ids)
            if position >= len(tokens):
                reason = common_pb2.FINISH_REASON_LENGTH
                break
            ids.append(tokens[position])
            if tokens[position] in stop.stop_token_ids and position + 1 > stop.min_tokens:
                reason, stop_id = common_pb2.FINISH_REASON_STOP, tokens[position]
            elif position + 1 >= min(stop.max_tokens, len(tokens)):
                reason = common_pb2.FINISH_REASON_LENGTH
        if ids:
            self._send_tokens(run, sample, first, ids, event)
            if script.repeat_deltas:
                start = max(0, first - 2)
                self._send_tokens(run, sample, start, [*tokens[start:first], *ids], event)
        run.sent[sample] = first + len(ids)
        if reason is not None and not script.hides_end:
            run.open.discard(sample)
            self._finish(run, sample, reason, stop_id, event)

    def _send_tokens(
        self, run: Run, sample: int, first: int, ids: Sequence[int], event: Event
    ) -> None:
        if run.submit.stream and len(ids) == 1 and not run.submit.HasField("logprobs"):
            event.columns.streams.append(run.submit.stream + sample)
            event.columns.indices.append(first)
            event.columns.ids.extend(ids)
            return
        tokens = event.tokens.add(
            request_id=run.submit.request_id,
            attempt=run.submit.attempt,
            sample=sample,
            first_index=first,
            ids=ids,
        )
        if run.submit.HasField("logprobs"):
            for index, token_id in enumerate(ids):
                own = run.script.logprob
                own = -0.5 - (first + index) % 3 if own is None else own
                entry = tokens.logprobs.add(token_id=token_id, logprob=own)
                for rank in range(run.submit.logprobs.top_logprobs):
                    entry.top.add(token_id=rank + 5, logprob=-1.0 - rank)

    def _finish(
        self,
        run: Run,
        sample: int,
        reason: common_pb2.FinishReason.ValueType,
        stop_id: int | None,
        event: Event,
    ) -> None:
        if self.num_ends_to_lose:
            self.num_ends_to_lose -= 1
            return
        event.finished.add(
            request_id=run.submit.request_id,
            attempt=run.submit.attempt,
            sample=sample,
            reason=reason,
            stop_token_id=stop_id,
            completion_tokens=run.sent.get(sample, 0),
            cached_prompt_tokens=len(run.prompt) // 2,
            timeline=self._timeline(run, sample),
        )

    def _timeline(self, run: Run, sample: int) -> common_pb2.Timeline:
        if run.script.timelines:
            return run.script.timelines[sample]
        return common_pb2.Timeline(
            worker_id=self.worker_id,
            steps=run.steps,
            first_token_time=duration(0.25),
            fills=self._fills(run),
        )

    def _fills(self, run: Run) -> list[common_pb2.FillTimeline]:
        end_token = (len(run.prompt) - 1) // PAGE_SIZE * PAGE_SIZE
        if run.script.fill_by is None or not end_token or not run.submit.prefill_candidates:
            return []
        worker_id = run.submit.prefill_candidates[run.script.fill_by].worker_id
        for other in self.others:
            if other.worker_id == worker_id and not run.script.fill_failure:
                other.hold(run.prompt, run.submit.cache_salt, end_token // PAGE_SIZE)
        return [
            common_pb2.FillTimeline(
                source=common_pb2.FILL_SOURCE_PREFILL,
                worker_id=worker_id,
                end_token=end_token,
                failure=run.script.fill_failure,
            )
        ]


def prompt_score(
    position: int, token_id: int, num_top: int, vocabulary_size: int
) -> common_pb2.TokenLogprob:
    """Log-probability of a prompt's token, which is the 1st to 3rd most likely one."""
    rank = position % 3
    top = [
        common_pb2.TopLogprob(
            token_id=(token_id + other - rank) % vocabulary_size, logprob=-0.5 - other
        )
        for other in range(num_top)
    ]
    return common_pb2.TokenLogprob(token_id=token_id, logprob=-0.5 - rank, top=top)


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


async def _main() -> None:
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser()
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", default="Hello from a worker without an engine.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--worker-id", default="decode-1")
    parser.add_argument("--role", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--ready-file", type=Path)
    flags = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(flags.model_dir / "tokenizer.json"))
    config = json.loads((flags.model_dir / "config.json").read_text())
    tokens = tokenizer.encode(flags.text, add_special_tokens=False).ids
    end = config.get("eos_token_id", 0)

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        if submit.stop.ignore_eos:
            repeats = submit.stop.max_tokens // len(tokens) + 1
            return Script(tokens=[(tokens * repeats)[: submit.stop.max_tokens]])
        return Script(tokens=[[*tokens, end]])

    worker = FakeWorker(
        flags.model,
        config["vocab_size"],
        script,
        worker_id=flags.worker_id,
        role=worker_pb2.WorkerRole.Value(f"WORKER_ROLE_{flags.role.upper()}"),
        max_context_tokens=config["max_position_embeddings"],
        step_s=flags.step_s,
    )
    await worker.start(flags.port)
    if flags.ready_file:
        content = {"address": worker.address, "pid": os.getpid(), "worker_id": flags.worker_id}
        temporary = flags.ready_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(content))
        temporary.replace(flags.ready_file)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
