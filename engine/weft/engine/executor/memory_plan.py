"""Size of the KV pool: the device's memory less the measured needs of everything else."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from weft.contract.errors import ConfigError
from weft.contract.layout import CacheLayout, num_ring_rows
from weft.engine.executor.adapter_rows import LoraPool
from weft.engine.executor.encoder_graphs import measure_encoder_graphs
from weft.engine.executor.encodings import StepArrays
from weft.engine.executor.graphs import TREE_REQUESTS, GraphBucket, step_buckets
from weft.engine.executor.local import LocalExecutor, activations_dtype
from weft.engine.model.interface import MediaEncoder, Model
from weft.pages.memory.page_memory import NULL_PAGE, step_reserve
from weft.pages.memory.state_index import BLOCKS_OF_REQUEST

MIN_PAGES = 4
"""Fewest pages of a pool, the null page included."""
MARGIN_SHARE = 0.02
MIN_MARGIN_BYTES = 256 << 20
"""Least margin for fragmentation and library allocations beyond what was measured."""
_CONTEXT_BYTES = 768 << 20
"""Bytes of a GPU that a process takes in addition to its tensors: context, loaded kernels,
libraries.
"""
_PROBE_PAGES = 2
MOST_WINDOWS = 0.75
"""Largest share of pages that a window group gets, relative to an equal division of pages among all
groups. Long requests may raise it.
"""
CACHED_WINDOWS = 16
"""For each so many pages of the first group, a window group has one page for cached windows."""
TOKENS_OF_CACHED_BLOCK = 256
"""Tokens of the KV pool for each block of recurrent layers that is kept for later requests."""
TRIED_TOKENS = 32
"""Rows of the small step that is timed at start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """A device's memory and the engine's needs besides the pool, in bytes."""

    total: int
    free: int
    """Free memory of this engine's share after the weights were loaded."""
    weights: int
    """Weights of the model, with its encoder of images, and of adapters, if there are any."""
    step: int
    """Activations and logits of the largest step, or of encoding the largest image."""
    graphs: int
    sampling: int
    """Penalties, biases and masks if all requests use them, and the logits of captured sampling."""
    drafts: int = 0
    """KV pool of a separate draft model."""
    states: int = 0
    """Blocks and rings of recurrent layers."""
    media: int = 0
    """Rows of images."""
    share: float = 1.0
    """Largest share of the device's memory that this engine may use in total."""

    @property
    def margin(self) -> int:
        return max(MIN_MARGIN_BYTES, int(MARGIN_SHARE * self.total))

    @property
    def for_pool(self) -> int:
        """Bytes that remain for the pool; negative if the needs exceed the memory."""
        others = self.step + self.graphs + self.sampling
        others += self.drafts + self.states + self.media
        return self.free - others - self.margin

    def describe(self) -> str:
        share = f" ({self.share:.0%} for this worker)" if self.share < 1 else ""
        drafts = f"KV of the draft model {_gib(self.drafts)}, " if self.drafts else ""
        drafts += f"states of recurrent layers {_gib(self.states)}, " if self.states else ""
        drafts += f"rows of images {_gib(self.media)}, " if self.media else ""
        return (
            f"of {_gib(self.total)}{share} {_gib(self.free)} are free beside weights of "
            f"{_gib(self.weights)}; largest step {_gib(self.step)}, graphs {_gib(self.graphs)}, "
            f"sampling {_gib(self.sampling)}, {drafts}margin {_gib(self.margin)}"
        )


