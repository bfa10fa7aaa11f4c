"""Compiles the GPU's kernels for compute capability 9.0 on a machine without a GPU.

    python -m weft.testing.kernels.sm90_kernels [--all] [--texts FOLDER]

With --all it compiles all variants of each kernel. Without it, it compiles one variant of each: the
one that is launched first in the run, and in groups of other formats (`FORMATS`) also the one that
is launched first in the group. It prints a line for each group of operations: its name, then the
kernels that it launched. The operations run on CPU tensors, and each launch only compiles: results
are not computed. Triton's interpreter, which computes them in other tests, takes much that the
compiler does not.

With --texts it writes each variant's PTX, without the lines of the source that it comes from, to a
folder. A change of the source that leaves all files as they were changes neither bits nor times
(`diff -r` of two folders). Each of the two runs needs a `TRITON_CACHE_DIR` of its own.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from weft.contract.layout import PagePart
from weft.engine.executor.ragged_columns import RaggedColumns
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.layer import Layer
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.stack import Run, run_all
from weft.engine.model.step import Step
from weft.kernels.ops.activation.spec import Gating
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention import triton_decode as decode_attention
from weft.kernels.ops.attention import triton_extend as extend_attention
from weft.kernels.ops.attention.spec import (
    MAX_TREE_ROWS,
    AttentionMetadata,
    AttentionSpec,
    SeveralRows,
)
from weft.kernels.ops.content_digest import triton_sums as content_sums
from weft.kernels.ops.divided_pages import gpu as pages_here
from weft.kernels.ops.divided_pages import triton_rows
from weft.kernels.ops.draft_head.operations import draft_chain_reference, draft_entries_reference
from weft.kernels.ops.draft_head.spec import DraftChains, DraftHeadWeight, DraftRows
from weft.kernels.ops.encoder_attention import triton_ragged as encoder_attention
from weft.kernels.ops.gated_delta import triton_gates
from weft.kernels.ops.gated_norm import triton_norm
from weft.kernels.ops.greedy import triton_rows as greedy
from weft.kernels.ops.latent_attention import triton_latent as latent_attention
from weft.kernels.ops.latent_attention.spec import LatentSpec
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear import gpu as gpu_linear
from weft.kernels.ops.linear import gpu_fp8 as fp8_linear
from weft.kernels.ops.linear import triton_groups_tensor_cores as groups_tensor_cores
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.linear.triton_fp8_rows import empty_rows
from weft.kernels.ops.lora.spec import LoraStep
from weft.kernels.ops.moe import moe
from weft.kernels.ops.moe.gpu import routed_moe
from weft.kernels.ops.moe.spec import (
    ExpertParts,
    ExpertWeights,
    RouterForm,
    Routing,
    SharedExpert,
    SparseMlpWeight,
)
from weft.kernels.ops.moe.triton_combine import NormAfter
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.norm import triton_layer as layer_norm
from weft.kernels.ops.page_digest import triton_digest as page_digest
from weft.kernels.ops.pages import triton_pages as page_ops
from weft.kernels.ops.pages import triton_push as page_push
from weft.kernels.ops.pages.pool import PageShare
from weft.kernels.ops.pages.scaled_kv import SCALE_BYTES
from weft.kernels.ops.peers import triton_experts as peer_experts
from weft.kernels.ops.peers import triton_logits as peer_logits
from weft.kernels.ops.peers import triton_pages as peer_pages
from weft.kernels.ops.peers import triton_stage as stage_rows
from weft.kernels.ops.peers import triton_sum as peer_sum
from weft.kernels.ops.recurrence import triton_chunks as chunked_recurrence
from weft.kernels.ops.recurrence import triton_steps as recurrence
from weft.kernels.ops.recurrence.head_rows import HeadRows
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.replaced import triton_replaced as replaced
from weft.kernels.ops.rope import rope_and_cache, rotate_heads
from weft.kernels.ops.sampling import triton_draw as sampling
from weft.kernels.ops.sampling import triton_top as sampling_top
from weft.kernels.ops.sampling.spec import NUM_FIELDS, DraftedRows, SlotTensors
from weft.kernels.ops.slot_rows import triton_rows as slot_rows
from weft.kernels.ops.slot_states import triton_delta as delta_steps
from weft.kernels.ops.slot_states import triton_states as slot_states
from weft.kernels.ops.slot_states.spec import Channels, DeltaGates, HeadForm, LayerMemory
from weft.kernels.ops.step_requests import triton_requests as step_requests
from weft.kernels.ops.step_requests.spec import DecodeColumns
from weft.kernels.ops.step_rows import triton_rows as step_rows
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.kernels.ops.stream.taps import Taps
from weft.kernels.ops.tree_rows import triton_rows as tree_rows
from weft.kernels.shared import sm90
from weft.kernels.shared.formats.fp8 import FP8
from weft.kernels.shared.formats.packed_groups import PackedExperts, pack_groups
from weft.kernels.shared.formats.quantised import (
    FP8_GROUP,
    Fp8Blocks,
    Fp8Channels,
    Fp8Experts,
    Fp8Matrix,
)
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.kernels.group_cases import Kind, draw_groups
from weft.testing.kernels.layer_cases import step_of
from weft.testing.kernels.lora_cases import Shared, make_expert_lora, make_lora, segments_of
from weft.testing.kernels.lora_layers import Sizes, make_layers

BF16, PAGE_SIZE, MAX_CONTEXT = torch.bfloat16, 16, 256


class NoDevice:
    """What Triton asks of a device when it only compiles."""

    def get_current_target(self) -> GPUTarget:
        """Compute capability 9.0."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0


