"""Steps captured as CUDA graphs: one launch instead of several hundred.

A graph is captured for fixed numbers of rows and requests, and a step is padded to the next larger
graph. There are four kinds of graphs. Decode steps bring one token per request. Steps that verify
drafts bring a few tokens or a tree per request. Ragged steps also bring prompts, and steps of media
prompts with rows of those ("media"). Where another attention kernel is faster for long prompts with
nothing before them, further graphs use it: for any number of prompts with decodes ("prompts"), or
for one prompt alone ("cold").
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.encoder_config import tells_texts_apart
from weft.contract.arrays import Int32Array, Int64Array
from weft.contract.errors import ConfigError
from weft.engine.base.config import MAX_DECODES_BESIDE, MAX_TREE_REQUESTS, EngineConfig
from weft.engine.base.layer_waits import LayerWaits
from weft.engine.base.state_rows import StateRows
from weft.engine.executor.device_inputs import DeviceInputs
from weft.engine.executor.encodings import StepArrays, StepDecodes
from weft.engine.executor.media_inputs import MediaInputs
from weft.engine.executor.ragged_columns import RaggedColumns
from weft.engine.executor.rotations import SlotRotations
from weft.engine.executor.step_input import StepInput
from weft.engine.model.interface import Model, can_capture
from weft.engine.model.loader import LoadedModel
from weft.engine.parallel.linked_stages import BorderRows, LinkedStages
from weft.kernels.ops.attention import is_faster_by_lengths, is_faster_when_cold
from weft.kernels.ops.attention.spec import MAX_TREE_ROWS, AttentionMetadata
from weft.kernels.ops.latent_attention import is_faster_uncompressed
from weft.kernels.shared.side_stream import rehearsal

logger = logging.getLogger(__name__)

_SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_LARGE_STEP = 64
MAX_RAGGED_TOKENS = 8192 + MAX_DECODES_BESIDE
"""Most rows of a captured step. A longer step keeps the device busy for longer than its launches
take, so a graph would gain nothing.
"""
_RAGGED_SIZES = (
    *(16, 24, 32, 48, 64, 96, 128, 192),
    *(256, 320, 384, 448, 512, 640, 768, 896),
    *(1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584),
    *(4096, 5120, 6144, 7168, 8192),
)
MEDIA_SIZES = (256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1792, 2048)
"""Rows of captured steps with media. Longer ones of an 8B keep an H200 busy for about as long as
their launches take its host.
"""
MAX_VERIFY_ROWS = 8
"""Most rows per request in a step that verifies chains, whatever the number of requests."""
TREE_REQUESTS = (1, 2, MAX_TREE_REQUESTS)
"""Numbers of requests for which steps that verify trees are captured. With more requests, trees
cost more than they gain.
"""
FEW_REQUESTS = 8
"""Most requests of the smaller ragged graphs, for prompts without a large batch of decodes."""
MAX_LONE_ROWS = MAX_TREE_ROWS
"""Most rows of the ragged graphs for one request. Attention computes so few rows, such as the last
rows of a shipped prompt, like decodes. A graph for one request divides a long context among more
programs than a graph for eight does.
"""

Progress = Callable[[int, int, str], None]
"""Called with (done, total, description) while a worker loads and captures."""

_ONE_TOKEN = StepArrays(
    token_ids=np.zeros(1, np.int64),
    positions=np.zeros(1, np.int64),
    places=np.zeros(1, np.int64),
    slots=np.zeros(1, np.int64),
    cu_q_lens=np.array([0, 1], np.int32),
    kv_lens=np.ones(1, np.int32),
    logits_rows=np.zeros(1, np.int64),
    max_q_len=1,
    max_kv_len=1,
)
"""The smallest step. It writes to the null page."""

_ONE_LORA_TOKEN = replace(_ONE_TOKEN, adapter_slots=np.zeros(1, np.int32))


class GraphBucket(NamedTuple):
    """The shape of the steps that one graph runs."""

    tokens: int
    """Rows of the step, padding included."""
    requests: int
    """Most requests; equal to `tokens` in decode steps."""
    kind: Literal["decode", "verify", "tree", "ragged", "media", "prompts", "cold"]
    has_lora: bool = False
    """Whether rows may have adapters."""
    drafts: int = 0
    """Most drafts that each request may bring."""

    @property
    def waits_for_layers(self) -> bool:
        """Whether its steps may have prompts whose pages are still being loaded."""
        return self.kind in ("ragged", "prompts", "cold")

    @property
    def plain(self) -> GraphBucket:
        """The bucket without adapters that has the same rows in every layer."""
        kind = "ragged" if self.kind == "prompts" else self.kind
        return self._replace(has_lora=False, kind=kind)

    @property
    def columns(self) -> RaggedColumns:
        """Layout of the step's arrays; decode steps have none."""
        return _columns_of(self)


