"""The executor of one process: it holds the model and the KV pool, and turns each `StepInput` into
a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from weft.checkpoint.encoder_config import tells_texts_apart
from weft.contract.arrays import Int32Array, Int64Array
from weft.contract.errors import ConfigError
from weft.contract.layout import CacheLayout, num_ring_rows
from weft.engine.base.device_copies import Mark, on_host
from weft.engine.executor.adapter_rows import LoraPool
from weft.engine.executor.alignment import Aligner, Alignments
from weft.engine.executor.device_inputs import DeviceInputs
from weft.engine.executor.device_pool import DevicePool, PinnedRows
from weft.engine.executor.drafts.eager_chains import Chains, EagerChains
from weft.engine.executor.drafts.keeping import DraftKeeper
from weft.engine.executor.draw_graphs import DrawGraphs
from weft.engine.executor.embeddings import MediaEmbeddings
from weft.engine.executor.encodings import StepArrays, StepDecodes
from weft.engine.executor.expert_counts import ExpertCounts
from weft.engine.executor.expert_moves import ExpertMoves
from weft.engine.executor.graphs import GraphBucket, Progress, StepGraphs, step_buckets
from weft.engine.executor.host_inputs import HostInputs
from weft.engine.executor.kv_format import dtype_of
from weft.engine.executor.layer_pools import layer_pool
from weft.engine.executor.media_inputs import MediaInputs
from weft.engine.executor.orders import (
    CopyPages,
    CopyWeights,
    DropExperts,
    EncodeMedia,
    EndRefit,
    JoinWeightGroup,
    KeepTokens,
    LeaveWeightGroup,
    OfferWeights,
    Order,
    PackPieces,
    PackRows,
    PlaceExperts,
    PoisonPages,
    PoisonPieces,
    PrepareProfile,
    ReceiveWeights,
    RefitFromFolder,
    SendExperts,
    ShiftRotations,
    Sleep,
    StartProfile,
    StopProfile,
    TakeExperts,
    UnpackPieces,
    UnpackRows,
    Wake,
    ZeroPages,
    ZeroPieces,
)
from weft.engine.executor.pieces import make_pieces, poison_pages
from weft.engine.executor.pooling import PooledStates, Pooler
from weft.engine.executor.port import ExecutorFacts, Launched, Logits
from weft.engine.executor.profiler import StepProfiler
from weft.engine.executor.rank_jobs import Combine, of_one_rank
from weft.engine.executor.refits import WeightRefits
from weft.engine.executor.rotations import SlotRotations
from weft.engine.executor.routes import PageRoutes, by_page
from weft.engine.executor.sleeping import HostPools, HostWeights, Sleeper, SleepMemory, TensorsOf
from weft.engine.executor.states import DeviceStates, RankBlocks, StateMemory
from weft.engine.executor.step_input import PooledRows, StepInput
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.model.interface import Model
from weft.engine.model.pooled_heads import DenseLayers, PooledHeads
from weft.engine.model.refit import Refit
from weft.engine.model.step import AlignedRows, Gather, Step
from weft.engine.model.weights.packed import PackedTensors
from weft.engine.sampling.device_draws import WAYS, CapturedDraw, Way
from weft.engine.sampling.prompt_scores import PromptScores
from weft.engine.transfer.device_pages import DevicePages, Pages, rows_of_pool
from weft.kernels.ops.pages import copy_pages, page_index
from weft.kernels.ops.sampling.spec import SlotTensors
from weft.kernels.ops.step_rows import keep_tokens
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.kernels.shared.memory import huge_zeros
from weft.pages.memory.page_table import PageTable
from weft.pages.transfer.digest import digest_pages
from weft.pages.transfer.page_pool import HostPool, PagePool

if TYPE_CHECKING:
    from weft.engine.parallel.device_page_ranks import DividedPool
    from weft.engine.parallel.device_peers import DevicePeers
    from weft.engine.parallel.device_stages import DeviceStages
    from weft.engine.parallel.linked_stages import LinkedStages


class Verifying(NamedTuple):
    """Rows of the last step that verify drafts. They come first in the step."""

    step: StepRows
    rows: torch.Tensor
    """[V, 1 + most drafts]: row numbers of each request with drafts, as in
    `StepArrays.verify_rows`.
    """
    num_rows: int


class _Launched(NamedTuple):
    """What `keep` needs of a step."""

    drawing_slots: torch.Tensor
    verifying: Verifying | None
    states: torch.Tensor | None
    """`DraftKeeper.states` after the step; None: no step has run since."""


class RankPool(NamedTuple):
    """One KV pool that all ranks of an engine use."""

    whole: torch.Tensor
    """The pages with the heads of all ranks."""
    own: torch.Tensor
    """This rank's heads, a view of `whole`."""
    pages: DevicePages | None = None
    """Pages over all ranks, mapped by rank 0, where each rank allocates a separate pool."""
    memory: torch.Tensor | None = None
    """[num_pages, bytes of a page] uint8, of which `whole` is a view; None: pages have no more."""
    of_ranks: Sequence[torch.Tensor] = ()
    """The pools of all ranks, where each has all pages and all map them."""
    divided: DividedPool | None = None
    """The pools of the ranks that divide pages, where each has a pool of its own; None: this one
    has all pages.
    """


