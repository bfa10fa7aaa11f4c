"""FlashMLA over paged latents of DeepSeek's sizes, where a package that has it is installed.

github.com/deepseek-ai/FlashMLA, whose kernels for Hopper `sgl-flash-mla` on PyPI ships. They take
pages of 64 positions and requests of one row, so that each row of a prompt is passed as a request
of its own with the prompt's pages. Rows of one prompt find its latents in the L2 cache.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.latent_attention.spec import LatentPlan, LatentSpec, RowsLaunch, RowsPlan

logger = logging.getLogger(__name__)

PAGE_SIZE = 64
_DIMS = (576, 512)
"""Elements of a position's vector and of its value."""
_ROWS_AT_ONCE = 2048
"""Most rows of a launch. Each row has a float32 result in addition to its own, and a place in the
shared memory of the kernel that divides the work.
"""


def supports(dtype: torch.dtype, dim: int, spec: LatentSpec, page_size: int) -> bool:
    """Whether FlashMLA is installed and takes such latents."""
    return _fits(dtype, dim, spec) and page_size == PAGE_SIZE and _operations() is not None


def _fits(dtype: torch.dtype, dim: int, spec: LatentSpec) -> bool:
    is_fit = dtype == torch.bfloat16 and (dim, spec.value_dim) == _DIMS
    return is_fit and spec.first_position == 0 and spec.heads >= 64


def lacking(dtype: torch.dtype, dim: int, spec: LatentSpec, page_size: int) -> str | None:
    """What a user must change so that FlashMLA takes such latents, in words; None: no change is
    needed, or none would help.
    """
    if not _is_hopper() or not _fits(dtype, dim, spec):
        return None
    if _operations() is None:
        return "install sgl-flash-mla"
    return None if page_size == PAGE_SIZE else f"take --page-size {PAGE_SIZE}"


def plan_latents(step: AttentionMetadata, rows: int, heads: int) -> LatentPlan:
    """Divides the work of a step's layers. `rows`: T; as many as requests if each has one. The step
    has no trees.
    """
    if step.max_q_len <= 1:
        return LatentPlan(_plan(step.page_table, step.kv_lens, heads))
    counts = step.cu_q_lens.diff()
    before = step.kv_lens - counts
    number = torch.arange(rows, device=counts.device)
    ends = step.cu_q_lens[1:]
    request = torch.searchsorted(ends, number, right=True, out_int32=True)
    # Rows of padding belong to no request: they read one position of the last request.
    is_row = request < len(counts)
    request = request.clamp(max=len(counts) - 1)
    table = step.page_table.index_select(0, request)
    begins = before.index_select(0, request)
    own = number - step.cu_q_lens.index_select(0, request) + 1
    seen = _plan(table, torch.where(is_row, begins + own, 0).int(), heads)
    if step.is_cold or step.earlier is not None:
        lens = torch.where(counts == 1, before, 0)
        return LatentPlan(seen, _plan(step.page_table, lens, heads))
    return LatentPlan(seen, _plan(table, torch.where(is_row, begins, 0), heads))


def plan_before(page_table: torch.Tensor, lens: torch.Tensor, heads: int) -> LatentPlan:
    """Divides the work of rows that attend to the first `lens` positions of their pages, [T] int32,
    which may be none.
    """
    plan = _plan(page_table, lens, heads)
    return LatentPlan(plan, plan)


def _plan(page_table: torch.Tensor, lens: torch.Tensor, heads: int) -> RowsPlan:
    operations, read_lens = _operations(), lens.clamp(min=1)
    assert operations is not None
    launches = []
    for first in range(0, len(lens), _ROWS_AT_ONCE):
        some = read_lens[first : first + _ROWS_AT_ONCE]
        divided = operations.get_mla_decoding_metadata(some, heads, 1, heads, False, None)
        launches.append(RowsLaunch(first, *divided))
    return RowsPlan(page_table, lens, read_lens, tuple(launches))


def flash_mla(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: LatentSpec, plan: RowsPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a plan's rows.

    Returns:
        [T, H, V], with arbitrary finite numbers for rows that attend to nothing; and [T, H]
        float32, the logarithm of each softmax's sum. For rows that attend to nothing that is the
        sum over one position.
    """
    operations = _operations()
    assert operations is not None
    # [pages, PAGE_SIZE, 1, 576]
    cache = pool[:, 0, layer].transpose(1, 2)
    found = []
    for first, tiles, splits in plan.launches:
        rows = slice(first, first + _ROWS_AT_ONCE)
        found.append(
            operations.dense_decode_fwd(
                q[rows].unsqueeze(1), cache, spec.value_dim, plan.read_lens[rows],
                plan.page_table[rows], spec.scale, False, tiles, splits,
            )[:2]
        )  # fmt: skip
    outs, sums = zip(*found, strict=True)
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.squeeze(1), (sums[0] if len(sums) == 1 else torch.cat(sums)).squeeze(2)


@functools.cache
def _operations() -> Any:
    if not _is_hopper():
        return None
    try:
        return importlib.import_module("flash_mla._loader").get_ops(use_legacy=True)
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("FlashMLA is installed (flash_mla) but not used: %s", error)
        return None


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