@cache
def _columns_of(bucket: GraphBucket) -> RaggedColumns:
    num_logits = min(bucket.tokens, bucket.requests * (1 + bucket.drafts))
    is_tree, is_verify = bucket.kind == "tree", bucket.kind == "verify"
    return RaggedColumns(
        bucket.tokens,
        bucket.requests,
        num_logits,
        1 + bucket.drafts,
        has_trees=is_tree,
        has_requests=is_tree or is_verify,
    )


def step_buckets(
    config: ModelConfig,
    dtype: torch.dtype,
    max_requests: int,
    max_tokens: int,
    *,
    has_lora: bool = False,
    max_drafts: int = 0,
    tree_rows: Sequence[int] = (),
    has_states: bool = False,
    has_media: bool = False,
) -> list[GraphBucket]:
    """Lists the steps to capture, up to the given numbers of requests and tokens.

    Args:
        dtype: Dtype of the model's activations.
        has_lora: Whether each step is also captured with adapters.
        max_drafts: Most drafts of a request in a step; ragged steps have room for them too.
        tree_rows: Rows of each tree, the root included.
        has_states: Whether the model has recurrent layers. Such a model captures only steps without
            prompts, because the host cuts prompts where states are kept.
        has_media: Whether prompts may have media.
    """
    if has_states:
        short = verify_buckets(max_requests, max_tokens, max_drafts)
        buckets = [*decode_buckets(max_requests), *short]
        return [*buckets, *_with_adapters(buckets, has_lora=has_lora)]
    ragged = ragged_buckets(max_requests, max_tokens, max_drafts)
    if config.is_encoder:
        return [*ragged, *_with_adapters(ragged, has_lora=has_lora)]
    prompts = [
        bucket._replace(kind="prompts")
        for bucket in ragged
        if _is_faster_when_cold(config, dtype, bucket.tokens)
    ]
    cold = [
        GraphBucket(bucket.tokens, 1, "cold")
        for bucket in ragged_buckets(1, max_tokens)
        if _is_long_prompt(config, bucket.tokens)
    ]
    verify = verify_buckets(max_requests, max_tokens, max_drafts)
    trees = tree_buckets(max_requests, max_tokens, tree_rows)
    decodes = decode_buckets(max_requests) if config.head == "tokens" else []
    others = [*decodes, *verify, *trees, *ragged]
    has_media = has_media and captures_media(config, has_states=has_states)
    media = media_buckets(max_requests, max_tokens, max_drafts) if has_media else []
    # "prompts" also takes a single prompt and so makes "cold" needless.
    adapted = _with_adapters([*others, *cold], has_lora=has_lora)
    return [*others, *media, *(prompts or cold), *adapted]


def _with_adapters(buckets: Sequence[GraphBucket], *, has_lora: bool) -> list[GraphBucket]:
    return [bucket._replace(has_lora=True) for bucket in buckets] if has_lora else []


