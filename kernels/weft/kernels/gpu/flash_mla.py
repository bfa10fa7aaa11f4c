"""FlashMLA over paged latents of DeepSeek's sizes, where a package that has it is installed.

github.com/deepseek-ai/FlashMLA, whose kernels for Hopper `sgl-flash-mla` on PyPI keeps. They take
pages of 64 positions and requests of one row.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, NamedTuple

import torch
from weft.kernels.attention import GroupStep
from weft.kernels.latent_attention import LatentSpec

logger = logging.getLogger(__name__)

PAGE_SIZE = 64
_DIMS = (576, 512)
"""Elements of a position's vector, and of its value."""


class LatentPlan(NamedTuple):
    """How FlashMLA divides a step's work; on the device."""

    kv_lens: torch.Tensor
    """[R] int32, at least 1."""
    tiles: torch.Tensor
    splits: torch.Tensor


def takes(dtype: torch.dtype, dim: int, spec: LatentSpec, page_size: int) -> bool:
    """Whether it is there for such latents of requests of one row."""
    is_fit = dtype == torch.bfloat16 and (dim, spec.value_dim) == _DIMS and page_size == PAGE_SIZE
    return is_fit and spec.first_position == 0 and spec.heads >= 64 and _operations() is not None


def plan_latents(kv_lens: torch.Tensor, heads: int) -> LatentPlan:
    """Divides the work of a step's layers.

    Args:
        kv_lens: [R] int32.
        heads: H.
    """
    operations = _operations()
    assert operations is not None
    # Requests of padding have no position: they read the null page.
    lens = kv_lens.clamp(min=1)
    tiles, splits = operations.get_mla_decoding_metadata(lens, heads, 1, heads, False, None)
    return LatentPlan(lens, tiles, splits)


def flash_mla(
    q: torch.Tensor, pool: torch.Tensor, layer: int, spec: LatentSpec, step: GroupStep
) -> torch.Tensor:
    """`weft.kernels.latent_attention.latent_attention` of a step with a plan."""
    operations, plan = _operations(), step.latents
    assert operations is not None
    assert plan is not None
    # [pages, PAGE_SIZE, 1, 576]
    cache = pool[:, 0, layer].transpose(1, 2)
    out: torch.Tensor = operations.dense_decode_fwd(
        q.unsqueeze(1), cache, spec.value_dim, plan.kv_lens, step.page_table, spec.scale, False,
        plan.tiles, plan.splits,
    )[0]  # fmt: skip
    return out.squeeze(1)


@functools.cache
def _operations() -> Any:
    """Where its operations are registered; None: nowhere, or not for this GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    try:
        return importlib.import_module("flash_mla._loader").get_ops(use_legacy=True)
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("FlashMLA is installed (flash_mla) but not used: %s", error)
        return None