class LocalExecutor:
    """Owns the KV pool and runs steps on one device.

    Args:
        num_pages: Pages of the first page group, the null page included.
        num_pieces: Pieces of each of the layout's companions, their null pieces included; empty:
            one of each.
        window_pools: The pools of further page groups, if ranks share them.
        max_requests: Rows of the page table.
        cuda_graphs: Whether to capture steps; only a CUDA device does.
        lora: Adapters on the device; None: none are served.
        drafted: The model with its draft head; None: there is no head.
        max_drafts: Most drafts of a request in a step.
        tree_rows: Rows of each tree whose steps are captured, the root included; empty: drafts form
            chains.
        heads: Turns hidden states into vectors; None: hidden states are only pooled.
        is_fixed: Whether a prompt's vectors must not depend on the other rows of its step.
        pool: Pool of all ranks, `layout.pool_shape(num_pages)`; None: the executor allocates its
            own.
        blocks: Blocks of all ranks; None: the executor allocates its own.
        peers: Ranks with a GPU each, of which rank 0 draws for all; None: the model is on one
            device.
        has_logits: Whether this process has the model's head; False: that is another stage's.
        media: Rows of media; None: no step takes any.
        has_axes: Whether requests may rotate elsewhere than at their tokens' positions.
        refit: Changes the model's weights; None: they cannot be changed, and do not sleep.
        combine: Joins results of work on weights with those of other ranks.
        loads_by_layer: Whether tiers may load pages layer by layer while steps compute.
        sleep: What sleeps on a GPU, and where weights of a CPU sleep; None: the defaults.
        beside: Returns the tensors that sleep with the weights and that no update fills.
        counts: Counts the rows of experts; None: the model has none.
        experts: Puts experts on other ranks; None: they stay.
        beside_stages: The GPUs of other hosts with the stages beside this one; None: there are
            none.
    """

    def __init__(
        self,
        model: Model,
        layout: CacheLayout,
        num_pages: int,
        max_requests: int,
        max_context_tokens: int,
        device: torch.device,
        *,
        max_step_tokens: int,
        cuda_graphs: bool = True,
        lora: LoraPool | None = None,
        drafted: DraftedModel | None = None,
        max_drafts: int = 0,
        tree_rows: Sequence[int] = (),
        num_pieces: Sequence[int] = (),
        window_pools: Sequence[RankPool] = (),
        heads: PooledHeads | None = None,
        is_fixed: bool = False,
        on_capture: Progress = lambda done, total, what: None,
        pool: RankPool | None = None,
        blocks: RankBlocks | None = None,
        num_ranks: int = 1,
        rank: int = 0,
        peers: DevicePeers | None = None,
        has_logits: bool = True,
        media: MediaEmbeddings | None = None,
        has_axes: bool = False,
        refit: Refit | None = None,
        packed: PackedTensors | None = None,
        combine: Combine = of_one_rank,
        sleep: SleepMemory | None = None,
        loads_by_layer: bool = False,
        beside: TensorsOf = list,
        counts: ExpertCounts | None = None,
        experts: ExpertMoves | None = None,
        beside_stages: LinkedStages | None = None,
    ) -> None:
        sleep = sleep or SleepMemory()
        is_in_arena = sleep.weights is not None
        self.refits = WeightRefits(
            refit, device, rank, combine=combine, packed=packed, is_in_arena=is_in_arena
        )
        self.profiler = StepProfiler(device, rank)
        self.counts, self.experts = counts, experts
        self._verifying: Verifying | None = None
        """None if the last step verified no drafts."""
        self._made: tuple[StepInput, StepArrays] | None = None
        """Arrays of the step that is launched next, if they were needed before."""
        self._model = model
        self._peers = peers
        self.has_logits = has_logits and model.config.head == "tokens"
        self.gather: Gather | None = None
        """For steps whose rows ranks divide; None: there are none."""
        self.stages: DeviceStages | None = None
        """Exchanges rows with the neighbouring stages on GPUs; None: there are no stages."""
        self.media = media
        self.rotations: SlotRotations | None = None
        """None: rotations are by tokens' positions alone."""
        if has_axes:
            self.rotations = SlotRotations(max_requests, device)
        self._on_capture = on_capture
        heads = PooledHeads(DenseLayers(), None) if heads is None else heads
        width = model.config.hidden_size
        self._aligner = Aligner(model.config.aligned_by)
        self._pooler = Pooler(heads, max_requests, width, device, is_fixed=is_fixed)
        self._lora = lora
        self.has_adapters, self.has_head = lora is not None, drafted is not None
        self._page_size = layout.page_size
        num_pieces = num_pieces or [1] * len(layout.companions)
        is_own = is_own_pool = pool is None
        with nullcontext() if sleep.pools is None else sleep.pools.taking():
            if pool is None:
                pool = _new_pool(layout, 0, num_pages, device)
            further = window_pools or [
                _new_pool(layout, group, count, device)
                for group, count in enumerate(layout.of_windows(num_pieces), 1)
            ]
        of_windows = [one.whole for one in further]
        self.pool, self._own_pool, pages, memory, _, self._divided = pool
        """Pool of the first page group: the heads of all ranks, and this rank's."""
        self.page_rows = rows_of_pool(self.pool) if memory is None else memory
        """[num_pages, page_bytes] uint8: the pool, with all that lies in its pages."""
        self.device_pages = pages or DevicePages.of(self.page_rows)
        """Whole pages, with the heads and layers of all ranks."""
        self._pools = (self.pool, *of_windows)
        self.routes: PageRoutes | None = None
        """None: pages have no routes of experts."""
        if layout.routes is not None:
            begin = self.page_rows.shape[1] - layout.routes.num_bytes(layout.page_size)
            routes = layout.routes, self.page_rows, begin, layout.page_size
            self.routes = PageRoutes(*routes)
        recorded = None if self.routes is None else self.routes.memory
        own = (*([self.page_rows] if is_own else []), *([] if window_pools else of_windows))
        shared = (
            *([] if is_own_pool or rank else [self.page_rows]),
            *(of_windows if window_pools and not rank else []),
        )
        self.sleeper = _sleeper(sleep, refit, HostPools(own, shared), device, beside, combine)
        self.states: StateMemory | None = None
        """None: the model has no recurrent layers."""
        if layout.states is not None:
            ring_rows = num_ring_rows(layout.page_size, 1 + max_drafts)
            sizes = layout.of_states(num_pieces), max_requests, ring_rows
            # On GPUs each rank has separate blocks, and `layout` is already one rank's there.
            is_own = blocks is None or blocks.is_mapped
            plane = layout.states if is_own else layout.states.of_rank(num_ranks)
            self.states = StateMemory(plane, *sizes, device, blocks)
        self.pieces = make_pieces(self.states, of_windows, self.page_rows)
        """The memory of each of the layout's companions."""
        max_pages = -(-max_context_tokens // layout.page_size)
        self.device = device
        is_cuda = device.type == "cuda"
        num_rows = max(1 + max_drafts, *tree_rows) if tree_rows else 1 + max_drafts
        nothing = torch.zeros((num_rows + 1, max_requests + 1), dtype=torch.int64, device=device)
        words = torch.full_like(nothing[:-1], -1) if tree_rows else None
        self.known = SlotTokens(nothing[:-1], nothing[-1], words)
        """Lengths and last tokens of the slots as the device knows them, ahead of the host."""
        self._keeper = DraftKeeper(self.known, self._own_pool, drafted)
        self._draws: DrawGraphs | None = None
        self.page_table = PageTable(max_requests, max_pages, keeps_changes=is_cuda)
        """The host's page table; changes reach the device with the next step."""
        is_sent = is_cuda or (num_ranks > 1 and not rank)
        self.window_tables = [
            PageTable(max_requests, max_pages, keeps_changes=is_sent) for _ in further
        ]
        """As `page_table`, of each further page group."""
        own_windows = [one.own for one in further]
        windows = list(zip(self.window_tables, own_windows, strict=True))
        self._batches: HostInputs | DeviceInputs = HostInputs(
            self.page_table, self._page_size, self.known, lora, windows, self.states, recorded
        )
        self._inputs: DeviceInputs | None = None
        self.layer_pool = None
        if is_own_pool and loads_by_layer:
            self.layer_pool = layer_pool(model, layout, self.pool)
        self._late = None if self.layer_pool is None else self.layer_pool.waits
        """Waits of steps whose pages are still being loaded; None: pages are loaded whole."""
        self.graphs: StepGraphs | None = None
        """None: steps are not captured."""
        if is_cuda:
            self._inputs = self._batches = DeviceInputs(
                self.page_table,
                self._page_size,
                max_requests,
                self.known,
                lora,
                max_step_tokens,
                windows,
                self._device_states(max_requests),
                recorded,
                None if counts is None else counts.memory,
            )
            if cuda_graphs:
                has_lora = lora is not None
                buckets = step_buckets(
                    model.config,
                    activations_dtype(model),
                    max_requests,
                    max_step_tokens,
                    has_lora=has_lora,
                    max_drafts=max_drafts,
                    tree_rows=tree_rows,
                    has_states=layout.states is not None,
                    has_media=media is not None,
                )
                self.graphs = StepGraphs(
                    model,
                    self.pool,
                    self._inputs,
                    buckets,
                    on_capture,
                    self.rotations,
                    self.media_inputs(buckets),
                    has_logits=self.has_logits,
                    late=self._late,
                    beside=beside_stages,
                )
        step_sizes = () if self.graphs is None else self.graphs.buckets.ragged_sizes
        self.facts = ExecutorFacts(layout.page_size, step_sizes, is_asynchronous=is_cuda)

    def media_inputs(self, buckets: Sequence[GraphBucket]) -> MediaInputs | None:
        """New memory for what captured steps with media read; None: no captured step has any."""
        sizes = [bucket.tokens for bucket in buckets if bucket.kind == "media"]
        if self.media is None or not sizes:
            return None
        return self.media.inputs(max(sizes), has_axes=self.rotations is not None)

    def _device_states(self, max_requests: int) -> DeviceStates | None:
        if self.states is None:
            return None
        return DeviceStates(self.states, self._page_size, max_requests, self.device)

    @property
    def own_pool(self) -> torch.Tensor:
        """This rank's heads of the first page group's pool."""
        return self._own_pool

    def chains(self, model: DraftedModel, table: PageTable) -> Chains:
        """Makes chains of a draft head's drafts, without graphs, for requests in `table`."""
        return EagerChains(model, self._own_pool, table, self._page_size, self.rotations)

    @property
    def inputs(self) -> DeviceInputs | None:
        """None on a CPU."""
        return self._inputs

    @property
    def pool_bytes(self) -> np.ndarray:
        """The pool as [num_pages, page_bytes] uint8; on a GPU it has no pages."""
        rows = self.page_rows
        return rows.numpy() if self._inputs is None else rows[:0].cpu().numpy()

    def page_digests(self, pages: Sequence[int]) -> list[int]:
        """Digests of pages as they are in the pool now. Waits for the device."""
        if self._inputs is None and self.device_pages.is_whole:
            found: list[int] = digest_pages(self.pool_bytes, pages).tolist()
            return found
        numbers = page_index(pages, self.device_pages.device)
        found = on_host(self.device_pages.digests(numbers)).numpy().view(np.uint64).tolist()
        return found

    def page_pool(self) -> PagePool:
        """Access to the pool's pages for one thread other than the one that runs steps."""
        if self._inputs is None and self.device_pages.is_whole:
            return HostPool(self.pool_bytes)
        return DevicePool(self.device_pages)

    def pin(self, rows: NDArray[np.uint8]) -> PinnedRows | None:
        """Pins host memory, so that the GPU can copy from and to it; None where the pages of a CPU,
        or of several hosts, are copied.
        """
        is_cuda = self.device_pages.device.type == "cuda"
        return PinnedRows(rows, self.device_pages) if is_cuda else None

    def check(self) -> None:
        """Does nothing: no other process takes part in the steps."""

    def close(self) -> None:
        """Does nothing: there is no other process to end."""

    def launch(self, step: StepInput) -> Launched:
        counts = self.counts
        if counts is not None and counts.every:
            counts.begin(step.num_rows)
        if self.profiler.is_recording:
            with self.profiler.step(step):
                launched = self._launch(step)
        else:
            launched = self._launch(step)
        if counts is not None and counts.every:
            counts.end(step.num_rows)
        return launched

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Meanwhile no step runs with a graph."""
        graphs, self.graphs = self.graphs, None
        try:
            yield
        finally:
            self.graphs = graphs

    def _launch(self, step: StepInput) -> Launched:
        if self.graphs is not None:
            if bucket := self.graphs.buckets.of_decodes(step):
                return Launched(self._launch_decodes(step, bucket))
            if bucket := self.graphs.buckets.of_requests(step):
                return Launched(self._launch_requests(step, bucket))
        if step.drafts is not None:
            with torch.inference_mode():
                step.drafts.begin()
        arrays = self._arrays_of(step)
        scores, vectors = None, None
        if step.scores or step.pooled or step.pooled_elsewhere:
            (hidden, scores, vectors), bucket = self._with_more_rows(step, arrays), None
        else:
            hidden, bucket = self._hidden(arrays, step)
        self._verifying = None
        if arrays.verify_rows is not None:
            assert self._batches.step is not None
            num_rows = int(arrays.cu_q_lens[len(arrays.verify_rows)])
            self._verifying = Verifying(self._batches.step, self._batches.verify_rows, num_rows)
        if not hidden.shape[0]:
            return Launched(None, scores, vectors)
        on_device = None
        has_trees = arrays.ancestors is not None and len(arrays.sources) > arrays.num_decodes
        if self._inputs is not None:
            is_late = has_trees or arrays.owners.max(initial=-1) >= 0
            if is_late or arrays.is_decode:
                on_device = partial(self._inputs.drawing_rows, arrays)
        logits = Logits(
            partial(self._logits, hidden, arrays),
            arrays.drawing_slots,
            arrays.drawing_positions,
            on_device,
            captured=self._captured(arrays, bucket),
            rows=None if self._verifying is None else partial(_rows_of, self._verifying),
        )
        return Launched(logits, scores, vectors)

    def _arrays_of(self, step: StepInput) -> StepArrays:
        made, self._made = self._made, None
        if made is not None and made[0] is step:
            return made[1]
        if step.pages is not None:
            (new,) = (step.pages >= 0).nonzero()
            self.page_table.note(step.slots[new], step.max_starts[new] // self._page_size)
        return StepArrays.of_step(step, self.page_table, self._page_size)

    def own_bucket(self, step: StepInput) -> GraphBucket | None:
        """The bucket that a step takes which is about to be launched, if no other engine has a say;
        None: it runs without a graph.
        """
        if self.graphs is None or step.scores or step.pooled or step.has_media:
            return None
        buckets = self.graphs.buckets
        if bucket := buckets.of_decodes(step) or buckets.of_requests(step):
            return bucket
        self._made = step, self._arrays_of(step)
        return self.graphs.bucket_of(self._made[1])

    def _launch_decodes(self, step: StepInput, bucket: GraphBucket) -> Logits:
        assert self.graphs is not None
        assert self._inputs is not None
        with torch.inference_mode():
            decodes = StepDecodes.of_step(step)
            hidden = self.graphs.forward_decodes(decodes, bucket, step.states)
        self._verifying, count = None, step.num_decodes
        captured, positions = None, step.max_starts + 1
        if self._draws is not None and self._draws.has(bucket, count):
            captured = partial(self._draws.begin, bucket, positions)
        logits = partial(self._logits_of, hidden, step.adapters)
        on_device = partial(self._inputs.drawing_rows_of, count)
        return Logits(logits, step.slots, positions, on_device, captured)

    def _launch_requests(self, step: StepInput, bucket: GraphBucket) -> Logits:
        assert self.graphs is not None
        assert self._inputs is not None
        with torch.inference_mode():
            hidden = self.graphs.forward_requests(step, bucket)
        sent, count = self._inputs.step, step.num_rows
        assert sent is not None
        self._verifying = Verifying(sent, self._inputs.verify_rows, count)
        slots, positions = step.rows()
        captured, positions = None, positions + 1
        if self._draws is not None and self._draws.has(bucket, count):
            captured = partial(self._draws.begin, bucket, positions)
        logits = partial(self._logits_of, hidden, step.row_adapters())
        on_device = partial(self._inputs.drawing_rows_of, count)
        rows = partial(_rows_of, self._verifying)
        return Logits(logits, slots, positions, on_device, captured, rows)

    def _captured(self, arrays: StepArrays, bucket: GraphBucket | None) -> CapturedDraw | None:
        count = len(arrays.drawing_slots)
        if bucket is None or self._draws is None or not self._draws.has(bucket, count):
            return None
        if bucket.kind == "decode" and arrays.verify_rows is not None:
            return None
        if bucket.kind == "tree" and not arrays.has_no_prompts:
            return None
        return partial(self._draws.begin, bucket, arrays.drawing_positions)

    def capture_draws(self, tables: SlotTensors | None, ways: Sequence[Way] = WAYS) -> None:
        """Captures sampling for the steps that have graphs.

        Args:
            tables: The sampler's tables for requests without penalties or biases; None: graphs draw
                greedy tokens only, or another rank draws.

        Raises:
            ConfigError: There is not enough memory.
        """
        if not self.has_logits:
            return
        if self.graphs is not None and self._inputs is not None:
            parts = (self._model, self.graphs, self._inputs, self._keeper)
            self._draws = DrawGraphs(*parts, tables, ways, self._peers, self._on_capture)

    def keep_shared(self, count: int) -> None:
        """Keeps tokens that rank 0 has drawn, one for each of `count` rows of logits."""
        assert self._peers is not None
        tokens = torch.empty(count, dtype=torch.int64, device=self.device)
        self.keep(self._peers.share_tokens(tokens))

    def keeping(self) -> Callable[[torch.Tensor], None]:
        """`keep` for the step that was launched last. On a CPU other steps may run before it is
        called.
        """
        launched = _Launched(self._batches.drawing_slots, self._verifying, self._keeper.states)
        return partial(self.keep, launched=launched)

    def keep(self, tokens: torch.Tensor, launched: _Launched | None = None) -> None:
        """`launched` is the step that drew the tokens, if others may have been launched since."""
        slots, verifying, states = launched or (self._batches.drawing_slots, self._verifying, None)
        with torch.inference_mode():
            tokens = tokens.to(self.device, non_blocking=True)
            if verifying is not None:
                step, rows, num_rows = verifying
                self._keeper.accept(tokens, step, Verified(rows, slots), states)
                tokens, slots = tokens[num_rows:], slots[num_rows:]
            if len(slots):
                keep_tokens(tokens, slots, self.known)

    def _keep(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        columns = [np.array(one, np.int64) for one in (tokens, slots)]
        with torch.inference_mode():
            given, of_slots = self._batches.send(columns)
            keep_tokens(given, of_slots, self.known)

    def meet(self) -> None:
        """Makes the devices of all ranks wait for one another; of stages, those of later ones for
        earlier ones.
        """
        meets = [one for one in (self.stages, self._peers or self.gather) if one is not None]
        assert meets, "there are no other ranks"
        for one in meets:
            one.meet()

    def mark(self) -> Mark:
        return Mark(self.device)

    def run(self, arrays: StepArrays) -> torch.Tensor | None:
        """Runs a step given as arrays. Returns logits, [L, vocab] float32, or hidden states, [L,
        hidden], in a process without an LM head; None if no row draws.
        """
        hidden, _ = self._hidden(arrays)
        if not self.has_logits:
            return hidden if hidden.shape[0] else None
        return self._logits(hidden, arrays) if hidden.shape[0] else None

    def _hidden(
        self, arrays: StepArrays, step: StepInput | None = None
    ) -> tuple[torch.Tensor, GraphBucket | None]:
        """[L, hidden], valid until the next step, and the bucket whose graph ran."""
        with torch.inference_mode():
            bucket = None
            if self.graphs is not None and not (step is not None and step.is_divided):
                bucket = self._bucket_of(arrays, step, self.graphs)
            if self.graphs is not None and bucket is not None:
                if step is not None and step.waits_for_layers and not bucket.waits_for_layers:
                    self._wait_for_all_layers()
                return self.graphs.forward(arrays, bucket, step), bucket
            return self._model.forward(self._batch(arrays, step), self._own_pool), None

    @staticmethod
    def _bucket_of(
        arrays: StepArrays, step: StepInput | None, graphs: StepGraphs
    ) -> GraphBucket | None:
        if step is None or not step.has_media:
            return graphs.bucket_of(arrays)
        if step.inserted is not None and step.inserted.ends is not None:
            return None  # Attention with `key_ends` is not captured.
        return graphs.buckets.of_media(arrays)

    def _wait_for_all_layers(self) -> None:
        assert self._late is not None, "a step waits for layers, and pages are loaded whole"
        self._late.wait(self._late.groups[-1].start)

    def _batch(self, arrays: StepArrays, step: StepInput | None) -> Step:
        batch = self._batches.batch(arrays)
        if self.counts is not None and batch.chosen is None:
            batch.chosen = self.counts.of_step
        if step is not None and step.waits_for_layers:
            batch.late = self._late
        if step is not None and step.inserted is not None:
            assert self.media is not None, "a step has media, and there is no memory for them"
            batch.inserted = self.media.of(step.inserted)
            if step.inserted.ends is not None:
                self._set_key_ends(batch, batch.inserted.rows, step.inserted.ends)
        if step is not None and step.is_divided:
            batch.gather = self.gather
        if self.rotations is not None:
            self.rotations.turn(batch, None if step is None else step.turned)
        return batch

    def _set_key_ends(self, batch: Step, rows: torch.Tensor, ends: Int64Array) -> None:
        (sent,) = self._batches.send((ends,))
        key_ends = (batch.positions + 1).index_copy_(0, rows, sent).int()
        batch.groups = tuple(
            group._replace(key_ends=key_ends, is_cold=False) for group in batch.groups
        )

    def _with_more_rows(
        self, step: StepInput, arrays: StepArrays
    ) -> tuple[torch.Tensor, PromptScores | None, PooledStates | Alignments | None]:
        count, num_scored = len(arrays.logits_rows), sum(len(one.tokens) for one in step.scores)
        wanted = [
            *(
                (one.request, range(one.first_row, one.first_row + len(one.tokens)))
                for one in step.scores
            ),
            *((one.request, one.wanted) for one in step.pooled),
            *step.pooled_elsewhere,
        ]
        rows = np.concatenate(
            [int(arrays.cu_q_lens[at]) + np.array(own, np.int64) for at, own in wanted]
        )
        aligned: Sequence[AlignedRows] = ()
        types, bucket = self._token_types(step, arrays), None
        if step.waits_for_layers:
            self._wait_for_all_layers()
        if self.graphs is not None and not (step.scores or count or step.has_media):
            bucket = self.graphs.bucket_of(arrays) if len(rows) else None
            if bucket is not None and not self._model.config.is_encoder:
                bucket = bucket if len(rows) <= bucket.columns.max_logits else None
        with torch.inference_mode():
            if self.graphs is not None and bucket is not None:
                hidden = self.graphs.forward_pooled(arrays, rows, bucket, types)
            else:
                batch = self._batch(arrays, step)
                (sent,) = self._batches.send((rows,))
                batch.logits_rows = torch.cat([batch.logits_rows, sent])
                batch.aligned = aligned = self._aligned(step.pooled, arrays)
                if types is not None:
                    (batch.token_types,) = self._batches.send((types,))
                hidden = self._model.forward(batch, self._own_pool)
        slots = None if arrays.adapter_slots is None else arrays.adapter_slots[rows]
        hidden, scored, pooled = torch.split(hidden, [count, num_scored, len(rows) - num_scored])

        def logits(first: int, end: int) -> torch.Tensor:
            own = None if slots is None else slots[first:end]
            return self._logits_of(scored[first:end], own)

        def logits_of(hidden: torch.Tensor, pieces: Sequence[int]) -> torch.Tensor:
            own = None
            if step.adapters is not None:
                own = step.adapters[[step.pooled[number].request for number in pieces]]
            return self._logits_of(hidden, own)

        scores = PromptScores(step.scores, scored, logits) if step.scores else None
        if step.pooled and step.pooled[0].pool.output == "alignment":
            # A model that aligns serves no other vectors.
            with torch.inference_mode():
                return hidden, scores, self._aligner.begin(step.pooled, aligned)
        with torch.inference_mode():
            vectors = self._pooler.begin(step.pooled, pooled, logits_of) if step.pooled else None
        return hidden, scores, vectors

    def _aligned(self, pieces: Sequence[PooledRows], arrays: StepArrays) -> list[AlignedRows]:
        found = []
        for piece in pieces:
            if piece.pool.output == "alignment" and (rows := piece.aligned):
                own = int(arrays.cu_q_lens[piece.request]) + np.array(rows, np.int64)
                (sent,) = self._batches.send((own,))
                found.append(AlignedRows(piece.request, sent, piece.pool.num_frames, []))
        return found

    def _token_types(self, step: StepInput, arrays: StepArrays) -> Int64Array | None:
        if not tells_texts_apart(self._model.config):
            return None
        if not any(piece.pool.segment_start for piece in step.pooled):
            return None
        types = np.zeros(len(arrays.positions), np.int64)
        for piece in step.pooled:
            if first := piece.pool.segment_start:
                begin, end = arrays.cu_q_lens[piece.request : piece.request + 2].tolist()
                types[begin + first : end] = 1
        return types

    def _logits(self, hidden: torch.Tensor, arrays: StepArrays) -> torch.Tensor:
        token_slots = arrays.adapter_slots
        if token_slots is not None:
            token_slots = token_slots[arrays.logits_rows]
        return self._logits_of(hidden, token_slots)

    def _logits_of(self, hidden: torch.Tensor, token_slots: Int32Array | None) -> torch.Tensor:
        with torch.inference_mode():
            lora = None
            if token_slots is not None and self._batches.changes_logits and token_slots.any():
                lora = self._batches.lora_of(token_slots)
            return self._model.logits(hidden, lora)

    def capture(self, buckets: Sequence[GraphBucket]) -> list[int]:
        """Captures steps on a CUDA device and discards the graphs, to measure them. Returns the
        bytes of device memory that each graph took, in the order of capture: the largest step
        first. Raises ConfigError if there is not enough memory.
        """
        assert self._inputs is not None
        graphs = StepGraphs(
            self._model, self.pool, self._inputs, buckets, has_logits=self.has_logits
        )
        return graphs.bytes_of_each

    def order(self, order: Order) -> None:
        match order:
            case CopyPages(sources, destinations):
                if self._divided is None:
                    copy_pages(self.page_rows, sources, destinations)
                else:
                    self._divided.copy(sources, destinations)
            case ZeroPages(pages):
                pages = pages if self._divided is None else self._divided.here(pages)
                self.pool.index_fill_(0, page_index(pages, self.device), 0)
            case PoisonPages(pages):
                pages = pages if self._divided is None else self._divided.here(pages)
                poison_pages(self.pool, pages)
            case ZeroPieces(companion, pieces):
                self.pieces[companion].zero(pieces)
            case PoisonPieces(companion, pieces):
                self.pieces[companion].poison(pieces)
            case PackPieces(companion, pieces, into, is_each):
                self.pieces[companion].pack(pieces, into, self._whole_pages, is_each=is_each)
            case UnpackPieces(companion, pieces, out_of, is_each):
                self.pieces[companion].unpack(pieces, out_of, self._whole_pages, is_each=is_each)
            case EncodeMedia():
                assert self.media is not None, "the model has no encoder"
                self.media.encode(order)
            case PackRows():
                assert self.media is not None, "there is no memory for rows"
                self.media.pack(order, self._whole_pages)
            case UnpackRows():
                assert self.media is not None, "there is no memory for rows"
                self.media.unpack(order, self._whole_pages)
            case ShiftRotations(slot, shift):
                assert self.rotations is not None, "the model has one axis"
                self.rotations.shift(slot, shift)
            case KeepTokens(slots, tokens):
                self._keep(slots, tokens)
            case PrepareProfile(host, device):
                self.profiler.prepare(host=host, device=device)
            case StartProfile():
                self.profiler.start()
            case StopProfile(folder):
                self.profiler.stop(folder)
            case RefitFromFolder(folder):
                self.refits.read(folder)
            case JoinWeightGroup(group):
                self.refits.join(group)
            case LeaveWeightGroup(name):
                self.refits.leave(name)
            case ReceiveWeights(group, tensors, packed_bytes, ends):
                self.refits.receive(group, tensors, packed_bytes, ends=ends)
            case EndRefit(is_given_up):
                self.refits.end(is_given_up=is_given_up)
            case OfferWeights(version):
                self.refits.offer(version)
            case CopyWeights(offer):
                self.refits.copy(offer)
            case Sleep() | Wake():
                if isinstance(order, Sleep) and order.weights:
                    self.refits.withdraw()
                self.sleeper.begin(order)
            case SendExperts(layer, old, new):
                self._moves.send(layer, old, new)
            case TakeExperts(layer, old, new, digests):
                self._moves.take(layer, old, new, digests)
            case PlaceExperts(layer, new):
                self._moves.place(layer, new)
            case DropExperts():
                self._moves.drop()
            case _:
                assert_never(order)

    def lies_on_all(self, order: Order) -> bool:
        """Whether an order copies pieces of which each rank or host has a part."""
        if not isinstance(order, PackPieces | UnpackPieces):
            return False
        return self.pieces[order.companion].lies_on_all

    @property
    def _moves(self) -> ExpertMoves:
        assert self.experts is not None, "experts of this model stay where they are"
        return self.experts

    @property
    def _whole_pages(self) -> Pages:
        return self.page_rows if self.device_pages.is_whole else self.device_pages


def _sleeper(
    sleep: SleepMemory,
    refit: Refit | None,
    pools: HostPools,
    device: torch.device,
    beside: TensorsOf,
    combine: Combine,
) -> Sleeper:
    problem, can_drop = sleep.problem, refit is not None
    if device.type == "cuda" and sleep.weights is None and not problem:
        problem = "weights on a GPU sleep only in workers that were started with sleep_host_bytes"
    if device.type == "cuda":
        if sleep.weights is not None and refit is not None:
            sleep.weights.tensors = refit.tensors
        weights = None if problem else sleep.weights
        return Sleeper(weights, sleep.pools, device, problem, can_drop=can_drop, combine=combine)
    updated = list if refit is None else refit.tensors
    host = HostWeights(updated, sleep.folder, beside)
    return Sleeper(host, pools, device, problem, can_drop=can_drop, combine=combine)


def _rows_of(verifying: Verifying) -> torch.Tensor:
    step, count = verifying.step, verifying.num_rows
    words = step.token_ids if step.ancestors is None else step.ancestors
    return torch.stack([step.token_ids[:count], words[:count]])


def activations_dtype(model: Model) -> torch.dtype:
    """The dtype that a model computes in, which may differ from the pages'."""
    dtype: torch.dtype = getattr(torch, model.kv_layout(1).plane.dtype)
    return dtype


def _new_pool(layout: CacheLayout, group: int, num_pages: int, device: torch.device) -> RankPool:
    shape, of_group = layout.pool_shape(num_pages, group), layout.groups[group]
    dtype, taken, taken_dtype = dtype_of(of_group.plane), shape, dtype_of(of_group.plane)
    if of_group.routes is not None:
        taken, taken_dtype = (num_pages, of_group.page_bytes(layout.page_size)), torch.uint8
    try:
        if device.type == "cpu":
            memory = huge_zeros(taken, taken_dtype)
        else:
            memory = torch.zeros(taken, dtype=taken_dtype, device=device)
        if of_group.routes is None:
            return RankPool(memory, memory)
        whole = by_page(memory.view(dtype), shape[1:])
        return RankPool(whole, whole, memory=memory)
    except (RuntimeError, OSError) as error:
        size = num_pages * of_group.page_bytes(layout.page_size)
        raise ConfigError(
            f"a KV pool of {size:,} bytes does not fit: {error}; lower kv_memory_bytes"
        ) from error
