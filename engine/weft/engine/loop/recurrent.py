"""Checks, blocks and tier access of an engine whose model has recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.checkpoint.config import ModelConfig
from weft.contract.handle import KvHandle
from weft.contract.layout import CacheLayout
from weft.contract.store import MAX_STORED_BLOCK_PAGES
from weft.engine.base.config import EngineConfig
from weft.engine.executor.orders import PackBlock, UnpackBlock, ZeroPages
from weft.engine.executor.port import Executor
from weft.engine.loop.parts import EngineComponents
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import Request
from weft.engine.requests.state_blocks import StateBlocks
from weft.engine.sources.tiers.blocks import BlockAccess
from weft.pages.fills.lease import FillJob
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.state_index import StateIndex
from weft.pages.memory.tree import Node, PrefixTree


def num_block_pages(layout: CacheLayout) -> int:
    """Pages of KV that have room for a block of recurrent layers; 0: the model has no blocks."""
    return 0 if layout.states is None else -(-layout.states.block_bytes // layout.page_bytes)


def keeps_windows(config: EngineConfig, model: ModelConfig) -> str:
    """Why the engine keeps this model's pages that sliding windows have passed; empty: it frees
    them.
    """
    is_recurrent = model.decoder is not None and bool(model.decoder.recurrent_layers)
    if is_recurrent and config.has_tiers:
        return "tiers hold states of recurrent layers or windows, not both"
    return config.keeps_windows


def describe_recurrent(layout: CacheLayout, num_blocks: int) -> list[str]:
    states = layout.states
    if states is None:
        return []
    return [
        f"{states.layers} recurrent layers ({states.name}): {num_blocks:,} blocks of "
        f"{states.block_bytes:,} bytes, as much as the KV of "
        f"{states.block_bytes * layout.page_size // layout.page_bytes:,} tokens"
    ]


def keeps_in_store(config: EngineConfig, layout: CacheLayout) -> bool:
    """Whether the KV store keeps this model's pages. It does not if the model's blocks are longer
    than the store takes.
    """
    return config.has_store and num_block_pages(layout) <= MAX_STORED_BLOCK_PAGES


def describe_store(config: EngineConfig, layout: CacheLayout) -> list[str]:
    """Sentences that say why the KV store is not used for this model, and what to do."""
    if not config.has_store or keeps_in_store(config, layout):
        return []
    return [
        f"the KV store keeps nothing of this model: its states take {num_block_pages(layout):,} "
        f"pages a block, at most {MAX_STORED_BLOCK_PAGES:,}; set a larger page_size "
        f"({config.page_size} tokens now)"
    ]


def make_states(
    config: EngineConfig, layout: CacheLayout, num_blocks: int, prefixes: PrefixTree | None
) -> StateBlocks | None:
    """The owner of blocks; None: the model has none."""
    if layout.states is None:
        return None
    index = None if prefixes is None else StateIndex(prefixes)
    memory = PageMemory(num_blocks, index, tracks_freed=config.poison_free_pages)
    sizes = config.page_size, config.checkpoint_tokens, config.max_running_requests
    return StateBlocks(memory, index, *sizes, 1 + config.most_drafts)


def block_access(parts: EngineComponents, states: StateBlocks, pages: RequestPages) -> BlockAccess:
    num_pages, page_bytes = num_block_pages(parts.layout), parts.layout.page_bytes
    return BlockAccess(
        owner=states,
        num_pages=num_pages,
        make_pool=lambda: parts.local.block_pool(num_pages, page_bytes),
        num_continuable_pages=pages.num_continuable_pages,
    )


class StatePacker:
    """Carries blocks of recurrent layers in pages of KV, so that leases ship them alike."""

    def __init__(
        self, layout: CacheLayout, states: StateBlocks, memory: PageMemory, executor: Executor
    ) -> None:
        self.num_pages = num_block_pages(layout)
        self.window_pages = 0
        self._page_size = layout.page_size
        self._states = states
        self._memory = memory
        self._executor = executor
        self.on_allocated: Callable[[], None] = lambda: None
        """Called before writing to pages that may have been taken from the prefix cache."""

    stored_block_pages = 0
    """The store's leases carry one block."""

    def num_pages_of(
        self, asked: KvHandle | Request, end_token: int = 0, *, is_stored: bool = False
    ) -> int:
        return self.num_pages

    def pack(self, job: FillJob, end_token: int) -> list[int] | None:
        assert isinstance(job, Request)
        block = self._states.block_at(job, end_token // self._page_size)
        if block is None or job.held.num_promised < self.num_pages:
            return None
        pages = job.held.take_promised(self._memory, self.num_pages, job.namespace)
        return self._fill(pages, block)

    def copy(self, blocks: Sequence[int], /, namespace: bytes) -> list[list[int]]:
        room = max(0, self._memory.num_available_pages) // self.num_pages
        return [
            self._fill(self._memory.allocate(self.num_pages, namespace), block)
            for block in blocks[:room]
        ]

    def kept_of(self, request: Request, first: int, end: int) -> Sequence[tuple[Node, int]]:
        return self._states.kept_of(request, first, end)

    def _fill(self, pages: list[int], block: int) -> list[int]:
        self.on_allocated()
        # Otherwise the next step would zero them.
        self._executor.order(ZeroPages(self._memory.take_wipes()))
        self._executor.order(PackBlock(block, pages))
        # Threads read these pages, and write to others that were zeroed, without waiting for steps.
        self._executor.mark().wait()
        return pages

    def settle(self) -> None: ...

    def unpack(
        self, request: Request, pages: list[int], end_token: int, *, is_stored: bool
    ) -> None:
        block = self._states.adopt(request, end_token // self._page_size)
        self._executor.order(UnpackBlock(block, pages))
        self._states.committed(request)