def _bucket_for(bucket: GraphBucket | None, adapters: Int32Array | None) -> GraphBucket | None:
    if bucket is None or adapters is None:
        return bucket
    return bucket._replace(has_lora=True)


def decode_buckets(max_requests: int) -> list[GraphBucket]:
    """Lists the decode steps to capture, smallest first."""
    sizes = [*_SMALL_BUCKETS, *range(256 + _LARGE_STEP, max_requests, _LARGE_STEP)]
    kept = sorted({*(size for size in sizes if size < max_requests), max_requests})
    return [GraphBucket(size, size, "decode") for size in kept]


def verify_buckets(max_requests: int, max_tokens: int, max_drafts: int) -> list[GraphBucket]:
    """Verifying steps without prompts: every number of drafts, with powers of two of requests."""
    sizes = [1 << power for power in range(max_requests.bit_length()) if 1 << power < max_requests]
    most = min(max_drafts, MAX_VERIFY_ROWS - 1)
    return [
        GraphBucket(size * (1 + drafts), size, "verify", drafts=drafts)
        for drafts in range(1, most + 1)
        for size in (*sizes, max_requests)
        if size * (1 + drafts) <= max_tokens
    ]


def tree_buckets(max_requests: int, max_tokens: int, tree_rows: Sequence[int]) -> list[GraphBucket]:
    """Steps that verify trees, without prompts: every tree size, for one request or a few."""
    if max(tree_rows, default=0) > MAX_TREE_ROWS:
        raise ValueError(f"trees of {max(tree_rows)} rows; at most {MAX_TREE_ROWS} are taken")
    return [
        GraphBucket(requests * rows, requests, "tree", drafts=rows - 1)
        for rows in sorted(tree_rows)
        for requests in sorted({min(count, max_requests) for count in TREE_REQUESTS})
        if requests * rows <= max_tokens
    ]


def ragged_buckets(max_requests: int, max_tokens: int, max_drafts: int = 0) -> list[GraphBucket]:
    """Lists the ragged steps to capture, by rows and then by requests: for one request (up to
    MAX_LONE_ROWS rows), for a few, and for `max_requests`.
    """
    max_tokens = min(max_tokens, MAX_RAGGED_TOKENS)
    sizes = [*(size for size in _RAGGED_SIZES if size < max_tokens), max_tokens]
    bounds = {min(FEW_REQUESTS, max_requests), max_requests}
    return [
        GraphBucket(size, bound, "ragged", drafts=max_drafts)
        for size in sizes
        for bound in sorted(bounds | {1} if size <= MAX_LONE_ROWS else bounds)
    ]


def captures_steps(config: EngineConfig, loaded: LoadedModel) -> bool:
    """Whether steps run as captured graphs. All ranks ask together: some models try a pass."""
    if not (config.is_on_gpu and config.cuda_graphs) or loaded.config.attends_to_clips:
        return False
    return can_capture(loaded.model)


def captures_media(config: ModelConfig, *, has_states: bool) -> bool:
    """Whether there are captured steps with media. Attention where media's tokens see one another
    both ways, or all tokens see a clip, is not captured.
    """
    sees_both_ways = config.vision is not None and config.vision.sees_both_ways
    return not (has_states or sees_both_ways or config.attends_to_clips)


def media_buckets(max_requests: int, max_tokens: int, max_drafts: int) -> list[GraphBucket]:
    """Lists the steps with media to capture. They have no adapters."""
    return [
        GraphBucket(size, max_requests, "media", drafts=max_drafts)
        for size in MEDIA_SIZES
        if size <= max_tokens
    ]


class _ShortBuckets:
    def __init__(self, buckets: Sequence[GraphBucket]) -> None:
        self._buckets = buckets
        self._max_drafts = max((bucket.drafts for bucket in buckets), default=0)
        self._found: dict[tuple[int, int], GraphBucket | None] = {}

    def with_room(self, num_requests: int, max_q_len: int) -> GraphBucket | None:
        if max_q_len > 1 + self._max_drafts:
            return None
        key = (num_requests, max_q_len)
        if key not in self._found:
            self._found[key] = next(
                (
                    bucket
                    for bucket in self._buckets
                    if bucket.requests >= num_requests and bucket.drafts >= max_q_len - 1
                ),
                None,
            )
        return self._found[key]