def weight(rows: int, columns: int, *, gated: bool = False, is_fixed: bool = False) -> LinearWeight:
    data = torch.zeros(rows, columns, dtype=BF16)
    return LinearWeight(rows, columns, BF16, gated, PlainForm(data), None, is_fixed=is_fixed)


def make_run(
    hidden: int,
    inner: int,
    heads: int,
    dim: int,
    *,
    layers: int = 2,
    experts: int = 0,
    is_fixed: bool = False,
    chunk: int | None = None,
) -> Run:
    """Layers with twice as many heads as KV heads, and a norm of each head."""

    def norm(size: int) -> Norm:
        return Norm(torch.ones(size, dtype=BF16), 1e-5)

    def layer(index: int) -> Layer:
        attention = Attention(
            AttentionSpec(heads, heads // 2, dim, 1.0, chunk, is_chunked=chunk is not None),
            index,
            torch.zeros(MAX_CONTEXT, dim),
            qkv_proj=weight(2 * heads * dim, hidden, is_fixed=is_fixed),
            o_proj=weight(hidden, heads * dim, is_fixed=is_fixed),
            q_norm=norm(dim),
            k_norm=norm(dim),
        )
        feed: GatedMLP | SparseMLP = GatedMLP(
            index,
            weight(2 * inner, hidden, gated=True, is_fixed=is_fixed),
            weight(hidden, inner, is_fixed=is_fixed),
        )
        if experts:
            stacked = (
                torch.zeros(experts, 2 * inner, hidden, dtype=BF16),
                torch.zeros(experts, hidden, inner, dtype=BF16),
            )
            packed = ExpertWeights(hidden, inner, BF16, (), (), stacked, None, is_fixed)
            router = weight(experts, hidden, is_fixed=is_fixed)
            feed = SparseMLP(index, SparseMlpWeight(router, packed, 4, True))
        return Layer(index, norm(hidden), attention, norm(hidden), feed)

    return Run([layer(index) for index in range(layers)])


def make_step(q_lens: list[int], *, has_trees: bool = False, lora: LoraStep | None = None) -> Step:
    """Requests of so many new rows each."""
    requests, rows = len(q_lens), sum(q_lens)
    group = AttentionMetadata(
        page_table=torch.zeros(requests, MAX_CONTEXT // PAGE_SIZE, dtype=torch.int32),
        places=torch.zeros(rows, dtype=torch.int64),
        cu_q_lens=torch.tensor([0, *q_lens]).cumsum(0).int(),
        kv_lens=torch.full((requests,), MAX_CONTEXT, dtype=torch.int32),
        max_q_len=max(q_lens),
        max_kv_len=MAX_CONTEXT,
        ancestors=torch.full((rows,), -1) if has_trees else None,
        several=None if has_trees else SeveralRows(torch.zeros(1, dtype=torch.int32), requests),
    )
    return step_of(torch.zeros(rows, dtype=torch.int64), group, lora)


def run_layers(
    sizes: tuple[int, int, int, int],
    q_lens: list[int],
    has_trees: bool = False,
    lora: LoraStep | None = None,
    **options: Any,
) -> None:
    """Two layers, or `layers`; what enters the last one is wanted."""
    hidden, _, heads, dim = sizes
    run, step = make_run(*sizes, **options), make_step(q_lens, has_trees=has_trees, lora=lora)
    pages = len(q_lens) * MAX_CONTEXT // PAGE_SIZE
    pool = torch.zeros(pages, heads // 2, 2, 2, PAGE_SIZE, dim, dtype=BF16)
    stream = torch.zeros(sum(q_lens), hidden, dtype=BF16)
    with as_on_gpu():
        run_all([run], stream, step, pool, Taps([len(run.layers) - 1], torch.empty_like(stream)))


SMALL, WIDE = (576, 1536, 8, 64), (1024, 3072, 16, 128)
"""Hidden and inner size, heads and their width."""


def compile_layers(is_full: bool) -> None:
    """Dense layers: few rows, more, prompts, trees."""
    for q_lens in ([1], [4, 4]) if is_full else ([1],):
        run_layers(SMALL, q_lens)
    run_layers(WIDE, [1] * 32)
    # As few programs as on a whole GPU, so that contexts have parts.
    with mock.patch.object(extend_attention, "num_multiprocessors", return_value=132):
        run_layers(WIDE, [40, 1])
    run_layers(WIDE, [6, 6], has_trees=True)
    for is_fixed in (False, True) if is_full else ():
        run_layers(WIDE, [40, 1, 1], layers=1, chunk=96, is_fixed=is_fixed)
    large = weight(4096, 4096)
    for rows in (4, 16) if is_full else (4,):
        linear(torch.zeros(rows, 4096, dtype=BF16), large)


def compile_experts(is_full: bool) -> None:
    """Experts directly, sorted, and for prompts: with blocks of which some are halved, too."""
    for q_lens in ([1], [1] * 12, [900]):
        run_layers((1024, 768, 16, 128), q_lens, experts=8)
    form = RouterForm(is_sigmoid=True, correction=torch.zeros(8), groups=2, summed=2, scale=2.5)
    biases = torch.zeros(8, 1536, dtype=BF16), torch.zeros(8, 1024, dtype=BF16)
    more = ExpertParts(Gating(1.702, 7.0, 1.0), biases)
    w13, w2 = torch.zeros(8, 1536, 1024, dtype=BF16), torch.zeros(8, 1024, 768, dtype=BF16)
    for rows in (1, 12, 2000):
        x, logits = torch.zeros(rows, 1024, dtype=BF16), torch.zeros(rows, 8)
        routed_moe(x, logits, 4, w13, w2, None, renormalise=True, form=form, more=more)
    if is_full:
        x, logits, shared = x[:1], logits[:1], SharedExpert(w13[0], w2[0], x[:1])
        routed_moe(x, logits, 4, w13, w2, None, renormalise=True, shared=shared)
    # Of 16 experts the 8 are a share; of four and of sixteen a row.
    share = more._replace(placement=torch.zeros(16, dtype=torch.int32))
    for rows, top_k in ((1, 16), (1, 4), (12, 4), (2000, 4)) if is_full else ((1, 16),):
        x, logits = torch.zeros(rows, 1024, dtype=BF16), torch.zeros(rows, 16)
        routed_moe(x, logits, top_k, w13, w2, None, renormalise=True, more=share)


def compile_latents() -> None:
    """Attention to latents: of few rows with long contexts, and of many."""
    for q_lens, heads in (([1, 1], 16), ([100], 128)):
        group = make_step(q_lens).groups[0]
        pages = len(q_lens) * MAX_CONTEXT // PAGE_SIZE
        pool = torch.zeros(pages, 1, 2, 1, PAGE_SIZE, 576, dtype=BF16)
        q = torch.zeros(sum(q_lens), heads, 576, dtype=BF16)
        for words in (None, torch.full((sum(q_lens),), -1)):
            step = group._replace(ancestors=words)
            latent_attention.latent_attention(q, pool, 0, LatentSpec(heads, 512, 0.1), step)
        latent_attention.attention_before(q, pool, 0, LatentSpec(heads, 512, 0.1), group)


def compile_recurrences(is_full: bool) -> None:
    """States of heads, with decays of heads and of elements, and convolutions: row by row, by
    chunks, and in place.
    """
    bounds, states = Sequences.of(torch.tensor([0, 1, 4])), torch.zeros(2, 8, 128, 128)
    q, v = torch.zeros(4, 4, 128, dtype=BF16), torch.zeros(4, 8, 128, dtype=BF16)
    gate = torch.zeros(4, 8)
    for decay in (gate, torch.zeros(4, 8, 128)):
        recurrence.recurrence(HeadRows(q, q, v, decay, bounds, beta=gate, is_unit=True), states)
    of_steps = HeadRows(q, q, v, gate, bounds, steps=gate, skips=gate[0])
    recurrence.recurrence(of_steps, states)
    x, tails = torch.zeros(4, 512, dtype=BF16), torch.zeros(2, 512, 3, dtype=BF16)
    recurrence.short_conv(x, torch.zeros(4, 512), None, tails, bounds, has_silu=True)
    triton_norm.gated_norm(v, v[:, :, None], v[0, 0], 1e-6, form="silu", gates_first=False)
    triton_gates.delta_gates(gate.to(BF16).repeat(1, 2), gate[0], gate[0], 8)
    if is_full:
        for decay in (gate, torch.zeros(4, 8, 128)):
            of_delta = HeadRows(q, q, v, decay, bounds, beta=gate)
            chunked_recurrence.chunked_recurrence(of_delta, states)
    chunked_recurrence.chunked_recurrence(of_steps, states)
    step = 2 * 128 + 2 * 128
    inputs, conv = torch.zeros(4, 4 * step, dtype=BF16), torch.zeros(4, 4 * step)
    channels = (Channels(at, step) for at in (0, 128, 256))
    form = HeadForm(conv, None, *channels, 8, 2, 128, 128, 0.1, is_unit=True)
    numbers = torch.zeros(4, dtype=torch.int64)
    table = torch.zeros(3, 3, dtype=torch.int64)
    of_slots = numbers, numbers, table
    plan = slot_states.plan(numbers[:3], numbers.int(), numbers, *of_slots, PAGE_SIZE)
    blocks = states, torch.zeros(2, 4 * step, 3, dtype=BF16)
    rings = torch.zeros(2, 24, 4 * step, dtype=BF16), *(torch.zeros(2, 24, 8) for _ in "gb")
    found = torch.zeros(2, 24, 4, 128, dtype=BF16), torch.zeros(2, 24, 8, 128, dtype=BF16)
    memory = LayerMemory(blocks, rings, found)
    slot_states.step_heads(form, plan, memory, (inputs, gate, gate))
    delta = DeltaGates(gate[0], gate[0], 2)
    for count in (3, 64) if is_full else (3,):
        plans, ba = plan[:1].expand(count, -1).contiguous(), gate.to(BF16).repeat(1, 2)
        delta_steps.step_delta(form, delta, plans, memory, (inputs, ba))
    memory = LayerMemory(blocks[1:], rings[:1])
    slot_states.step_conv(conv, None, plan, memory, inputs)


def compile_encoders() -> None:
    """Attention in both directions and the norm behind it."""
    cu_lens, slopes = torch.tensor([0, 40, 41], dtype=torch.int32), torch.zeros(8)
    for dim, dtype in ((64, BF16), (72, BF16), (32, torch.float32), (8, torch.float32)):
        qkv = torch.zeros(41, 3, 8, dim, dtype=dtype).unbind(1)
        for reach, own_slopes in ((None, None), (64, None), (None, slopes)):
            encoder_attention.encoder_attention(*qkv, cu_lens, reach, own_slopes, 0.1)
    x, weight = torch.zeros(3, 768, dtype=BF16), torch.zeros(768, dtype=BF16)
    layer_norm.add_layer_norm(x, x, weight, weight, 1e-12)
    rotate_heads(x.view(3, 12, 64), torch.zeros(3, dtype=torch.int64), torch.zeros(9, 64))


def compile_fixed() -> None:
    """What computes the same bits for any number of rows."""
    for q_lens in ([1] * 3, [40, 1]):
        run_layers(WIDE, q_lens, is_fixed=True)
    run_layers((1024, 768, 16, 128), [1] * 3, experts=8, is_fixed=True)


def compile_both_ways() -> None:
    """Attention of rows that see later ones."""
    for dim, window in ((256, 64), (128, None)):
        for is_fixed in (False, True):
            spec = AttentionSpec(8, 2, dim, 0.1, window, is_fixed)
            step = make_step([40, 1]).groups[0]
            step = step._replace(key_ends=torch.full((41,), MAX_CONTEXT, dtype=torch.int32))
            pool = torch.zeros(40, 2, 2, 2, PAGE_SIZE, dim, dtype=BF16)
            q = torch.zeros(41, 8, dim, dtype=BF16)
            with as_on_gpu():
                paged_attention(q, pool, 0, spec, step)


def fp8_weight(rows: int, columns: int, block_rows: int, *, gated: bool = False) -> LinearWeight:
    data = torch.zeros(rows, columns, dtype=FP8)
    if block_rows:
        scales = torch.zeros(-(-rows // block_rows), -(-columns // FP8_GROUP))
        matrix: Fp8Matrix = Fp8Blocks(data, scales, block_rows)
    else:
        matrix = Fp8Channels(data, torch.zeros(rows))
    return LinearWeight(rows, columns, BF16, gated, matrix, None)


def compile_fp8(is_full: bool) -> None:
    """Products with FP8 weights of few rows, of more, and of experts; rows with a norm."""
    for block_rows in (0, 64):
        small = fp8_weight(512, 512, block_rows)
        gpu_linear.normed_linear(
            torch.zeros(1, 512, dtype=BF16), torch.zeros(512).to(BF16), 1e-5, small
        )
        pair, down = (
            fp8_weight(6144, 1024, block_rows, gated=True),
            fp8_weight(1024, 3072, block_rows),
        )
        for rows in (1, 16, 64, 100) if is_full else (20,) if block_rows else (2,):
            x = torch.zeros(rows, 1024, dtype=BF16)
            gate_up_silu(x, pair)
            linear(torch.zeros(rows, 3072, dtype=BF16), down, residual=x)
        if is_full:
            linear(torch.zeros(1, 3072, dtype=BF16), replace(down, is_fixed=True))
        first, second = fp8_weight(1536, 1024, block_rows), fp8_weight(1024, 768, block_rows)
        stacked = [Fp8Experts.empty(8, fp8_linear.matrix_of(one)) for one in (first, second)]
        packed = ExpertWeights(1024, 768, BF16, (), (), (stacked[0], stacked[1]), None)
        for rows in (1, 12, 900) if is_full or not block_rows else (12,):
            x, ids = torch.zeros(rows, 1024, dtype=BF16), torch.zeros(rows, 4, dtype=torch.int32)
            moe(x, Routing(ids, torch.zeros(rows, 4)), packed)
        # A row's experts that are too large to be loaded at once.
        ids = torch.zeros(1, 16, dtype=torch.int32)
        moe(torch.zeros(1, 1024, dtype=BF16), Routing(ids, torch.zeros(1, 16)), packed)
    # Rows that are rounded for a block, and by the norm after the experts.
    shapes = (1536, 1024), (1024, 768)
    first, second = (fp8_weight(*shape, FP8_GROUP) for shape in shapes)
    stacked = [Fp8Experts.empty(8, fp8_linear.matrix_of(one)) for one in (first, second)]
    for rows in (4, 20) if is_full else (4,):
        x, logits = torch.zeros(rows, 1024, dtype=BF16), torch.zeros(rows, 8)
        rounded = empty_rows(rows, 1024, x.device, has_groups=True)
        after = NormAfter(torch.zeros_like(x), torch.zeros_like(x[0]), 1e-5, rounded)
        routed_moe(x, logits, 4, stacked[0], stacked[1], after, renormalise=True)


def compile_groups(is_full: bool) -> None:
    """Products with weights of 4 bits in groups, of few rows, of more, and of experts."""
    kinds: list[tuple[int, Kind]] = [(128, "plain"), (32, "e2m1"), (16, "nvfp4"), (64, "plain")]
    more: list[tuple[int, Kind]] = [(128, "offsets"), (64, "offsets"), (32, "offsets")]
    for group, kind in [*kinds, *more] if is_full else kinds:
        gate_up, down = (
            pack_groups(draw_groups(rows, columns, group, kind))
            for rows, columns in ((3072, 1024), (1024, 1536))
        )
        pair = LinearWeight(3072, 1024, BF16, True, gate_up, None)
        last = LinearWeight(1024, 1536, BF16, False, down, None)
        few = (1, 100, 900) if group == 128 else (100,)
        for rows in (1, 2, 16, 20, 100, 900) if is_full else few:
            x = torch.zeros(rows, 1024, dtype=BF16)
            gate_up_silu(x, pair)
            linear(torch.zeros(rows, 1536, dtype=BF16), last, residual=x)
        stacked = [PackedExperts.empty(8, one) for one in (gate_up, down)]
        packed = ExpertWeights(1024, 1536, BF16, (), (), (stacked[0], stacked[1]), None)
        for rows in (1, 20, 900) if is_full else (1,) if kind in ("e2m1", "nvfp4") else ():
            x, ids = torch.zeros(rows, 1024, dtype=BF16), torch.zeros(rows, 4, dtype=torch.int32)
            moe(x, Routing(ids, torch.zeros(rows, 4)), packed)


def compile_8_bits() -> None:
    """Attention over K and V in 8 bits, and their write."""
    heads, kv_heads, dim = 8, 2, 128
    shape, spec = (40, kv_heads, 2, 2, PAGE_SIZE, dim + SCALE_BYTES), AttentionSpec(8, 2, 128, 0.1)
    for dtype in (torch.uint8, torch.int8):
        pool = torch.zeros(shape, dtype=dtype)
        with as_on_gpu():
            for q_lens in ([1] * 3, [40, 1]):
                step = make_step(q_lens).groups[0]
                rows = sum(q_lens)
                paged_attention(torch.zeros(rows, heads, dim, dtype=BF16), pool, 0, spec, step)
            qkv = torch.zeros(rows, (heads + 2 * kv_heads) * dim, dtype=BF16)
            turns, zeros = torch.zeros(MAX_CONTEXT, dim), torch.zeros(rows, dtype=torch.int64)
            rope_and_cache(qkv, zeros, turns, pool, 0, zeros, heads, kv_heads)


def compile_adapters(is_full: bool) -> None:
    """Layers with adapters: rows that decode, and prompts; those of small layers and of large.

    And an embedding and an LM head of their own."""
    small, large = Sizes(256, 512, 4, 2, 64), Sizes(4096, 512, 4, 2, 64)
    for sizes, rows in ((small, 1), (small, 5), (small, 200), (large, 1)):
        case = make_layers(sizes, rows, [0, 8, 16, 40], BF16, "cpu")
        # Kernels for few rows read early what is given before the step.
        later = replace(case.lora, are_given=False)
        has_both = rows < 200 if is_full else (sizes, rows) == (small, 1)
        for lora in (case.lora, later) if has_both else (case.lora,):
            with as_on_gpu():
                case.output(lora)
    matrices, places = torch.zeros(2, 900, 576, dtype=BF16), torch.tensor([-1, 0, 1]).int()
    for rows in (3, 30):
        x, out = torch.zeros(rows, 576, dtype=BF16), torch.zeros(rows, 900)
        segments = segments_of([number % 3 for number in range(rows)])
        replaced.replace_products(out, x, matrices, places, segments, is_fixed=False)
        ids = torch.zeros(rows, dtype=torch.int64)
        replaced.replace_embeddings(x, ids, matrices, places, segments.token_slots)


def compile_expert_adapters() -> None:
    """Experts and their router with adapters, which share their outer sides or not."""
    hidden, inner, heads, dim = 1024, 768, 8, 64
    ranks, experts = [0, 8, 16], 8
    sizes = (hidden, inner, heads, dim)
    router = make_lora(hidden, experts, ranks, BF16).weights
    shapes: tuple[tuple[int, int, int, Shared], ...] = (
        (hidden, inner, 0, "a"),
        (hidden, inner, inner, "a"),
        (inner, hidden, 0, "b"),
    )
    for rows, is_shared in ((2, False), (300, True)):
        gate, up, down = (
            make_expert_lora(
                k, n, ranks, experts, BF16, shared=side if is_shared else None, column=column
            ).weights
            for k, n, column, side in shapes
        )
        lora = LoraStep(
            segments=segments_of([number % len(ranks) for number in range(rows)], len(ranks)),
            router=(router,),
            w13=(gate, up),
            w2=(down,),
        )
        run_layers(sizes, [1] * rows, lora=lora, layers=1, experts=experts)


def compile_drafts() -> None:
    """A head's entries and chains."""
    hidden, inner, heads, dim = SMALL
    vocab, requests = 900, 3
    qkv, norms = weight(2 * heads * dim, 2 * hidden), torch.ones(4, hidden, dtype=BF16)
    head = DraftHeadWeight(
        fc=weight(hidden, 3 * hidden),
        qkv=qkv,
        kv=weight(heads * dim, 2 * hidden),
        o=weight(hidden, heads * dim),
        gate_up=weight(2 * inner, hidden, gated=True),
        down=weight(hidden, inner),
        lm_head=weight(vocab, hidden),
        input_norm=norms[0],
        hidden_norm=norms[1],
        post_norm=norms[2],
        norm=norms[3],
        embedding=torch.zeros(vocab, hidden, dtype=BF16),
        target_ids=torch.zeros(vocab, dtype=torch.int64),
        cos_sin=torch.zeros(MAX_CONTEXT, dim),
        num_heads=heads,
        eps=1e-5,
    )
    numbers, offsets = torch.zeros(requests, dtype=torch.int64), torch.arange(requests + 1).int()
    pool = torch.zeros(20, heads // 2, 1, 2, PAGE_SIZE, dim, dtype=BF16)
    states = torch.zeros(requests, hidden, dtype=BF16)
    rows = DraftRows(
        token_ids=numbers,
        positions=numbers,
        slots=numbers,
        cu_q_lens=offsets,
        request_slots=numbers,
    )
    draft_entries_reference(states.repeat(1, 3), head, rows, states, pool, 0)
    chains = DraftChains(
        positions=numbers.repeat(2, 1),
        slots=numbers.repeat(2, 1),
        kv_lens=torch.full((2, requests), 9, dtype=torch.int32),
        counts=[requests] * 2,
        page_table=torch.zeros(requests, 16, dtype=torch.int32),
        one_row_each=offsets,
        max_kv_len=MAX_CONTEXT,
    )
    draft_chain_reference(states, numbers, head, chains, pool, 0)


def compile_drawing() -> None:
    """Drawing tokens, with drafts and without."""
    slots, vocab = torch.zeros(3, dtype=torch.int64), 9000
    tables = SlotTensors(
        torch.zeros(3, NUM_FIELDS, dtype=torch.int64),
        torch.zeros(3, -(-vocab // 32), dtype=torch.int32),
        torch.zeros(1, vocab),
        torch.zeros(1, vocab, dtype=torch.int32),
    )
    logits = torch.zeros(3, vocab)
    for drafted in (None, DraftedRows(slots, slots, None), DraftedRows(slots, slots, slots)):
        sampling.draw_rows(logits, slots, slots, tables, drafted)
    for size in (5000, vocab):
        greedy.greedy_rows(torch.zeros(3, size))
    sampling_top.top_logits(logits, slots, slots, 5)


def compile_steps() -> None:
    """What a step's rows and its pages need beside the layers."""
    numbers, table = torch.zeros(8, dtype=torch.int64), torch.zeros(3, 16, dtype=torch.int32)
    offsets, lengths = torch.tensor([0, 4, 8]).int(), torch.tensor([9, 9]).int()
    known = SlotTokens(
        torch.zeros(1 + MAX_TREE_ROWS, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64),
        torch.zeros(1 + MAX_TREE_ROWS, 3, dtype=torch.int64),
    )  # fmt: skip
    verified = Verified(torch.zeros(2, 4, dtype=torch.int64), numbers)
    for ancestors in (None, numbers):
        step = StepRows(numbers, numbers, numbers, offsets, lengths, ancestors)
        step_rows.resolve_rows(step, numbers, numbers, known, table, PAGE_SIZE)
    step_rows.accept_drafts(numbers, step._replace(ancestors=None), verified, known)
    step_requests.expand_decodes(DecodeColumns(*[numbers] * 4), step, known, table, PAGE_SIZE)
    for words in (None, numbers):
        columns = RaggedColumns(8, 2, 8, 4, has_trees=words is not None, has_requests=True)
        views = columns.views(torch.zeros(columns.num_bytes, dtype=torch.uint8))
        step_requests.expand_requests(views, table, PAGE_SIZE, 3)
    *_, paths = tree_rows.accept_trees(numbers, step, verified, known)
    shape = 4, 2, 2, 2, PAGE_SIZE
    tree_rows.move_paths(torch.zeros(*shape, 64, dtype=BF16), numbers, verified.rows, paths)
    scaled = torch.zeros(*shape, 64 + SCALE_BYTES, dtype=torch.uint8)
    tree_rows.move_paths(scaled, numbers, verified.rows, paths)
    rows = torch.zeros(4, 4096, dtype=torch.int64)
    page_digest.row_digests(rows, numbers[:2])
    page_ops.gather_rows(rows, numbers[:2], rows.new_empty(2, 4096))
    page_ops.scatter_rows(rows[:2], numbers[:2], rows)
    share = PageShare(1, 2)
    page_digest.row_digests(rows, numbers[:2], 0, share)
    page_ops.gather_rows(rows, numbers[:2], rows.new_empty(2, 4096), share)
    page_ops.scatter_rows(rows[:2], numbers[:2], rows, share)
    page_ops.copy_part_rows(numbers[:2], numbers[:2], rows.int(), PagePart(2, 8192, 2048, 4096))
    content_sums.weighted_sums([numbers], torch.zeros(2, 1 << 16, dtype=torch.int64))
    states = torch.zeros(4, 64, dtype=BF16)
    slot_rows.take_rows(numbers[:2], table, states, known.tokens[0])
    slot_rows.put_rows(states, numbers[:2], states.clone(), numbers[:2])


def compile_ranks() -> None:
    """Sums over ranks and the tokens of rank 0, by both a rank that leads and one that follows."""
    numbers, width = torch.zeros(8, dtype=torch.int64), 4096
    for rank in (0, 1):
        memory_of_logits = peer_logits.LogitsMemory(
            *(rank, 2, 8000, 4, torch.zeros(4, 8000), numbers[:2], numbers.int(), numbers[:2])
        )
        share = memory_of_logits.share
        peer_logits.gather_logits(memory_of_logits, torch.zeros(3, share.stop - share.start))
        memory = peer_sum.PeerMemory(
            rank, 2, width, 2, 4, 8, numbers[:2], torch.zeros(99, dtype=torch.int32), numbers[:2]
        )
        peer_sum.share_tokens(memory, numbers)
        norm = Norm(torch.ones(width, dtype=BF16), 1e-5)
        for rows in (3, 7):
            x = torch.zeros(rows, width, dtype=BF16)
            peer_sum.sum_rows(memory, x, x, x, norm, x)
            peer_sum.sum_rows(memory, x, x, x)
        shared = peer_pages.PagesMemory(
            *(rank, 2, 64, 576, 512, 2, 4, numbers[:2], torch.zeros(2, 99, dtype=torch.int32)),
            numbers[:2],
        )
        for sinks in (None, torch.zeros(64)):
            peer_pages.gather_queries(shared, torch.zeros(3, 64, 576, dtype=BF16))
            values = torch.zeros(3, 128, 512, dtype=BF16)
            peer_pages.merge_results(shared, values, torch.zeros(3, 128), sinks)
        step = make_step([1] * 3).groups[0]._replace(key_ends=torch.ones(3, dtype=torch.int32))
        pool = torch.zeros(9, 1, 2, 2, PAGE_SIZE, 128, dtype=BF16)
        spec = AttentionSpec(32, 1, 128, 0.1)
        for num in (1, 132):
            with mock.patch.object(decode_attention, "num_multiprocessors", return_value=num):
                q = torch.zeros(3, 32, 128, dtype=BF16)
                pages_here.heads_here(q, pool, 0, spec, step)
        divided = SimpleNamespace(rank=rank, size=2)
        for told in (step, step._replace(key_ends=None)):
            triton_rows.divided_rows(told, divided, 16)  # type: ignore[arg-type]
        link = stage_rows.StageMemory(
            1 - rank, 2, 8 * width, 1 << 44, 1 << 45, torch.zeros(1, dtype=torch.int32), numbers[:2]
        )
        for rows in (3, 8):
            stage_rows.send_rows(link, torch.zeros(rows, width, dtype=BF16))
            stage_rows.receive_rows(link, torch.zeros(rows, width, dtype=BF16))
        exchange = peer_experts.RowShape(width, BF16, 6, 32, 8)
        num_bytes = peer_experts.layout_of(2, exchange).end
        of_experts = peer_experts.ExpertMemory(
            *(rank, 2, exchange, torch.zeros(num_bytes, dtype=torch.uint8), numbers[:2]),
            *(torch.zeros(2, 8, dtype=torch.int32), numbers[:2], torch.zeros(1, dtype=torch.int32)),
            torch.zeros(1, dtype=torch.int64),
        )
        routing = Routing(torch.zeros(3, 6, dtype=torch.int32), torch.zeros(3, 6))
        x = torch.zeros(3, width, dtype=BF16)
        rows, _ = peer_experts.send_rows(of_experts, x, routing, 4)
        for residual in (None, x):
            peer_experts.return_rows(of_experts, rows, routing.ids, residual, 4)
        pools = [torch.zeros(4, 8, 32, 2, 16, 128, dtype=BF16) for _ in range(2)]
        pushed = page_push.PeerPools.of(pools, rank)
        for layers in (range(3, 4), range(32)):
            pushed.push(numbers, layers)


FORMATS = {"fp8", "groups", "8 bits", "both ways"}
"""Groups that launch kernels of others with operands of other formats or more of them."""


def groups(is_full: bool) -> dict[str, Callable[[], None]]:
    """What compiles each group of operations; with `is_full` in all variants that are launched."""
    return {
        "layers": partial(compile_layers, is_full),
        "experts": partial(compile_experts, is_full),
        "encoders": compile_encoders,
        "fixed": compile_fixed,
        "both ways": compile_both_ways,
        "latents": compile_latents,
        "recurrences": partial(compile_recurrences, is_full),
        "fp8": partial(compile_fp8, is_full),
        "groups": partial(compile_groups, is_full),
        "8 bits": compile_8_bits,
        "adapters": partial(compile_adapters, is_full),
        "adapters of experts": compile_expert_adapters,
        "drafts": compile_drafts,
        "drawing": compile_drawing,
        "steps": compile_steps,
        "ranks": compile_ranks,
    }


def text_of(ptx: str) -> str:
    """PTX without comments and without what only debuggers read."""
    code = ptx.split("\t.section\t.debug")[0]
    of_source = re.compile(r"\s*(\.loc|\.file|//|\$L__tmp|\$L__func)|\s*$")
    lines = (line for line in code.splitlines() if not of_source.match(line))
    return "".join(line.split("//")[0].rstrip() + "\n" for line in lines)


def main(is_full: bool, texts: Path | None) -> None:
    """Compiles each group, and prints the kernels of it."""
    launch = JITFunction.run
    num_texts: Counter[str] = Counter()
    launched: set[tuple[str, str]] = set()
    """Module and name of kernels, of this group."""
    earlier: set[tuple[str, str]] = set()
    before = earlier

    def only_compile(
        kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> Any:
        name = kernel.fn.__module__, kernel.fn.__name__
        is_new = name not in launched | before
        launched.add(name)
        if is_new or is_full:
            compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
            if texts is not None:
                stem = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
                path = texts / f"{stem}.{num_texts[stem]}.ptx"
                path.write_text(text_of(compiled.asm["ptx"]))
                num_texts[stem] += 1

    def product(
        x: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """`torch.mm`, which has no `out_dtype` on a CPU."""
        return (x @ y).to(out_dtype or x.dtype)

    driver.set_active(NoDevice())
    with (
        mock.patch.object(JITFunction, "run", only_compile),
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(torch, "mm", product),
        ExitStack() as stack,
    ):
        # Modules that are imported later get them from their own modules.
        for own in (sm90.is_sm90, groups_tensor_cores.has_kernel):
            name = own.__name__
            for module in list(sys.modules.values()):
                if vars(module).get(name) is own:
                    stack.enter_context(mock.patch.object(module, name, return_value=True))
        for name, compile_group in groups(is_full).items():
            earlier |= launched
            launched.clear()
            before = set() if name in FORMATS else earlier
            compile_group()
            print(name, *sorted({kernel for _, kernel in launched}), sep="\t", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--texts", type=Path)
    given = parser.parse_args()
    if given.texts is not None:
        given.texts.mkdir(parents=True, exist_ok=True)
    main(given.all, given.texts)
