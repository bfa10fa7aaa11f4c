"""Runs image towers and steps with rows of images once, before a worker is ready.

Many such steps are not captured (`GraphBuckets.of_media`), nor are towers' passes over more patches
than a step's budget. Their kernels would be compiled, and libraries would choose theirs, when the
first images come, while all other requests wait.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from weft.checkpoint.vision_config import NUM_AXES
from weft.contract.arrays import Int64Array
from weft.engine.base.state_rows import StateRows
from weft.engine.executor.embeddings import MediaEmbeddings
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.orders import EncodeMedia
from weft.engine.executor.step_input import InsertedRows, StepInput, TurnedRows
from weft.engine.model.interface import MediaEncoder
from weft.pages.memory.page_memory import NULL_PAGE

_FEWEST_ROWS = 16
_MOST_ROWS = 2048
"""No kernel is chosen by a number of rows above this, but the largest step is tried too."""
_MOST_EQUAL = 16
"""Most equal media that are encoded together to see how that goes."""
_CACHED_PAGES = 9
"""Pages before a chunk. Kernels are compiled apart for page tables whose width is one, a multiple
of 16 or another number; without pages before it, chunks of powers of two have the first two.
"""


_FEW_ROWS = (2, 4, 8)
"""Chunks that attention takes as it takes decodes, where there are several of those."""


def warm_up_media(
    executor: LocalExecutor,
    media: MediaEmbeddings,
    max_requests: int,
    max_step_tokens: int,
    max_context_tokens: int,
    *,
    has_steps: bool,
) -> None:
    """Encodes media of several sizes, and computes steps of several sizes with rows of media, all
    in the null page. Without an encoder only the steps run. With several ranks all of them do this
    at the same time. Call it while no step is under way. Without `has_steps` nothing but the
    encoder runs.
    """
    for order in _orders(media) if media.has_encoder else ():
        executor.order(order)
    if not has_steps:
        return
    sees_both_ways = media.has_encoder and media.encoder.sees_both_ways
    limits = max_requests, max_step_tokens, max_context_tokens
    with executor.without_graphs():
        for step in _steps(executor, *limits, sees_both_ways):
            logits = executor.launch(step).logits
            assert logits is not None, "the last row of each step draws"
            logits.compute()
    if executor.device.type == "cuda":
        torch.cuda.synchronize(executor.device)


def _powers(most: int, first: int = 1) -> Iterator[int]:
    return itertools.takewhile(lambda size: size <= most, (first << n for n in itertools.count()))


def _orders(media: MediaEmbeddings) -> Iterator[EncodeMedia]:
    """Each rank gets as many media of an order as the others."""
    encoder, each = media.encoder, media.num_ranks
    shapes = list(_shapes(encoder, media))
    smallest = encoder.cost_of(shapes[0])
    most_equal = min(_MOST_EQUAL, media.max_cost // smallest)
    for shape, count in [*((s, 1) for s in shapes), *((shapes[0], n) for n in _powers(most_equal))]:
        num_rows = count * each * encoder.rows_of(shape)
        yield EncodeMedia(
            rows=(np.arange(num_rows) % media.num_rows).tolist(),
            shapes=list(shape) * (count * each),
            data=bytes(count * each * math.prod(shape)),
        )


def _shapes(encoder: MediaEncoder, media: MediaEmbeddings) -> Sequence[tuple[int, ...]]:
    """From the smallest to one that is as large as a step's budget; patches are a multiple of 16 in
    some.
    """
    found = dict[tuple[int, ...], None]()
    for num_rows in _powers(media.num_rows):
        for shape in map(encoder.max_shape, (num_rows, num_rows + 1)):
            if not found or encoder.cost_of(shape) <= media.max_cost:
                found[shape] = None
    return list(found)


def _steps(
    executor: LocalExecutor,
    max_requests: int,
    max_step_tokens: int,
    max_context_tokens: int,
    sees_both_ways: bool,
) -> Iterator[StepInput]:
    """Chunks alone and beside requests of one row, with and without positions before them."""
    cached = _CACHED_PAGES * executor.facts.page_size
    begins, ahead = [0], [0]
    if cached < max_context_tokens:
        begins, ahead = [0, cached], [0, max_context_tokens - 1]
    most = min(max_step_tokens, max_context_tokens - begins[-1])
    for num_rows in (*_powers(min(most, _MOST_ROWS), _FEWEST_ROWS), most):
        # Kernels are also compiled apart for numbers of rows that are a multiple of 16 and others.
        fewer = itertools.cycle((0, 1, 1, 0))
        for others, begin in itertools.product((None, *ahead), begins):
            before = () if others is None else (max(others, begin),)
            size = max(1, num_rows - next(fewer) - len(before))
            step = _step(executor, size, begin, before, sees_both_ways)
            yield step
            if step.turned is not None:  # A chunk of the text behind media.
                yield replace(step, inserted=None)
            if executor.has_adapters:
                yield replace(step, adapters=np.ones(len(step.slots), np.int32))
    # Attention of decodes is compiled apart for how many programs share a context, which their
    # number decides. It is a power of two or once and a half of one here.
    fewest = min(_FEWEST_ROWS, most)
    most_others = min(max_requests, max_step_tokens - fewest)
    for power in _powers(most_others):
        for number, begin, at in itertools.product({power, power * 3 // 2}, begins, ahead):
            if 1 < number <= most_others:
                yield _step(executor, fewest, begin, [max(at, begin)] * number, sees_both_ways)
    few = [size for size in _FEW_ROWS if size <= fewest]
    for number, size, at in itertools.product(_powers(most_others, 4), few, ahead):
        yield _step(executor, size, begins[-1], [max(at, begins[-1])] * number, sees_both_ways)


def _step(
    executor: LocalExecutor, size: int, begin: int, others: Sequence[int], sees_both_ways: bool
) -> StepInput:
    """A chunk from position `begin` on, all of whose rows come from media, after requests that
    bring one row at positions `others`.
    """
    starts = np.array([*others, begin], np.int64)
    rows = len(others) + np.arange(size)
    ends: Int64Array | None = np.full(size, begin + size) if sees_both_ways else None
    turned = None
    if executor.rotations is not None:
        turned = TurnedRows(rows, np.repeat(begin + np.arange(size)[:, None], NUM_AXES, axis=1))
    counts = np.array([*(1 for _ in others), size], np.int64)
    return StepInput(
        slots=np.full(len(starts), executor.page_table.null_row, np.int64),
        starts=starts,
        max_starts=starts,
        counts=counts,
        num_decodes=len(others),
        draws=np.ones(1, np.int64),
        recomputed_rows=np.zeros(1, np.int64),
        tokens=np.zeros(size, np.int64),
        inserted=InsertedRows(rows, np.zeros(size, np.int64), ends),
        turned=turned,
        states=_states(executor, starts, counts),
    )


def _states(executor: LocalExecutor, starts: Int64Array, counts: Int64Array) -> StateRows | None:
    """Requests that begin behind a block of zeros, and write another one at their last border. No
    request has that one yet.
    """
    if executor.states is None:
        return None
    size = executor.facts.page_size
    borders, lasts = (at // size * size for at in (starts, starts + counts))
    (crossed,) = (lasts > borders).nonzero()
    writes = np.stack((crossed, lasts[crossed], np.full(len(crossed), NULL_PAGE + 1)))
    return StateRows(borders, np.full(len(starts), NULL_PAGE), writes)