class GraphBuckets:
    def __init__(self, config: ModelConfig, buckets: Sequence[GraphBucket]) -> None:
        self._config = config
        self.sizes = sizes = sorted({bucket._replace(has_lora=False) for bucket in buckets})
        """All buckets, without adapters."""
        self._is_agreed = False
        self._agreed: GraphBucket | None = None
        self._decode = _next_of([bucket for bucket in sizes if bucket.kind == "decode"])
        self._cold = _next_of([bucket for bucket in sizes if bucket.kind == "cold"])
        self._media = _next_of([bucket for bucket in sizes if bucket.kind == "media"])
        self._prompts = frozenset(bucket for bucket in sizes if bucket.kind == "prompts")
        self._verify = _ShortBuckets([bucket for bucket in sizes if bucket.kind == "verify"])
        self._tree = _ShortBuckets([bucket for bucket in sizes if bucket.kind == "tree"])
        ragged = [bucket for bucket in sizes if bucket.kind == "ragged"]
        bounds = sorted({bucket.requests for bucket in ragged})
        self._ragged = [(n, _next_of([b for b in ragged if b.requests == n])) for n in bounds]
        self.ragged_sizes = sorted({bucket.tokens for bucket in ragged})
        """Token counts that steps with prompts are padded to, ascending."""

    def common(self, wanted: Sequence[GraphBucket]) -> GraphBucket | None:
        """The bucket that steps of several engines share, whose own ones are `wanted`, all `plain`;
        None: they run without graphs. Decodes share the largest bucket, other steps a ragged one
        unless all want the same.
        """
        kinds = {bucket.kind for bucket in wanted}
        if kinds == {"decode"} or (len(set(wanted)) == 1 and kinds <= {"verify", "tree"}):
            return max(wanted)
        tokens, requests = max(b.tokens for b in wanted), max(b.requests for b in wanted)
        num_logits = max(b.columns.max_logits for b in wanted)
        several = max(0 if b.kind == "decode" else b.columns.max_several for b in wanted)
        return next(
            (
                bucket
                for bucket in self.sizes
                if bucket.kind == "ragged"
                and bucket.tokens >= tokens
                and bucket.requests >= requests
                and bucket.columns.max_logits >= num_logits
                and bucket.columns.max_several >= several
            ),
            None,
        )

    @contextmanager
    def agreed(self, bucket: GraphBucket | None) -> Iterator[None]:
        """Meanwhile all steps take this bucket, from `common`, with the step's adapters."""
        self._is_agreed, self._agreed = True, bucket
        try:
            yield
        finally:
            self._is_agreed = False

    def of(self, arrays: StepArrays) -> GraphBucket | None:
        """None: the step runs without a graph."""
        bucket = self._agreed_for(arrays) if self._is_agreed else self._size_of(arrays)
        return _bucket_for(bucket, arrays.adapter_slots)

    def of_media(self, arrays: StepArrays) -> GraphBucket | None:
        """As `of`, for a step with rows of media or among them. A lone prompt runs without a graph:
        no other request waits for its launches, and it needs no padding.
        """
        is_plain = arrays.adapter_slots is None and arrays.ancestors is None
        if self._is_agreed or not is_plain or len(arrays.slots) == 1:
            return None
        num_several = len(arrays.slots) - arrays.first_several
        bucket = _with_room(self._media, len(arrays.token_ids), num_several)
        if bucket is None or len(arrays.slots) > bucket.requests:
            return None
        return bucket if len(arrays.logits_rows) <= bucket.columns.max_logits else None

    def _agreed_for(self, arrays: StepArrays) -> GraphBucket | None:
        if self._agreed is None or self._agreed.kind != "ragged":
            return self._agreed
        cold = self._agreed._replace(kind="prompts")
        takes_cold = arrays.max_q_len > 1 and arrays.is_cold and arrays.adapter_slots is None
        return cold if takes_cold and cold in self._prompts else self._agreed

    def of_decodes(self, step: StepInput) -> GraphBucket | None:
        """The bucket of a step of decodes alone at positions that the host knows; None: another
        path runs the step.
        """
        if not step.is_decodes or step.num_decodes > len(self._decode):
            return None
        if self._is_agreed:
            is_decode = self._agreed is not None and self._agreed.kind == "decode"
            return _bucket_for(self._agreed, step.adapters) if is_decode else None
        return _bucket_for(self._decode[step.num_decodes - 1], step.adapters)

    def of_requests(self, step: StepInput) -> GraphBucket | None:
        """The bucket of a step that is sent by its requests; None: it must be sent by rows."""
        if not step.is_by_requests:
            return None
        if self._is_agreed:
            is_short = self._agreed is not None and self._agreed.kind in ("verify", "tree")
            return _bucket_for(self._agreed, step.adapters) if is_short else None
        sizes = self._tree if step.has_trees else self._verify
        return _bucket_for(sizes.with_room(len(step.slots), step.max_count), step.adapters)

    def _takes_earlier_heads(self, arrays: StepArrays) -> bool:
        """Whether attention to latents computes heads of positions before the step. Their number is
        unknown to a graph, so such a step runs without one.
        """
        if self._config.latent is None or not self._prompts:
            return False
        least = min(bucket.tokens for bucket in self._prompts)
        return len(arrays.token_ids) >= least and arrays.num_earlier is not None

    def _size_of(self, arrays: StepArrays) -> GraphBucket | None:
        num_tokens, num_requests = len(arrays.token_ids), len(arrays.slots)
        if arrays.is_decode:
            return self._decode[num_tokens - 1] if num_tokens <= len(self._decode) else None
        if arrays.ancestors is not None:
            return self._tree.with_room(num_requests, arrays.max_q_len)
        # Short prompts take ragged graphs like other prompts, since drawing is captured for these.
        if arrays.max_q_len <= MAX_VERIFY_ROWS and arrays.has_no_prompts:
            bucket = self._verify.with_room(num_requests, arrays.max_q_len)
            if bucket is not None:
                return bucket
        lengths = (num_tokens, num_requests, arrays.max_q_len, arrays.max_kv_len)
        prompts = self._prompts if arrays.adapter_slots is None else frozenset()
        if not prompts and _is_faster_by_lengths(self._config, lengths):
            has_cold = num_requests == 1 and num_tokens <= len(self._cold)
            return self._cold[num_tokens - 1] if has_cold else None
        num_several = num_requests - arrays.first_several
        for bound, buckets in self._ragged:
            bucket = None
            if num_requests <= bound:
                bucket = _with_room(buckets, num_tokens, num_several)
            if bucket is not None and len(arrays.logits_rows) <= bucket.columns.max_logits:
                cold = bucket._replace(kind="prompts")
                if cold in prompts and arrays.is_cold:
                    return cold
                return None if self._takes_earlier_heads(arrays) else bucket
        return None