def divide_pages(
    layout: CacheLayout,
    num_pages: int,
    max_requests: int,
    max_step_tokens: int,
    max_context_tokens: int,
    max_drafts: int = 0,
    *,
    is_fixed: bool = False,
) -> tuple[int, ...]:
    """Divides memory among the page groups.

    A window group gets the most pages that `max_requests` requests can hold, and pages for windows
    in the prefix cache. It gets at most the larger of two bounds: `MOST_WINDOWS` of an equal
    division, and the need of as many longest requests as fit. The number of these requests is
    whole, so a little more memory may change the division a lot. The first group gets the rest.

    Args:
        num_pages: Pages that fit if every group has as many, the null page included.
        is_fixed: The first group has `num_pages`, whatever window groups need.

    Returns:
        The pages of each group. Only the first may have more than `num_pages`.
    """
    first, *others = layout.groups
    size, counts = layout.page_size, []
    context = -(-max_context_tokens // size)
    held = [min(context, group.most_pages(size, 1 + max_drafts)) for group in others]
    sizes = [group.page_bytes(size) for group in layout.groups]
    longest = sum(count * of for count, of in zip((context, *held), sizes, strict=True))
    num_longest = max(1, num_pages * sum(sizes) // longest)
    for of_request in held:
        beside = 1 + step_reserve(max_step_tokens, size) + num_pages // CACHED_WINDOWS
        most = max(int(MOST_WINDOWS * num_pages), num_longest * of_request + beside)
        count = min(num_pages, max_requests * of_request + beside)
        counts.append(count if is_fixed else min(count, most))
    saved = sum(
        (num_pages - count) * group.page_bytes(size)
        for group, count in zip(others, counts, strict=True)
    )
    more = 0 if is_fixed else saved // first.page_bytes(size)
    return (num_pages + more, *counts)


def divide_states(
    layout: CacheLayout,
    pool_bytes: int,
    max_requests: int,
    max_drafts: int,
    *,
    is_fixed: bool = False,
    on_gpu: bool = False,
) -> tuple[int, int]:
    """Divides memory between pages and the blocks and rings of recurrent layers.

    Recurrent layers get the need of all running requests, up to three quarters of the memory. They
    also get blocks for the prefix cache, as long as the total is at most two thirds.

    Args:
        is_fixed: Pages get all of `pool_bytes`, whatever blocks need.
        on_gpu: Whether rings also hold the values that steps on a GPU keep.

    Returns:
        Number of blocks, the null block included, and the bytes that pages get.

    Raises:
        ConfigError: The memory is too small for one request.
    """
    plane = layout.states
    if plane is None:
        return 0, pool_bytes
    row_bytes = plane.ring_row_bytes + (plane.found_row_bytes if on_gpu else 0)
    rings = (max_requests + 1) * num_ring_rows(layout.page_size, 1 + max_drafts) * row_bytes
    num_tokens = pool_bytes // layout.page_bytes * layout.page_size
    at_work = 1 + max_requests * BLOCKS_OF_REQUEST
    if is_fixed:
        return at_work + num_tokens // TOKENS_OF_CACHED_BLOCK, pool_bytes
    num_blocks = at_work + num_tokens // 2 // TOKENS_OF_CACHED_BLOCK
    # Blocks of running requests may take more memory than blocks for later requests. Agents'
    # prompts find 80 % of their tokens if states get half, 84 % with two thirds
    # (bench/hybrid_prefixes.py).
    most = max(2 * pool_bytes // 3, min(rings + at_work * plane.block_bytes, 3 * pool_bytes // 4))
    num_blocks = min(num_blocks, (most - rings) // plane.block_bytes)
    if num_blocks < 1 + BLOCKS_OF_REQUEST:
        needed = -(-3 * (rings + (1 + BLOCKS_OF_REQUEST) * plane.block_bytes) // 2)
        raise ConfigError(
            f"kv_memory_bytes = {pool_bytes:,}: recurrent layers need blocks of "
            f"{plane.block_bytes:,} bytes, and {rings:,} for {max_requests} running requests; "
            f"give at least {needed:,}, or lower max_running_requests",
            param="kv_memory_bytes",
        )
    return num_blocks, pool_bytes - rings - num_blocks * plane.block_bytes


def _probe_pieces(layout: CacheLayout) -> list[int]:
    return [1 if one is layout.states else _PROBE_PAGES for one in layout.companions]


def pages_of(needs: MemoryNeeds, page_bytes: int) -> int:
    """Number of pages that fit. Raises ConfigError if not even `MIN_PAGES` fit; the message has the
    calculation.
    """
    num_pages = max(0, needs.for_pool) // page_bytes
    if num_pages < MIN_PAGES:
        raise ConfigError(
            f"device memory: {needs.describe()}: {_gib(needs.for_pool)} are left for the KV pool, "
            f"which needs {MIN_PAGES} pages of {page_bytes:,} bytes; lower max_step_tokens or "
            "max_running_requests, take a smaller model, or raise device_memory_share if it is set"
        )
    return num_pages


def describe_windows(layout: CacheLayout, counts: Sequence[int]) -> list[str]:
    """One line on how many positions each page group keeps; no line if there is one group."""
    if len(counts) == 1:
        return []
    told = [
        f"{group.layers} layers {group.describe_kept()}: {count:,} pages of "
        f"{group.page_bytes(layout.page_size):,} bytes"
        for group, count in zip(layout.groups, counts, strict=True)
    ]
    return ["pages of " + "; ".join(told)]


def describe_pool(
    needs: MemoryNeeds, num_pages: int, layout: CacheLayout, num_ranks: int = 1
) -> str:
    """The plan in one line, for logs and status. `num_ranks`: ranks that divide the pages."""
    size, tokens = num_pages * layout.page_bytes, (num_pages - 1) * layout.page_size
    among = f" on {num_ranks} GPUs" if num_ranks > 1 else ""
    return (
        f"KV pool {_gib(size)}{among}, {tokens:,} tokens in {num_pages:,} pages: {needs.describe()}"
    )


def check_pool_fits(pool_bytes: int, device: torch.device) -> None:
    """Raises ConfigError, whose message has the calculation, if the device has less free memory."""
    free, total = torch.cuda.mem_get_info(device)
    if pool_bytes > free:
        raise ConfigError(
            f"a KV pool of {_gib(pool_bytes)} does not fit: of {_gib(total)} on {device} "
            f"{_gib(free)} are free beside the weights; lower kv_memory_bytes or num_pages, or "
            "leave both out to have the pool sized by what is free"
        )


def measure_needs(
    model: Model,
    layout: CacheLayout,
    vocab_size: int,
    max_requests: int,
    max_step_tokens: int,
    max_context_tokens: int,
    device: torch.device,
    *,
    cuda_graphs: bool,
    share: float = 1.0,
    lora: LoraPool | None = None,
    max_drafts: int = 0,
    tree_rows: Sequence[int] = (),
    has_logits: bool = True,
    has_media: bool = False,
) -> MemoryNeeds:
    """Runs the largest step once and captures the largest graphs, with a pool of two pages.

    Args:
        share: Largest share of the device's memory for this process.
        lora: Adapters, already on the device; the step is measured with them.
        max_drafts: Most drafts of a request in a step. Each of their rows has logits.
        tree_rows: Rows of each tree, the root included.
        has_logits: As in `LocalExecutor`.
        has_media: Whether prompts may have media.

    Raises:
        ConfigError: The step or the graphs do not fit even without a pool.
    """
    weights = torch.cuda.memory_allocated(device)
    executor = LocalExecutor(
        model,
        layout,
        _PROBE_PAGES,
        max_requests,
        max_context_tokens,
        device,
        max_step_tokens=max_step_tokens,
        cuda_graphs=False,
        lora=lora,
        num_pieces=_probe_pieces(layout),
        has_logits=has_logits,
    )
    tables = torch.cuda.memory_allocated(device) - weights
    of_trees = min(max_requests, max(TREE_REQUESTS)) * max(tree_rows, default=0)
    max_logits = max(max_requests * (1 + max_drafts), of_trees)
    step = largest_step(max_requests, max_step_tokens, max_context_tokens, layout, max_logits)
    if lora is not None:
        # The largest step uses all adapters.
        step.adapter_slots = np.arange(max_step_tokens, dtype=np.int32) % lora.max_slots
    step_bytes = _measure_step(executor, step, device)
    if model.config.latent is not None:
        # A chunk may compute the heads of earlier latents, in parts of as many positions as it has
        # rows. From two parts on, results are also held in float32.
        sizes = (max_requests, max_step_tokens, max_context_tokens)
        step = largest_step(*sizes, layout, max_logits, is_behind=True)
        step_bytes = max(step_bytes, _measure_step(executor, step, device))
    graphs = 0
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
            has_media=has_media,
        )
        graphs = _measure_graphs(executor, buckets)
    del executor
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) + _CONTEXT_BYTES
    return MemoryNeeds(
        total=total,
        free=free_of_share(free, total, own, share),
        weights=weights,
        step=step_bytes + tables,
        graphs=graphs,
        sampling=sampling_bytes(vocab_size, max_requests, max_logits if cuda_graphs else 0),
        share=share,
    )


def with_media(
    needs: MemoryNeeds,
    encoder: MediaEncoder,
    num_rows: int,
    max_cost: int,
    itemsize: int,
    device: torch.device,
    *,
    cuda_graphs: bool,
) -> MemoryNeeds:
    """Adds `num_rows` rows of images, whose elements have `itemsize` bytes, and encodes as many of
    the largest images as are encoded together (`max_cost` patches) to measure it. Images are
    encoded between steps, so the larger of both counts. With `cuda_graphs` it also captures the
    encoder's passes.
    """
    shape = encoder.max_shape(num_rows)
    count = max(1, max_cost // encoder.cost_of(shape))
    pictures = torch.zeros((count, *shape), dtype=torch.uint8, device=device).unbind()
    advice = "; lower media_rows or max_step_patches"
    step_bytes = _measure_run(
        lambda: encoder.encode(pictures), device, "the largest images", advice
    )
    rows_bytes = num_rows * encoder.row_width * itemsize
    graphs = measure_encoder_graphs(encoder, max_cost, device) if cuda_graphs else 0
    return replace(
        needs,
        step=max(needs.step, step_bytes),
        graphs=needs.graphs + graphs,
        media=rows_bytes,
    )


def free_of_share(free: int, total: int, own: int, share: float) -> int:
    """Bytes of a device that an engine may still take.

    Args:
        free: Bytes that no tensor uses.
        own: Bytes that this engine's process uses.
        share: Largest share of `total` that this engine may use; 1: no other program is expected on
            the device.
    """
    return free if share == 1 else min(free, int(share * total) - own)


def _measure_step(executor: LocalExecutor, step: StepArrays, device: torch.device) -> int:
    what = f"a step of {len(step.token_ids)} tokens"
    return _measure_run(lambda: executor.run(step), device, what, "; lower max_step_tokens")


def _measure_run(run: Callable[[], object], device: torch.device, what: str, advice: str) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        with torch.inference_mode():
            run()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"no memory for {what} beside {_gib(before)} of weights and tables: {error}{advice}"
        ) from error
    run_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return run_bytes


def _measure_graphs(executor: LocalExecutor, buckets: Sequence[GraphBucket]) -> int:
    """Estimates the bytes of all graphs from the largest two of each kind. The first graph of all
    includes the memory that all share. Each further graph adds about as much as the second of its
    kind.
    """
    by_kind: dict[tuple[str, int, bool], list[GraphBucket]] = {}
    for bucket in sorted(buckets, reverse=True):
        # Decode steps have one bound for each size.
        bound = bucket.requests if bucket.kind in ("ragged", "prompts") else 0
        by_kind.setdefault((bucket.kind, bound, bucket.has_lora), []).append(bucket)
    probes = sorted((b for kind in by_kind.values() for b in kind[:2]), reverse=True)
    taken = dict(zip(probes, executor.capture(probes), strict=True))
    total = taken.pop(probes[0])
    for kind in by_kind.values():
        each = max((taken[bucket] for bucket in kind[:2] if bucket in taken), default=0)
        total += each * (len(kind) - (probes[0] in kind))
    return total


def largest_step(
    max_requests: int,
    max_step_tokens: int,
    max_context_tokens: int,
    layout: CacheLayout,
    max_logits: int,
    *,
    is_behind: bool = False,
) -> StepArrays:
    """Makes a step with the most rows and logits possible, all in the null page.

    With `is_behind` each request also has as many positions before the step as rows in it. Where
    contexts are long enough the first request has one position more, so that earlier positions
    outnumber the rows.
    """
    most = max(1, (max_context_tokens - 1) // 2) if is_behind else max_context_tokens
    num_pieces = -(-max_step_tokens // most)
    bounds = np.linspace(0, max_step_tokens, num_pieces + 1).astype(np.int32)
    lengths = np.diff(bounds)
    before = lengths.copy() if is_behind else np.zeros_like(lengths)
    before[0] += is_behind and 2 * lengths[0] < max_context_tokens
    kv_lens = before + lengths
    positions = np.concatenate(
        [np.arange(begin, end, dtype=np.int64) for begin, end in zip(before, kv_lens, strict=True)]
    )
    return StepArrays(
        token_ids=np.zeros(max_step_tokens, np.int64),
        positions=positions,
        places=NULL_PAGE * layout.page_size + positions % layout.page_size,
        slots=np.full(num_pieces, max_requests, np.int64),
        cu_q_lens=bounds,
        kv_lens=kv_lens,
        logits_rows=np.arange(min(max_logits, max_step_tokens), dtype=np.int64),
        max_q_len=int(lengths.max()),
        max_kv_len=int(kv_lens.max()),
    )


def time_token(
    executor: LocalExecutor,
    layout: CacheLayout,
    max_requests: int,
    max_step_tokens: int,
    max_context_tokens: int,
) -> float:
    """Seconds per token of a small step, the faster of two tries. A token of a larger step takes no
    longer. Call it while no step is under way.
    """
    num_tokens = min(TRIED_TOKENS, max_step_tokens)
    step = largest_step(max_requests, num_tokens, max_context_tokens, layout, 1)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        logits = executor.run(step)
        assert logits is not None
        logits[0, 0].item()  # Waits for the device.
        times.append(time.perf_counter() - began)
    return min(times) / num_tokens


def sampling_bytes(vocab_size: int, max_requests: int, max_captured: int) -> int:
    """Upper bound of the device sampler's memory. Each request has a bias and a count for each
    token of the vocabulary (half as much again while these tables grow) and eight bits for the
    masks of its rows. Each row in a graph has logits.
    """
    return vocab_size * (max_requests * (3 * 4 + 1) + max_captured * 4)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
