"""A separate, smaller model that drafts: loading, and its memory.

The draft model runs together with its target, on decode workers only, with a separate small KV
pool. The pages of that pool are neither cached nor shipped, and the draft model is part of no
digest.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from weft.contract.errors import ModelError
from weft.engine.base.config import EngineConfig
from weft.engine.executor.graphs import Progress, captures_steps
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.memory_plan import MIN_PAGES, MemoryNeeds, measure_needs
from weft.engine.features.speculative.model_drafter import STEADY_TOKENS, ModelDrafter
from weft.engine.model.loader import LoadedModel, load_model
from weft.pages.memory.page_memory import PageMemory

POOL_SHARE = 0.25
"""Size of the draft model's pool as a share of the target's tokens. When more tokens are in use,
drafts seldom pay.
"""


def load_draft_model(
    config: EngineConfig, target: LoadedModel, progress: Progress
) -> DraftModel | None:
    """Loads the model in `draft_dir`; None if none is configured. Raises ModelError if the model
    cannot be loaded.
    """
    if config.drafter != "model" or config.draft_dir is None:
        return None
    folder, is_dummy = config.draft_dir, config.dummy_weights
    try:
        loaded = load_model(
            folder,
            target.dtype,
            config.device,
            lambda done, total: progress(done, total, "loading the draft model"),
            dummy=is_dummy,
            num_added_tokens=target.config.num_added_tokens,
            task="generate",
            max_context_tokens=config.max_context_tokens,
        )
    except ModelError as error:
        message = f"draft_dir = {folder}, which drafter = model loads: {error.message}"
        raise ModelError(message, param="draft_dir") from error
    return DraftModel(config, loaded)


class DraftModel:
    """A loaded draft model, and the memory that it needs in addition to its target."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self._config = config
        self._loaded = loaded
        self.layout = loaded.model.kv_layout(config.page_size)
        """Layout of a page of the draft model's pool."""
        if self.layout.states is not None:
            message = f"draft_dir = {config.draft_dir}: models with recurrent layers draft nothing"
            raise ModelError(message, param="draft_dir")
        self._max_rows = config.prefill_chunk_tokens + STEADY_TOKENS * config.max_running_requests
        """Rows of the draft model's largest step."""

    def tensors(self) -> list[torch.Tensor]:
        """Its weights."""
        return [tensor for _, tensor in self._loaded.packed.tensors()]

    def num_pages(self, num_target_pages: int, max_context_tokens: int) -> int:
        """Pages of its pool, the null page included; enough for at least one longest request.
        `num_target_pages` does not include the target's null page.
        """
        usable, page_size = num_target_pages - 1, self._config.page_size
        longest = -(-min(self._longest(max_context_tokens), usable * page_size) // page_size)
        most = self._config.max_running_requests * longest
        return 1 + min(max(round(POOL_SHARE * usable), longest), most)

    def added_to(
        self, needs: MemoryNeeds, max_context_tokens: int, page_bytes: int, device: torch.device
    ) -> MemoryNeeds:
        """Adds this model's memory needs to the target's. Runs its largest steps once to measure
        them, so its weights must be on the device. Raises ConfigError if the steps or graphs do not
        fit.
        """
        own = measure_needs(
            self._loaded.model,
            self.layout,
            self._loaded.config.num_embeddings,
            self._config.max_running_requests,
            self._max_rows,
            self._longest(max_context_tokens),
            device,
            cuda_graphs=captures_steps(self._config, self._loaded),
            share=self._config.device_memory_share,
        )
        # The steps of both models run one after the other.
        both = replace(
            needs, step=max(needs.step, own.step), graphs=needs.graphs + own.graphs, free=own.free
        )
        shared_bytes = page_bytes + int(POOL_SHARE * self.layout.page_bytes)
        num_target_pages = max(MIN_PAGES, both.for_pool // shared_bytes)
        num_pages = self.num_pages(num_target_pages, max_context_tokens)
        return replace(both, drafts=num_pages * self.layout.page_bytes)

    def drafter(
        self, num_pages: int, max_context_tokens: int, device: torch.device, progress: Progress
    ) -> ModelDrafter:
        """Makes the pool, of `num_pages` from the method of this name, and on a GPU the graphs.
        Raises ConfigError if there is not enough memory.
        """
        longest = self._longest(max_context_tokens)
        executor = LocalExecutor(
            self._loaded.model,
            self.layout,
            num_pages,
            self._config.max_running_requests,
            longest,
            device,
            max_step_tokens=self._max_rows,
            cuda_graphs=captures_steps(self._config, self._loaded),
            on_capture=progress,
        )
        memory = PageMemory(num_pages, None)
        chunk_tokens = self._config.prefill_chunk_tokens
        return ModelDrafter(executor, memory, self.layout.page_size, longest, chunk_tokens)

    def describe(self, num_pages: int) -> str:
        """One line for the log: the size of its pool."""
        size, tokens = num_pages * self.layout.page_bytes, (num_pages - 1) * self.layout.page_size
        limit = self._loaded.config.max_position_embeddings
        return (
            f"draft model {self._config.draft_dir}: KV of {size / 2**20:.1f} MiB beside the pool, "
            f"for {tokens:,} tokens of requests of at most {limit:,} each; others get no drafts"
        )

    def _longest(self, max_context_tokens: int) -> int:
        return min(max_context_tokens, self._loaded.config.max_position_embeddings)
