"""What an engine does otherwise for models with recurrent layers."""

from __future__ import annotations

from dataclasses import replace

from weft.engine.base.config import EngineConfig
from weft.engine.base.errors import ConfigError
from weft.engine.executor.port import Executor
from weft.engine.memory.layout import CacheLayout
from weft.engine.memory.page_memory import PageMemory
from weft.engine.memory.state_index import StateIndex
from weft.engine.memory.tree import PrefixTree
from weft.engine.scheduler.state import Request
from weft.engine.scheduler.state_blocks import StateBlocks


def served_config(config: EngineConfig, layout: CacheLayout) -> EngineConfig:
    """The settings with which a model is served: with recurrent layers there are no KV store and no
    tiers, which keep no blocks.
    """
    if layout.states is None:
        return config
    return replace(config, has_store=False, host_cache_bytes=0, disk_cache_dir=None)


def check_recurrent(config: EngineConfig, kind: str = "") -> None:
    """Refuses settings under which no model with recurrent layers runs.

    Args:
        config: The settings.
        kind: Name of the state plane, if the model is loaded.

    Raises:
        ConfigError: One of them is set.
    """
    drafts = 0 if config.drafter == "none" else config.max_draft_tokens
    refused = (
        ("device", config.is_on_gpu and kind == "mamba", "cpu for layers of the first Mamba"),
        (
            "max_draft_tokens",
            config.is_on_gpu and drafts >= config.page_size,
            f"below page_size = {config.page_size} on a GPU for models with recurrent layers",
        ),
        ("tp", config.tp > 1, "1 for models with recurrent layers, whose states are not divided"),
        (
            "drafter",
            config.drafter not in ("none", "ngram", "mtp"),
            "none, ngram or mtp for models with recurrent layers",
        ),
        ("enable_lora", config.enable_lora, "off for models with recurrent layers"),
        (
            "deterministic",
            config.deterministic,
            "off for models with recurrent layers, whose sums depend on how prompts are cut",
        ),
    )
    for name, is_wrong, wanted in refused:
        if is_wrong:
            raise ConfigError(f"{name} = {getattr(config, name)}: must be {wanted}", param=name)


def describe_recurrent(config: EngineConfig, layout: CacheLayout, num_blocks: int) -> list[str]:
    """Describes the memory of recurrent layers, and what their model goes without here."""
    states = layout.states
    if states is None:
        return []
    told = [
        f"{states.layers} recurrent layers ({states.name}): {num_blocks:,} blocks of "
        f"{states.block_bytes:,} bytes, as much as the KV of "
        f"{states.block_bytes * layout.page_size // layout.page_bytes:,} tokens"
    ]
    without = (
        (config.has_store, "does not use the KV store"),
        (
            config.host_cache_bytes > 0 or config.disk_cache_dir is not None,
            "keeps no pages in host memory or on disk",
        ),
    )
    lacks = "; ".join(text for is_so, text in without if is_so)
    return [*told, f"recurrent layers: this worker {lacks}"] if lacks else told


def make_states(
    config: EngineConfig, layout: CacheLayout, num_blocks: int, prefixes: PrefixTree | None
) -> StateBlocks | None:
    """The owner of blocks; None: the model has none."""
    if layout.states is None:
        return None
    index = None if prefixes is None else StateIndex(prefixes)
    memory = PageMemory(num_blocks, index, tracks_freed=config.poison_free_pages)
    sizes = config.page_size, config.checkpoint_tokens, config.max_running_requests
    max_drafts = 0 if config.drafter == "none" else config.max_draft_tokens
    return StateBlocks(memory, index, *sizes, max_drafts)


class BlocksInPages:
    """Carries blocks of recurrent layers in pages of KV, so that leases ship them as they do these.

    Args:
        layout: Of pages and blocks.
        states: The owner of blocks.
        memory: The owner of pages.
        executor: Has the bytes of both.
    """

    def __init__(
        self, layout: CacheLayout, states: StateBlocks, memory: PageMemory, executor: Executor
    ) -> None:
        assert layout.states is not None
        self.num_pages = -(-layout.states.block_bytes // layout.page_bytes)
        self._page_size = layout.page_size
        self._states = states
        self._memory = memory
        self._executor = executor

    def pack(self, request: Request, end_token: int) -> list[int] | None:
        """See `BlockPages.pack`."""
        block = self._states.block_at(request, end_token // self._page_size)
        if block is None or self._memory.num_available_pages < self.num_pages:
            return None
        pages = self._memory.allocate(self.num_pages, request.namespace)
        # Otherwise the next step would zero them.
        self._executor.zero(self._memory.take_wipes())
        self._executor.pack_block(block, pages)
        return pages

    def unpack(self, request: Request, pages: list[int], end_token: int) -> None:
        """See `BlockPages.unpack`."""
        block = self._states.adopt(request, end_token // self._page_size)
        self._executor.unpack_block(block, pages)
        self._states.committed(request)