class StepGraphs:
    """Forward passes, each captured for one bucket.

    Args:
        model: On a CUDA device.
        pool: Its KV pool, which must not move.
        on_capture: Called before the first capture and after each, with (captured, total, time and
            memory in words).
        rotations: Rotations of slots with images; None: there are none.
        media: What steps with media read; None: no captured step has any.
        has_logits: Whether this process computes logits.
        late: What steps with prompts wait for, layer by layer; None: pages are loaded whole.
        beside: Stages of other hosts, whose rows come before a graph and go after it; None: there
            are none.

    Raises:
        ConfigError: There is not enough memory for the graphs.
    """

    def __init__(
        self,
        model: Model,
        pool: torch.Tensor,
        inputs: DeviceInputs,
        buckets: Sequence[GraphBucket],
        on_capture: Progress = lambda done, total, what: None,
        rotations: SlotRotations | None = None,
        media: MediaInputs | None = None,
        *,
        has_logits: bool = True,
        late: LayerWaits | None = None,
        beside: LinkedStages | None = None,
    ) -> None:
        self._rotations, self._has_logits, self._late = rotations, has_logits, late
        self._media, self._beside = media, beside
        self._model = model
        self._pool = pool
        self._inputs = inputs
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[GraphBucket, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._border_rows: dict[GraphBucket, BorderRows] = {}
        self._types = self.new_types(buckets, pool.device)
        self.buckets = GraphBuckets(model.config, buckets)
        self.bytes_of_each: list[int] = []
        """Device memory of each graph, the largest step first."""
        self.capture_s = 0.0
        inputs.keep_ragged(max(b.columns.num_bytes for b in buckets))
        began, free = time.perf_counter(), torch.cuda.mem_get_info(pool.device)[0]
        # The largest graph is captured first, so that the smaller ones fit into its memory.
        on_capture(0, len(buckets), "capturing graphs")
        with capturing("steps"):
            for bucket in sorted(buckets, reverse=True):
                self._graphs[bucket] = self._capture(bucket)
                free_before, free = free, torch.cuda.mem_get_info(pool.device)[0]
                self.bytes_of_each.append(max(0, free_before - free))
                self.capture_s = time.perf_counter() - began
                on_capture(len(self._graphs), len(buckets), f"capturing graphs: {self._cost}")

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_of_each)

    @property
    def _cost(self) -> str:
        return f"{self.capture_s:.1f} s, {self.num_bytes / 2**20:.0f} MiB"

    def new_types(
        self, buckets: Sequence[GraphBucket], device: torch.device
    ) -> torch.Tensor | None:
        """Fixed memory for `Step.token_types`; None: the model has no token types."""
        if not tells_texts_apart(self._model.config):
            return None
        most = max(bucket.tokens for bucket in buckets)
        return torch.zeros(most, dtype=torch.int64, device=device)

    def bucket_of(self, arrays: StepArrays) -> GraphBucket | None:
        """None: the step runs without a graph."""
        return self.buckets.of(arrays)

    def results(self) -> Iterator[tuple[GraphBucket, torch.Tensor]]:
        """Each bucket, and the tensor [L, hidden] that holds its result after a step."""
        return ((bucket, hidden) for bucket, (_, hidden) in self._graphs.items())

    def forward(
        self, arrays: StepArrays, bucket: GraphBucket, step: StepInput | None = None
    ) -> torch.Tensor:
        """Runs a step with its bucket's graph. Returns [L, hidden], valid until the next step. Only
        steps with media need `step`, from which `arrays` are made.
        """
        if bucket.kind == "media":
            assert self._media is not None
            assert step is not None
            self._media.send(step)
        self._inputs.send_states(arrays.states, bucket.requests)
        if bucket.kind == "decode":
            self._inputs.send_decodes(StepDecodes.of_arrays(arrays), bucket.tokens)
            if arrays.verify_rows is not None:
                self._inputs.send_verify_rows(arrays.verify_rows)
        else:
            self._inputs.send_ragged(arrays, bucket.columns)
        return self._replay(bucket)[: len(arrays.logits_rows)]

    def forward_decodes(
        self, decodes: StepDecodes, bucket: GraphBucket, states: StateRows | None = None
    ) -> torch.Tensor:
        """`forward` of a step of one row per request."""
        self._inputs.send_states(states, bucket.requests)
        self._inputs.send_decodes(decodes, bucket.tokens)
        return self._replay(bucket)[: len(decodes.slots)]

    def forward_pooled(
        self,
        arrays: StepArrays,
        rows: Int64Array,
        bucket: GraphBucket,
        types: Int64Array | None,
    ) -> torch.Tensor:
        """`forward` of a step from which no token is drawn.

        Args:
            arrays: The step; its `logits_rows` are empty.
            rows: [P]: rows whose hidden states are wanted; unless the model is an encoder, at most
                as many as the bucket has rows of logits.

        Returns:
            [P, hidden], valid until the next step.
        """
        if not self._model.config.is_encoder:
            return self.forward(replace(arrays, logits_rows=rows), bucket)
        self._inputs.send_ragged(arrays, bucket.columns)
        (wanted,) = self._inputs.send((rows,))
        if self._types is not None:
            if types is None:
                self._types.zero_()
            else:
                (sent,) = self._inputs.send((types,))
                self._types[: len(types)].copy_(sent)
        return self._replay(bucket).index_select(0, wanted)

    def forward_requests(self, step: StepInput, bucket: GraphBucket) -> torch.Tensor:
        """`forward` of a step that is sent by its requests. If the step verifies drafts made on the
        device, it starts these drafts first.
        """
        self._inputs.send_states(step.states, bucket.requests)
        self._inputs.send_requests(step, bucket.columns)
        if step.drafts is not None:
            step.drafts.begin_within(bucket.requests, step.adapters, step.num_decodes)
        return self._replay(bucket)[: step.num_rows]

    def _replay(self, bucket: GraphBucket) -> torch.Tensor:
        graph, hidden = self._graphs[bucket]
        beside = self._beside
        with nullcontext() if beside is None else beside.replaying(self._border_rows[bucket]):
            graph.replay()
        return hidden

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Captures device work in the memory that all graphs share. They can share it because only
        one runs at a time.

        Args:
            run: The work, which reads inputs at fixed addresses. It is called twice.

        Returns:
            The graph, and the tensor that holds its result after each replay.
        """
        return capture_graph(run, self._pool.device, self._memory)

    def send_nothing(self, bucket: GraphBucket) -> None:
        """Sends the smallest step in a bucket's layout, of the dummy slot. Without it the input
        memory would hold a step of another layout while a graph is captured.
        """
        step = _ONE_LORA_TOKEN if bucket.has_lora else _ONE_TOKEN
        step = replace(step, slots=np.array([self._inputs.null_row]))
        self._inputs.send_states(None, bucket.requests)
        if bucket.kind == "decode":
            self._inputs.send_decodes(StepDecodes.of_arrays(step), bucket.tokens)
        else:
            self._inputs.send_ragged(step, bucket.columns)

    def run_nothing(self, bucket: GraphBucket) -> None:
        """Runs the smallest step with a bucket's graph. It changes no request's pages."""
        self.send_nothing(bucket)
        self._replay(bucket)

    def _capture(self, bucket: GraphBucket) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        self.send_nothing(bucket)
        graph, hidden = self.capture(lambda: self._forward(bucket))
        if self._beside is not None:
            self._border_rows[bucket] = self._beside.captured
        with torch.inference_mode():
            # The LM head is not captured here, since its results are large, but its kernels are
            # compiled.
            if not self._has_logits:
                return graph, hidden
            self._model.logits(hidden)
            if bucket.has_lora and self._inputs.changes_logits:
                lora = self._inputs.lora_of(np.zeros(hidden.shape[0], np.int32))
                self._model.logits(hidden, lora)
        return graph, hidden

    def _forward(self, bucket: GraphBucket) -> torch.Tensor:
        if bucket.kind == "decode":
            step = self._inputs.decode_batch(bucket.tokens, has_lora=bucket.has_lora)
        else:
            step = self._inputs.ragged_batch(bucket.columns, has_lora=bucket.has_lora)
        step.groups = tuple(_with_bounds(group, bucket) for group in step.groups)
        # A bucket with trees may also have prompts, so it is not listed. Which rows of an encoder
        # are wanted depends on the pooling.
        step.wants_all = bucket.kind in ("decode", "verify") or self._model.config.is_encoder
        if bucket.waits_for_layers:
            step.late = self._late
        if self._types is not None:
            step.token_types = self._types[: bucket.tokens]
        if self._rotations is not None:
            self._rotations.turn_captured(step)
        if bucket.kind == "media" and self._media is not None:
            self._media.insert_captured(step)
        return self._model.forward(step, self._pool)


def capture_graph(
    run: Callable[[], torch.Tensor], device: torch.device, memory: Any
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Captures device work.

    Args:
        run: The work, which reads inputs at fixed addresses. It is called twice.
        memory: `torch.cuda.graph_pool_handle()` of the graphs that share memory, because only one
            of them runs at a time.

    Returns:
        The graph, and the tensor that holds its result after each replay.
    """
    with torch.inference_mode():
        # The rehearsal compiles kernels and lets libraries choose algorithms, which a capture must
        # not do.
        with rehearsal():
            run()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with (
            without_collection(),
            torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"),
        ):
            result = run()
    return graph, result


