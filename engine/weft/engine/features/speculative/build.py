"""Makes the drafter and the gate that a worker's settings ask for."""

from __future__ import annotations

from collections.abc import Callable

from weft.contract.adapters import AdapterOrder
from weft.engine.base.config import HEAD_DRAFTERS, EngineConfig
from weft.engine.executor.adapter_rows import LoraPool
from weft.engine.executor.drafts.build import head_graphs
from weft.engine.executor.drafts.eager_chains import Chains
from weft.engine.executor.local import LocalExecutor
from weft.engine.features.speculative.adapted import AdaptedDrafter
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.features.speculative.fixed_gate import FixedGate
from weft.engine.features.speculative.gate import MeasuredGate
from weft.engine.features.speculative.ngram import NgramDrafter
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.scheduler.ports import Drafter, DraftGate
from weft.pages.memory.page_table import PageTable


def make_drafter(
    config: EngineConfig,
    drafted: DraftedModel | None,
    executor: LocalExecutor,
    lora: LoraPool | None,
    wake: Callable[[], None],
    on_order: list[Callable[[AdapterOrder], None]],
    chains: Callable[[DraftedModel, PageTable], Chains],
    table: PageTable,
    *,
    draws_on_device: bool,
) -> Drafter | None:
    """The drafter that the settings name; None: no drafts, or a separate draft model makes them.

    Args:
        drafted: The model with its head; None: the model has no head.
        lora: Rows of adapters on the device; None: no adapters are served.
        wake: Called from another thread when a draft adapter was read.
        on_order: Receives functions that must follow the orders of adapters.
        chains: Makes a head's chains without graphs, on all ranks.
        table: Has the pages of the steps that were launched.

    Raises:
        ConfigError: There is not enough memory for the graphs.
    """
    if config.drafter == "ngram":
        return NgramDrafter()
    if drafted is None or config.drafter not in HEAD_DRAFTERS:
        return None
    graphs, trees = None, None
    if config.pp == 1:  # Other stages get drafts from the host, which therefore waits for them.
        graphs, trees = head_graphs(config, drafted, executor, lora)

    def of(model: DraftedModel) -> EagleDrafter:
        return EagleDrafter(
            model,
            executor.pool,
            table,
            config.page_size,
            chains(model, table),
            graphs,
            trees,
            waits_for_trees=not draws_on_device,
        )

    plain = of(drafted)
    if plain.is_on_device or not config.enable_lora or config.tp > 1:
        return plain
    # Each draft adapter needs a copy of the head and a separate drafter.
    adapted = AdaptedDrafter(
        plain, lambda folder: of(drafted.adapted(folder)), drafted.head.layer_bytes, wake
    )
    on_order.append(adapted.order)
    return adapted


def make_gate(config: EngineConfig) -> DraftGate:
    most, width = config.max_draft_tokens, config.draft_width
    if config.draft_gate == "measured":
        return MeasuredGate(most, width, overlaps=config.is_overlapped)
    return FixedGate(most, width)
