"""Sizes of an engine's pools: as configured, or on a GPU all memory that is left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from weft.contract.errors import ConfigError
from weft.contract.layout import CacheLayout
from weft.engine.base.config import EngineConfig
from weft.engine.executor.adapter_rows import LoraPool
from weft.engine.executor.drafts.build import tree_rows
from weft.engine.executor.graphs import captures_steps
from weft.engine.executor.memory_plan import (
    MIN_PAGES,
    MemoryNeeds,
    check_pool_fits,
    describe_pool,
    describe_windows,
    divide_pages,
    divide_states,
    measure_needs,
    pages_of,
)
from weft.engine.executor.ranks.leader import RankLeader
from weft.engine.executor.ranks.share import num_media_rows, with_media_rows
from weft.engine.model.loader import LoadedModel
from weft.engine.parallel.shards import layout_of_rank, num_pages_here, num_pages_of_all

DEFAULT_KV_BYTES = 1 << 30
"""Default size of the KV pool on a CPU. With recurrent layers, their states get as much again."""


@dataclass(frozen=True, slots=True)
class Pools:
    num_pages: int
    """Pages of the pool, its null page included."""
    num_pieces: tuple[int, ...]
    """Pieces of each of the layout's companions, their null pieces included."""
    num_draft_pages: int
    """Pages of a draft model's pool, its null page included."""
    notices: list[str]
    """Sentences that explain the sizes."""


class DraftPool(Protocol):
    layout: CacheLayout

    def num_pages(self, num_target_pages: int, max_context_tokens: int) -> int:
        """Number of its pages, the null page included. `num_target_pages` does not include the
        target's null page.
        """
        ...

    def added_to(
        self, needs: MemoryNeeds, max_context_tokens: int, page_bytes: int, device: torch.device
    ) -> MemoryNeeds:
        """Adds this model's needs to the target's, whose pages have `page_bytes`. Raises
        ConfigError if the needs exceed the device's memory.
        """
        ...

    def describe(self, num_pages: int) -> str: ...