@contextmanager
def without_collection() -> Iterator[None]:
    """Disables garbage collection. If a collection freed the graphs of a discarded engine, it would
    abort the capture of another engine.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def capturing(what: str) -> Iterator[None]:
    """Logs time and memory of a capture on the current device. Turns out-of-memory into
    ConfigError.
    """
    logger.info("capturing the CUDA graphs of %s; a first start also compiles their kernels", what)
    began, free = time.perf_counter(), _free_bytes()
    try:
        yield
        cost = time.perf_counter() - began, max(0, free - _free_bytes()) / 2**20
        logger.info("captured the CUDA graphs of %s: %.1f s, %.0f MiB", what, *cost)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory for the CUDA graphs of {what}: {error}; make the KV pool smaller, lower "
            "max_running_requests, or set cuda_graphs = false"
        ) from error


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _is_faster_when_cold(config: ModelConfig, dtype: torch.dtype, tokens: int) -> bool:
    if config.latent is not None:
        # The layers make the same choice before they compute heads.
        return is_faster_uncompressed(dtype, config.head_dim, config.value_dim, tokens)
    return is_faster_when_cold(dtype, config.head_dim, tokens)


def _is_long_prompt(config: ModelConfig, tokens: int) -> bool:
    return _is_faster_by_lengths(config, (tokens, 1, tokens, tokens))


def _is_faster_by_lengths(config: ModelConfig, lengths: tuple[int, int, int, int]) -> bool:
    if config.latent is not None or not config.has_equal_layers or config.is_encoder:
        return False
    shape = (config.num_heads, config.head_dim)
    return is_faster_by_lengths(*shape, *lengths, config.common_window)


def _next_of(buckets: Sequence[GraphBucket]) -> list[GraphBucket]:
    ordered = sorted(buckets)
    most = ordered[-1].tokens if ordered else 0
    return [next(b for b in ordered if b.tokens >= count) for count in range(1, most + 1)]


def _with_room(
    buckets: Sequence[GraphBucket], num_tokens: int, num_several: int
) -> GraphBucket | None:
    """The smallest bucket for so many rows and requests of several rows.

    Args:
        buckets: As `_next_of` returns them.
    """
    while num_tokens <= len(buckets):
        bucket = buckets[num_tokens - 1]
        if bucket.columns.max_several >= num_several:
            return bucket
        num_tokens = bucket.tokens + 1
    return None


def _with_bounds(group: AttentionMetadata, bucket: GraphBucket) -> AttentionMetadata:
    if bucket.kind in ("verify", "tree"):
        return group._replace(max_q_len=1 + bucket.drafts)
    if bucket.kind == "cold":
        # With one request, a context as long as the number of rows shows that nothing comes before
        # them. Rows of padding come last, so no other row sees them.
        return group._replace(max_kv_len=bucket.tokens)
    return group._replace(is_cold=bucket.kind == "prompts")
