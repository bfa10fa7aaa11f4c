"""Makes the drafter on the device that a worker's settings ask for."""

from __future__ import annotations

import itertools

import torch
from weft.contract.layout import CacheLayout
from weft.engine.base.config import HEAD_DRAFTERS, MAX_TREE_NODES, EngineConfig
from weft.engine.base.drafts import tree_shapes
from weft.engine.executor.adapter_rows import LoraPool
from weft.engine.executor.drafts.chains import ChainGraphs, StaticChains, chain_shapes
from weft.engine.executor.drafts.draft_rows import AdapterRows, DraftAdapterFiles
from weft.engine.executor.drafts.tree_graphs import StaticTrees, TreeBucket, TreeGraphs
from weft.engine.executor.graphs import TREE_REQUESTS, capturing
from weft.engine.executor.local import LocalExecutor
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.drafted import DraftedModel, load_drafted
from weft.engine.model.heads.eagle3 import Eagle3Head, adaptable_shapes
from weft.engine.model.heads.elsewhere import mtp_elsewhere
from weft.engine.model.loader import LoadedModel


def load_head(config: EngineConfig, loaded: LoadedModel) -> DraftedModel | None:
    """Loads the model with its draft head; None if no head is configured."""
    max_requests = config.max_running_requests
    max_rows = config.max_step_tokens + config.decodes_beside
    max_rows = max(max_rows, max_requests * (1 + config.max_draft_tokens))
    if loaded.mtp is not None:
        assert isinstance(loaded.model, DecoderOnlyLM), "a model that brings a head is a decoder"
        stage = loaded.model.stage
        is_here = stage is None or stage.is_last
        head = loaded.mtp if is_here else mtp_elsewhere(loaded.mtp)
        return DraftedModel(loaded.model, head, max_requests, max_rows)
    if config.head_dir is None:
        return None
    return load_drafted(loaded, config.head_dir, max_requests, max_rows)


def describe_drafts(config: EngineConfig, layout: CacheLayout) -> list[str]:
    """Lines for the log: the drafter, and the head whose KV the pages hold."""
    draft = layout.plane.draft
    kind = "MTP" if config.reads_mtp else "EAGLE"
    head = f"pages hold KV of the {kind} head {draft[:12]}" if draft else ""
    if config.role == "prefill" or config.drafter == "none":
        return [f"drafts: {head}"] if head else []
    most = str(config.max_draft_tokens)
    if config.draft_width > 1:
        most += f" in a chain or {MAX_TREE_NODES} in a tree"
    who = f"by {config.drafter}, at most {most} a step of a request"
    if config.enable_lora and config.tp > 1 and config.drafter in HEAD_DRAFTERS:
        who += "; with ranks, draft adapters of adapters are not used"
    return [f"drafts: {who}{'; ' if head else ''}{head}"]


def head_graphs(
    config: EngineConfig, drafted: DraftedModel, executor: LocalExecutor, lora: LoraPool | None
) -> tuple[ChainGraphs | None, TreeGraphs | None]:
    """Captures a head's chains and trees; None in place of graphs that are not captured. Raises
    ConfigError if there is not enough memory for the graphs.
    """
    if lora is not None and not lora.takes_drafts:
        lora = None  # No adapter can change this head, so graphs with adapters would be the same.
    chains = _chain_graphs(config, drafted, executor, lora)
    return chains, _tree_graphs(config, drafted, executor, lora)


def _chain_graphs(
    config: EngineConfig, drafted: DraftedModel, executor: LocalExecutor, lora: LoraPool | None
) -> ChainGraphs | None:
    if executor.graphs is None or executor.inputs is None or drafted.head.kind == "eagle":
        return None
    most = config.max_running_requests
    adapters = None if lora is None else AdapterRows(lora, executor.pool.device, most, [1])
    shapes = chain_shapes(config.max_draft_tokens, most, has_lora=lora is not None)
    chains = StaticChains(
        drafted,
        executor.own_pool,
        executor.known,
        executor.inputs,
        config.page_size,
        max(shapes),
        adapters,
        executor.rotations,
    )
    with capturing("drafts"):
        return ChainGraphs(chains, shapes, executor.graphs.capture)


def _tree_graphs(
    config: EngineConfig, drafted: DraftedModel, executor: LocalExecutor, lora: LoraPool | None
) -> TreeGraphs | None:
    shapes = tree_shapes(config.draft_width)
    if not shapes or executor.graphs is None or executor.inputs is None:
        return None
    most = min(max(TREE_REQUESTS), config.max_running_requests)
    sizes = sorted({min(size, most) for size in TREE_REQUESTS})
    adapters = None
    if lora is not None:
        adapters = AdapterRows(lora, executor.pool.device, most, [1, config.draft_width])
    trees = StaticTrees(
        drafted, executor.pool, executor.known, executor.inputs, config.page_size, most, adapters
    )
    kinds = (False,) if lora is None else (False, True)
    buckets = [TreeBucket(*of) for of in itertools.product(shapes, sizes, kinds)]
    with capturing("trees of drafts"):
        return TreeGraphs(trees, buckets, executor.graphs.capture)


def max_drafts_of_a_step(config: EngineConfig) -> int:
    """Most drafts of all requests in a step."""
    nodes = max((rows - 1 for rows in tree_rows(config)), default=0)
    return max(config.max_running_requests * config.most_drafts, max(TREE_REQUESTS) * nodes)


def tree_rows(config: EngineConfig) -> list[int]:
    """Rows of each tree, its root included; empty without trees."""
    return [1 + shape.num_drafts for shape in tree_shapes(config.draft_width)]


def draft_adapters(
    config: EngineConfig, drafted: DraftedModel | None, device: torch.device
) -> DraftAdapterFiles | None:
    """Reader of draft adapters for the head; None where drafting is not captured or the head is
    divided among ranks.
    """
    if device.type != "cuda" or not config.cuda_graphs or config.drafter != "eagle3":
        return None
    if drafted is None or not isinstance(drafted.head, Eagle3Head) or config.num_ranks > 1:
        return None
    return DraftAdapterFiles(adaptable_shapes(drafted.head.config))