def size_pools(
    config: EngineConfig,
    loaded: LoadedModel,
    layout: CacheLayout,
    max_context_tokens: int,
    draft: DraftPool | None,
    device: torch.device,
    lora: LoraPool | None,
    ranks: RankLeader | None,
) -> Pools:
    """Computes the sizes of the pools, on the rank that has the least memory.

    Args:
        loaded: The model, on the device.
        draft: The pool of a separate draft model; None: there is none.
        lora: Adapters on the device; None: there are none.
        ranks: All ranks but this one; None: there are none.

    Raises:
        ConfigError: The pools do not fit, or are too small.
    """
    if loaded.config.is_encoder:
        pages = -(-max_context_tokens // config.page_size)
        told = "an encoder: no KV pool, no prefix cache; prompts are computed whole"
        return Pools(1 + config.max_running_requests * pages, (), 0, [told])
    if device.type == "cuda":
        layout = layout_of_rank(layout, config.tp)
    dcp = config.dcp if device.type == "cuda" else 1
    page_bytes = sum(group.page_bytes(config.page_size) for group in layout.groups)
    needs, num_draft_pages = None, 0
    if device.type == "cuda" and not config.num_pages and config.kv_memory_bytes is None:
        needs, num_blocks = _measure(
            config, loaded, layout, max_context_tokens, draft, device, lora, page_bytes
        )
        num_pages = num_pages_of_all(pages_of(needs, page_bytes), dcp)
        if draft is not None:
            num_draft_pages = needs.drafts // draft.layout.page_bytes
    else:
        num_pages, num_blocks = _configured(config, layout, page_bytes, device)
        if config.num_pages is None:
            num_pages = num_pages_of_all(num_pages, dcp)
        draft_bytes = 0
        if draft is not None:
            num_draft_pages = draft.num_pages(num_pages, max_context_tokens)
            draft_bytes = num_draft_pages * draft.layout.page_bytes
        if device.type == "cuda":
            num_here = num_pages_here(num_pages, dcp)
            check_pool_fits(num_here * page_bytes + draft_bytes, device)
    plan: list[str] = []
    limits = (
        config.max_running_requests,
        config.max_step_tokens,
        max_context_tokens,
        config.most_drafts,
    )
    is_fixed = config.num_pages is not None
    num_pages, *of_windows = divide_pages(layout, num_pages, *limits, is_fixed=is_fixed)
    if needs is not None:
        plan.append(describe_pool(needs, num_pages, layout, dcp))
    if draft is not None:
        plan.append(draft.describe(num_draft_pages))
    num_pieces = [*([] if layout.states is None else [num_blocks]), *of_windows]
    if ranks is not None:
        num_pages = ranks.agree("pages", num_pages)
        num_pieces = [ranks.agree("pieces", count) for count in num_pieces]
    plan += describe_windows(layout, (num_pages, *layout.of_windows(num_pieces)))
    model = loaded.config
    if len(layout.groups) == 1 and model.has_windows:
        why = config.keeps_windows or f"{model.architecture} has one page group"
        plan.append(f"pages are kept behind sliding windows: {why}")
    return Pools(num_pages, tuple(num_pieces), num_draft_pages, plan)


def _measure(
    config: EngineConfig,
    loaded: LoadedModel,
    layout: CacheLayout,
    max_context_tokens: int,
    draft: DraftPool | None,
    device: torch.device,
    lora: LoraPool | None,
    page_bytes: int,
) -> tuple[MemoryNeeds, int]:
    """Measures the memory that a GPU needs besides the pool. Also returns the number of blocks of
    recurrent layers.
    """
    needs = measure_needs(
        loaded.model,
        layout,
        loaded.config.num_embeddings,
        config.max_running_requests,
        config.max_step_tokens + config.decodes_beside,
        max_context_tokens,
        device,
        cuda_graphs=captures_steps(config, loaded),
        share=config.device_memory_share,
        lora=lora,
        max_drafts=config.most_drafts,
        tree_rows=tree_rows(config),
        has_media=num_media_rows(config, loaded, layout) > 0,
    )
    needs = with_media_rows(needs, config, loaded, layout, device)
    if draft is not None:
        needs = draft.added_to(needs, max_context_tokens, page_bytes, device)
    if layout.states is None or needs.for_pool <= 0:
        return needs, 0
    most = config.max_running_requests, config.most_drafts
    num_blocks, left = divide_states(layout, needs.for_pool, *most, on_gpu=True)
    return replace(needs, states=needs.for_pool - left), num_blocks


def _configured(
    config: EngineConfig, layout: CacheLayout, page_bytes: int, device: torch.device
) -> tuple[int, int]:
    default = DEFAULT_KV_BYTES if layout.states is None else 2 * DEFAULT_KV_BYTES
    size = default if config.kv_memory_bytes is None else config.kv_memory_bytes
    size = size if config.num_pages is None else config.num_pages * page_bytes
    num_blocks, size = divide_states(
        layout,
        size,
        config.max_running_requests,
        config.most_drafts,
        is_fixed=config.num_pages is not None,
        on_gpu=device.type == "cuda",
    )
    num_pages = size // page_bytes
    if num_pages < MIN_PAGES:
        raise ConfigError(
            f"kv_memory_bytes = {size:,} holds {num_pages} pages of "
            f"{page_bytes:,} bytes; give at least {MIN_PAGES * page_bytes:,}"
        )
    return num_pages, num_blocks


def describe_context(config: EngineConfig, model_tokens: int, pool_tokens: int) -> list[str]:
    """Says why requests have fewer tokens than the model takes or the settings ask for.

    Args:
        model_tokens: Length of the longest request that the model takes.
        pool_tokens: Length of the longest request that the KV pool holds.

    Returns:
        At most one line.
    """
    asked = config.max_context_tokens or model_tokens
    if pool_tokens < min(asked, model_tokens):
        return [
            f"a request has at most {pool_tokens:,} tokens, prompt and output together, instead of "
            f"{min(asked, model_tokens):,}: the KV pool holds no more"
        ]
    if asked > model_tokens:
        return [
            f"a request has at most {model_tokens:,} tokens, prompt and output together, instead "
            f"of {asked:,} (max_context_tokens): the model takes no more"
        ]
    return []
