"""Converts submits and handles to requests; refuses those that can never run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from weft.checkpoint.audio_config import AlignmentConfig
from weft.checkpoint.pooling import PoolingConfig
from weft.contract.errors import ContextTooLong, InvalidRequest
from weft.contract.handle import KvHandle
from weft.contract.keys import MediaNames, PageKeys, PromptMedia, namespace_digest, token_bytes
from weft.contract.layout import CacheLayout
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.spans import MediaSpan
from weft.contract.submits import MAX_ROUTE_BYTES, SampleProgress, Submit
from weft.contract.tasks import HEADED_OUTPUTS, MAX_LABELS, PoolingParams, Task
from weft.contract.timeline import Timeline
from weft.contract.token_ids import TokenIds, are_below, token_ids
from weft.engine.base.config import EngineConfig
from weft.engine.requests.beam_search import MAX_CANDIDATES, BeamSearch
from weft.engine.requests.request import (
    Beams,
    ChatSession,
    DraftState,
    FillTask,
    PageSources,
    Request,
    RequestKey,
)
from weft.engine.sampling.sampler import derive_seed

NO_SAMPLING = SamplingParams(temperature=0.0)
NO_STOP = StopCriteria()


class Intake:
    """Builds the engine's requests.

    Args:
        layout: Page layout, part of the namespace.
        model_digest: 32 bytes.
        vocab_size: Token ids are below it.
        max_tokens: Longest prompt and output together that the context and the pool allow.
        adapter_parts: Names of the projections that adapters may change here.
        pooling: The task that the model serves, and how it makes vectors; None: it generates.
        embedding_size: Entries of an embedding; 0: unknown.
        encoder_digest: 32 bytes that name the encoder of media; empty: prompts have none.
        has_uncut_spans: Whether tokens of a medium attend to one another both ways.
        beam_pages: Most pages of a beam search; 0: this engine has none.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: CacheLayout,
        model_digest: bytes,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_tokens: int,
        adapter_parts: Collection[str] = (),
        pooling: PoolingConfig | None = None,
        embedding_size: int = 0,
        *,
        encoder_digest: bytes = b"",
        has_uncut_spans: bool = False,
        aligned_by: AlignmentConfig | None = None,
        beam_pages: int = 0,
    ) -> None:
        self._beam_pages = beam_pages
        self._max_running = config.max_running_requests
        self._aligned_by = aligned_by
        self.encoder_digest = encoder_digest
        self._has_uncut_spans = has_uncut_spans
        self._media_names = MediaNames() if encoder_digest else None
        self._page_size = config.page_size
        self._layout = layout.describe()
        self._routes = layout.routes
        # The projections decide which tensors a lenient load ignores, and so an adapter's pages.
        self._adapted_layout = f"{self._layout};adapted={','.join(sorted(adapter_parts))}"
        self.model_digest = model_digest
        self.vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._pooling = pooling
        self._task: Task = "generate" if pooling is None else pooling.task
        self._embedding_size = embedding_size
        self._arrivals = itertools.count()
        self._namespaces: dict[tuple[str, bytes], bytes] = {}

    def namespace(self, cache_salt: str, adapter: bytes = b"") -> bytes:
        """Namespace for this model and layout, a tenant's salt and an adapter; 32 bytes."""
        known = self._namespaces.get((cache_salt, adapter))
        if known is None:
            known = namespace_digest(
                self.model_digest,
                self._adapted_layout if adapter else self._layout,
                adapter_digest=adapter,
                cache_salt=cache_salt,
            )
            if len(self._namespaces) < 1024:
                self._namespaces[cache_salt, adapter] = known
        return known

    def change_model(self, digest: bytes) -> None:
        """The model has other weights from now on, so that no page of the old ones is found."""
        self.model_digest = digest
        self._namespaces.clear()

    def rename(self, request: Request) -> None:
        """Gives a request whose published pages are its no more the present namespace."""
        request.namespace = self.namespace(request.cache_salt, request.adapter)
        prompt = token_ids(request.tokens[: request.num_prompt_tokens])
        request.keys = self._keys(request.namespace, prompt, request.spans)

    def from_submit(self, submit: Submit, now: float) -> Request:
        """Builds the first sample of a submit that is to run; its other samples are forked from it.

        A resumed request brings the tokens of its earlier attempts and continues as if it had
        sampled them here. These tokens may already have ended it (`end_of`). Raises InvalidRequest
        or ContextTooLong if the submit can never run.
        """
        num_prompt = len(submit.prompt)
        if num_prompt == 0:
            raise InvalidRequest("the prompt has no tokens", stage="validate", param="prompt")
        if not are_below(submit.prompt, self.vocab_size):
            message = f"a prompt token id is not below the vocabulary size {self.vocab_size}"
            raise InvalidRequest(message, stage="validate", param="prompt")
        for token_id in submit.sampling.logit_bias:
            if not 0 <= token_id < self.vocab_size:
                message = f"token id {token_id} is not below the vocabulary size {self.vocab_size}"
                raise InvalidRequest(message, stage="validate", param="logit_bias")
        if submit.prompt_logprobs is not None and submit.sampling.n > 1:
            raise InvalidRequest("only with n = 1", stage="validate", param="prompt_logprobs")
        pool = self._pool(submit)
        wanted = submit.stop.max_tokens
        room = self._max_tokens - num_prompt
        if wanted == 1:
            room += (
                1  # A token that is only sampled needs no position: the prompt may fill them all.
            )
        if pool is not None:
            room, wanted = room + 1, 0
        if room < 1:
            message = (
                f"the prompt has {num_prompt} tokens; prompt and output may have "
                f"{self._max_tokens} here"
            )
            raise ContextTooLong(message, stage="validate", param="prompt")
        max_tokens = room if wanted is None else min(room, wanted)
        unforked = self._samples(submit, max_tokens)
        sample = next(iter(unforked))
        namespace = self.namespace(submit.cache_salt, submit.adapter)
        progress = unforked.pop(sample)
        beams = self._beams(submit, max_tokens)
        request = Request(
            key=RequestKey(submit.gateway, submit.request_id, submit.attempt),
            sample=sample,
            tokens=[*submit.prompt, *progress],
            num_prompt_tokens=num_prompt,
            params=submit.sampling,
            stop=submit.stop,
            max_tokens=max_tokens,
            eos_token_ids=self._eos,
            seed=derive_seed(submit.sampling.seed, sample),
            top_logprobs=submit.top_logprobs if beams is None else beams.search.num_candidates,
            scales_logprobs=submit.scales_logprobs,
            prompt_logprobs=submit.prompt_logprobs if num_prompt > 1 else None,
            routes_from=self._routes_from(submit, max_tokens),
            keys=self._keys(namespace, submit.prompt, submit.spans),
            arrival=next(self._arrivals),
            first_token_deadline=now + submit.first_token_timeout_s,
            deadline=now + submit.total_timeout_s,
            timeline=Timeline(submitted_at=now),
            pool=pool,
            sources=PageSources(list(submit.candidates)),
            cache_salt=submit.cache_salt,
            priority=submit.priority,
            tenant=submit.tenant,
            chat=ChatSession(submit.session_id, submit.ends_session),
            namespace=namespace,
            spans=submit.spans,
            uncut_spans=submit.spans if self._has_uncut_spans else (),
            adapter=submit.adapter,
            traceparent=submit.traceparent,
            drafts=DraftState(submit.sampling.speculates),
            unforked_samples=unforked,
            old_versions=_elsewhere(progress),
            beams=beams,
        )
        if beams is not None:
            beams.requests.append(request)
        return request

    def _keys(self, namespace: bytes, prompt: TokenIds, spans: Sequence[MediaSpan]) -> PageKeys:
        packed = token_bytes(prompt)
        if self._media_names is None:
            return PageKeys(namespace, self._page_size, packed)
        media = PromptMedia(spans, self.encoder_digest)
        return PageKeys(namespace, self._page_size, packed, media, self._media_names)

    def _beams(self, submit: Submit, max_tokens: int) -> Beams | None:
        """None: tokens are drawn."""
        sampling, stop = submit.sampling, submit.stop
        if (params := sampling.beams) is None:
            return None
        num_prompt, size = len(submit.prompt), self._page_size
        num_shared, ends = (num_prompt - 1) // size, self._eos.union(stop.stop_token_ids)
        beams = Beams(
            search=BeamSearch(params, len(ends)),
            requests=[],
            num_pages=-(-(num_prompt + max_tokens) // size) - num_shared,
            tells_logprobs=submit.top_logprobs is not None,
        )
        num_pages = num_shared + params.width * beams.num_pages
        wrong = {
            "there is no beam search here": not self._beam_pages,
            f"not with {sampling.not_beside_beams}": bool(sampling.not_beside_beams),
            "not with alternatives to tokens": bool(submit.top_logprobs),
            "not with prompt_logprobs": submit.prompt_logprobs is not None,
            "not with routes of experts": submit.routes_from is not None,
            "an answer comes whole": any(
                one.tokens and one.tokens[-1] not in ends and len(one.tokens) < max_tokens
                for one in submit.progress
            ),
            f"at most {self._max_running} texts run here": params.width > self._max_running,
            f"at most {MAX_CANDIDATES} candidates a text": (
                beams.search.num_candidates > min(MAX_CANDIDATES, self.vocab_size)
            ),
            f"{num_pages} pages of KV, of {self._beam_pages}": num_pages > self._beam_pages,
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise InvalidRequest(message, stage="validate", param="beams")
        return beams

    def _routes_from(self, submit: Submit, max_tokens: int) -> int | None:
        if (first := submit.routes_from) is None:
            return None
        plane, param = self._routes, "return_routed_experts"
        if plane is None:
            message = (
                "this worker keeps no routes of experts: start it with "
                "--enable-return-routed-experts"
            )
            raise InvalidRequest(message, stage="validate", param=param)
        num_prompt = len(submit.prompt)
        if first > num_prompt:
            message = f"routes from position {first} on, of a prompt of {num_prompt} tokens"
            raise InvalidRequest(message, stage="validate", param="routed_experts_start_len")
        num_bytes = plane.all_layers * plane.top_k * plane.number_bytes * submit.sampling.n
        num_bytes *= num_prompt + max_tokens - first
        if num_bytes > MAX_ROUTE_BYTES:
            message = (
                f"routes of up to {num_prompt + max_tokens - first:,} positions take "
                f"{num_bytes:,} bytes, of at most {MAX_ROUTE_BYTES:,}: ask from a later position "
                "on, or lower max_tokens"
            )
            raise InvalidRequest(message, stage="validate", param=param)
        return first

    def _pool(self, submit: Submit) -> PoolingParams | None:
        """None: the submit wants tokens."""
        pool = submit.pool
        wanted: Task = "generate" if pool is None else pool.task
        if wanted != self._task:
            message = f"this model serves the task {self._task}, not {wanted}"
            raise InvalidRequest(message, stage="validate", param="model")
        if pool is None or self._pooling is None:
            return None
        if submit.sampling.n > 1 or submit.progress or submit.prompt_logprobs is not None:
            raise InvalidRequest("only one prompt, and no tokens", stage="validate", param="pool")
        if pool.output == "label_logits" and not 0 < len(pool.label_ids) <= MAX_LABELS:
            message = f"1 to {MAX_LABELS} labels, not {len(pool.label_ids)}"
            raise InvalidRequest(message, stage="validate", param="label_ids")
        if any(not 0 <= label < self.vocab_size for label in pool.label_ids):
            message = f"a label is not below the vocabulary size {self.vocab_size}"
            raise InvalidRequest(message, stage="validate", param="label_ids")
        if pool.output == "alignment":
            return self._alignment(submit, pool)
        if pool.output in HEADED_OUTPUTS and pool.output not in self._pooling.token_heads:
            message = f"this model has no head for the output {pool.output}"
            raise InvalidRequest(message, stage="validate", param="output")
        size = pool.dimensions
        if size is not None and pool.output in HEADED_OUTPUTS:
            message = f"the output {pool.output} has one width"
            raise InvalidRequest(message, stage="validate", param="dimensions")
        if size is not None and not 0 < size <= self._embedding_size:
            message = f"dimensions: must be from 1 to {self._embedding_size}, not {size}"
            raise InvalidRequest(message, stage="validate", param="dimensions")
        normalises = pool.normalises
        if normalises is None or pool.output == "sparse":
            is_vector = pool.task == "embed" and pool.output != "sparse"
            normalises = self._pooling.normalises and is_vector
        return replace(
            pool,
            pooling=self._pooling.pooling,
            normalises=normalises,
            is_whole=self._pooling.is_encoder,
        )

    def _alignment(self, submit: Submit, pool: PoolingParams) -> PoolingParams:
        if self._aligned_by is None:
            message = "this model aligns no tokens to audio"
            raise InvalidRequest(message, stage="validate", param="output")
        end_of_clip = max((span.position + span.length for span in submit.spans), default=0)
        for name, value, least, most in (
            ("aligned_from", pool.aligned_from, max(1, end_of_clip), len(submit.prompt) - 1),
            ("num_frames", pool.num_frames, 1, self._aligned_by.num_frames),
        ):
            if not least <= value <= most:
                message = f"must be from {least} to {most}, not {value}"
                raise InvalidRequest(message, stage="validate", param=name)
        return pool

    def _samples(self, submit: Submit, max_tokens: int) -> dict[int, list[int]]:
        samples: dict[int, list[int]] = {sample: [] for sample in range(submit.sampling.n)}
        for entry in submit.progress:
            self._check_progress(entry, submit.sampling.n, max_tokens)
            if entry.is_finished:
                samples.pop(entry.sample, None)
            else:
                samples[entry.sample] = entry.tokens
        if not samples:
            raise InvalidRequest("every sample is finished", stage="validate", param="progress")
        return samples

    def _check_progress(self, entry: SampleProgress, num_samples: int, max_tokens: int) -> None:
        tokens = entry.tokens
        if not 0 <= entry.sample < num_samples:
            message = f"sample {entry.sample} of {num_samples}"
        elif len(tokens) > max_tokens:
            message = f"{len(tokens)} tokens of sample {entry.sample}, at most {max_tokens} fit"
        elif tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            message = f"a token id is not below the vocabulary size {self.vocab_size}"
        else:
            return
        raise InvalidRequest(message, stage="validate", param="progress")

    def sibling(self, first: Request, sample: int, generated: list[int], now: float) -> Request:
        """Builds another sample of the same prompt; `generated` are the tokens that another worker
        generated for it.
        """
        return Request(
            key=first.key,
            sample=sample,
            tokens=first.tokens[: first.num_prompt_tokens] + generated,
            num_prompt_tokens=first.num_prompt_tokens,
            params=first.params,
            stop=first.stop,
            max_tokens=first.max_tokens,
            eos_token_ids=first.eos_token_ids,
            seed=derive_seed(first.params.seed, sample),
            top_logprobs=first.top_logprobs,
            scales_logprobs=first.scales_logprobs,
            routes_from=first.routes_from,
            keys=self._keys(first.namespace, token_ids(), first.spans),
            arrival=next(self._arrivals),
            first_token_deadline=first.first_token_deadline,
            deadline=first.deadline,
            timeline=Timeline(submitted_at=first.timeline.submitted_at),
            cache_salt=first.cache_salt,
            priority=first.priority,
            tenant=first.tenant,
            chat=first.chat,
            namespace=first.namespace,
            spans=first.spans,
            uncut_spans=first.uncut_spans,
            adapter=first.adapter,
            traceparent=first.traceparent,
            num_cached_tokens=first.num_cached_tokens,
            is_sibling=True,
            old_versions=_elsewhere(generated),
            beams=first.beams,
            drafts=DraftState(first.drafts.wanted),
        )

    def from_handle(
        self, handle: KvHandle, request_id: str, traceparent: str, now: float
    ) -> Request:
        """Builds the compute job of a fill. It has no deadline, since its lease ends it."""
        return Request(
            key=RequestKey(-1, request_id, 0),
            sample=0,
            tokens=list(handle.tokens),
            num_prompt_tokens=handle.end_token,
            params=NO_SAMPLING,
            stop=NO_STOP,
            max_tokens=0,
            eos_token_ids=frozenset(),
            seed=0,
            top_logprobs=None,
            keys=self._keys(handle.namespace, handle.tokens, handle.spans),
            arrival=next(self._arrivals),
            first_token_deadline=math.inf,
            deadline=math.inf,
            timeline=Timeline(submitted_at=now),
            cache_salt=handle.cache_salt,
            priority=handle.priority,
            tenant=handle.tenant,
            namespace=handle.namespace,
            spans=handle.spans,
            tail_spans=handle.tail_spans,
            uncut_spans=handle.spans if self._has_uncut_spans else (),
            adapter=handle.adapter,
            traceparent=traceparent,
            fill=FillTask(handle.lease_id, handle.companion_pages),
        )


def _elsewhere(generated: Sequence[int]) -> list[tuple[str, int]]:
    """`Request.old_versions` of a request that another worker has begun."""
    return [("", len(generated))] if generated else []
