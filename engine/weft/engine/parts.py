"""Loads the components of an engine: model, pool, memory, data plane."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from weft.engine.clock import Clock
from weft.engine.config import HEAD_DRAFTERS, MAX_TREE_NODES, EngineConfig
from weft.engine.constraints.constraints import Constraints
from weft.engine.errors import ConfigError
from weft.engine.intake import Intake
from weft.engine.lora.manager import AdapterManager
from weft.engine.lora.pool import LoraPool, plan_lora
from weft.engine.lora.projections import projections_of
from weft.engine.memory.eviction import EVICTION_POLICIES
from weft.engine.memory.kv_memory import KvMemory
from weft.engine.memory.layout import PlaneLayout
from weft.engine.memory.radix_cache import RadixCache
from weft.engine.messages import EngineInfo, StoreLookup, StorePut
from weft.engine.models.decoder_only import DecoderOnlyLM
from weft.engine.models.eagle3 import Eagle3Head, adaptable_shapes
from weft.engine.models.loader import LoadedModel, load_model
from weft.engine.runner.graphs import TREE_REQUESTS, Progress, capturing
from weft.engine.runner.memory_plan import (
    MIN_PAGES,
    check_pool_fits,
    describe_pool,
    measure_needs,
    pages_of,
    time_token,
)
from weft.engine.runner.runner import ModelRunner
from weft.engine.sampling.device_check import device_sampler_fault
from weft.engine.sampling.sampler import Sampler
from weft.engine.scheduler.state import Request
from weft.engine.speculative.adapted import AdaptedDrafter
from weft.engine.speculative.chains import ChainGraphs, StaticChains, chain_shapes
from weft.engine.speculative.draft_model import DraftModel, load_draft_model
from weft.engine.speculative.draft_rows import AdapterRows, DraftAdapterFiles
from weft.engine.speculative.drafted import DraftedModel, load_drafted
from weft.engine.speculative.drafter import Drafter
from weft.engine.speculative.eagle import EagleDrafter
from weft.engine.speculative.gate import tree_shapes
from weft.engine.speculative.tree_graphs import StaticTrees, TreeBucket, TreeGraphs
from weft.engine.stats import UNKNOWN_STEP_S
from weft.engine.store import StoreLink
from weft.engine.tiers.parts import TierParts, load_tiers
from weft.engine.transfer.nixl import nixl_available
from weft.engine.transfer.page_mover import Lanes, PageMover
from weft.engine.transfer.plane import DataPlane
from weft.engine.transfer.staging import StagingArea
from weft.engine.transfer.staging_memory import (
    DeviceStagingPages,
    PinnedStagingPages,
    StagingMemory,
)
from weft.engine.transfer.window import DirectWindow, PoolWindow, StagedWindow
from weft.kernels.attention import MAX_TREE_ROWS
from weft.kernels.cpu import native_cpu, native_cpu_missing

DEFAULT_KV_BYTES = 1 << 30
"""Default size of the KV pool on a CPU."""
DEFAULT_STAGING_BYTES = 2 << 30
MIN_STAGING_PAGES = 4
MAX_SWITCH_S = 5e-4
"""For so long a thread keeps Python's lock from one that waits for it: the engine's, whose steps
would else be up to 5 ms late while another one reads an adapter or makes masks.
"""
LANDING_SHARES = {
    ("decode", False): 1.0,
    ("decode", True): 7 / 8,
    ("prefill", False): 0.0,
    ("prefill", True): 1 / 4,
}
"""Share of a staging area in which fills are received, by role and whether there is a KV store;
both parts have at least one page.
"""

MAX_FIXED_GROUP = 64
"""Query heads of a KV head in a tile of rows of deterministic attention on a GPU."""


@dataclass(slots=True, kw_only=True)
class EngineParts:
    """The components that `Engine` wires together."""

    runner: ModelRunner
    layout: PlaneLayout
    memory: KvMemory
    prefixes: RadixCache | None
    """Index of `memory`; None: no prefix caching."""
    intake: Intake
    constraints: Constraints
    plane: DataPlane
    info: EngineInfo
    tiers: TierParts | None = None
    """Tiers below the pool; None: there are none."""
    sampler: Sampler | None = None
    """The sampler; None: tokens are drawn on the host."""
    adapters: AdapterManager | None = None
    """The adapters; None: none are served."""
    drafter: Drafter | None = None
    """The drafter that runs a draft model; None: there is none."""
    token_s: float = UNKNOWN_STEP_S
    """Seconds a token of a step with a few tokens."""


def load_parts(
    config: EngineConfig,
    *,
    wake: Callable[[], None] = lambda: None,
    progress: Progress = lambda done, total, what: None,
) -> EngineParts:
    """Loads the model and creates the pool.

    Args:
        config: settings.
        wake: called from other threads when the engine should turn.
        progress: called with (done, in all, what in words): of bytes while weights load, then of
            graphs while they are captured.

    Raises:
        ModelError, ConfigError: the directory or the settings cannot be used.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    sys.setswitchinterval(min(sys.getswitchinterval(), MAX_SWITCH_S))
    device = _device(config)
    loaded = load_model(
        config.model_dir,
        config.dtype,
        config.device,
        lambda done, total: progress(done, total, "loading the model"),
        dummy=config.dummy_weights,
        is_fixed=config.deterministic and device.type == "cuda",
    )
    drafted = _load_head(config, loaded)
    if drafted is not None:
        loaded = replace(loaded, model=drafted)
    draft = load_draft_model(config, loaded, progress)
    layout = loaded.model.kv_layout(config.page_size)
    promise = _promise_determinism(config, loaded, layout, device) if config.deterministic else []
    limit = min(
        config.max_context_tokens or loaded.config.max_position_embeddings,
        loaded.config.max_position_embeddings,
    )
    is_staged = config.ships_pages and (device.type == "cuda" or config.force_staging)
    lanes = Lanes(device, layout.page_bytes) if is_staged else None
    staging = _staging_memory(config, layout.page_bytes, device) if is_staged else None
    lora = _lora_pool(config, loaded, drafted, device)
    num_pages, num_draft_pages, plan = _size_pools(
        config, loaded, layout, limit, device, lora, draft
    )
    max_tokens = min(limit, (num_pages - 1) * config.page_size)
    runner = ModelRunner(
        loaded.model,
        layout,
        num_pages,
        config.max_running_requests,
        max_tokens,
        device,
        max_step_tokens=config.max_step_tokens + config.decodes_beside,
        cuda_graphs=config.cuda_graphs,
        lora=lora,
        states=drafted,
        max_drafts=_max_drafts(config),
        tree_rows=_tree_rows(config),
        on_capture=progress,
    )
    # Before any thread beside this one may use the device: graphs are captured.
    drafter: Drafter | None = None
    if draft is not None:
        drafter = draft.drafter(num_draft_pages, max_tokens, device, progress)
    elif drafted is not None and config.drafter in HEAD_DRAFTERS:
        drafter = _head_drafter(config, drafted, runner, lora, wake)
    vocab_size = loaded.config.vocab_size
    sampling_device, faults = _sampling_device(vocab_size, device)
    sampler = Sampler(
        vocab_size,
        config.max_running_requests,
        device=sampling_device,
        max_masked_rows=_max_drafts_of_a_step(config),
    )
    runner.capture_draws(sampler.plain_tables)
    window: PoolWindow = DirectWindow(runner.pool_bytes)
    if lanes is not None and staging is not None:
        window = _staged_window(config, runner.pool, staging, lanes)
    plane = DataPlane(config, window, wake)
    intake = Intake(
        config,
        layout,
        loaded.digest,
        loaded.config.vocab_size,
        loaded.config.eos_token_ids,
        max_tokens,
    )
    constraints = Constraints(config, loaded.config.vocab_size, loaded.config.eos_token_ids, wake)
    info = EngineInfo(
        epoch=secrets.randbits(64) | 1,
        model_digest=loaded.digest,
        dtype=loaded.dtype,
        vocab_size=vocab_size,
        max_context_tokens=max_tokens,
        num_pages=num_pages - 1,
        page_size=config.page_size,
        page_bytes=layout.page_bytes,
        layers=layout.layers,
        kv_heads=layout.heads,
        draft=layout.draft,
        head_dim=layout.dim,
        transports=plane.transports,
        transport_detail=plane.describe(),
        versions=_versions(),
        notices=[
            *(*plane.notices, *plan, *([] if lora is None else [lora.limits.describe()])),
            *(*faults, *_missing_native(device), *_describe_drafts(config, layout), *promise),
        ],
        engine_pid=os.getpid(),
        max_loras=config.max_loras if lora is not None else 0,
        max_lora_rank=config.max_lora_rank if lora is not None else 0,
    )
    tiers = load_tiers(config, layout.page_bytes, runner.page_pool, runner.pin, wake)
    if tiers is not None:
        info.notices.extend(tiers.notices)
    prefixes: RadixCache | None = None
    if config.prefix_cache:
        prefixes = RadixCache(config.page_size, EVICTION_POLICIES[config.kv_eviction_policy])
    memory = KvMemory(num_pages, prefixes, tracks_freed=config.poison_free_pages)
    adapters = AdapterManager(lora.limits, lora, wake) if lora is not None else None
    return EngineParts(
        runner=runner,
        layout=layout,
        memory=memory,
        prefixes=prefixes,
        intake=intake,
        constraints=constraints,
        plane=plane,
        info=info,
        tiers=tiers,
        sampler=sampler,
        adapters=adapters,
        drafter=drafter,
        token_s=time_token(
            runner, layout, config.max_running_requests, config.max_step_tokens, max_tokens
        ),
    )


def make_store(
    config: EngineConfig,
    parts: EngineParts,
    num_held_pages: Callable[[Request, int], int],
    send: Callable[[StoreLookup | StorePut], None],
    clock: Clock,
) -> StoreLink | None:
    """An engine's side of the KV store, if there is one; see `StoreLink`."""
    if not config.has_store:
        return None
    return StoreLink(config.page_size, parts.memory, num_held_pages, parts.plane, send, clock)


def _load_head(config: EngineConfig, loaded: LoadedModel) -> DraftedModel | None:
    """Loads the model with its draft head; None without one."""
    if config.head_dir is None:
        return None
    max_requests = config.max_running_requests
    max_rows = config.max_step_tokens + config.decodes_beside
    max_rows = max(max_rows, max_requests * (1 + config.max_draft_tokens))
    drafted = load_drafted(loaded, config.head_dir, max_requests, max_rows)
    if config.drafter in HEAD_DRAFTERS and config.drafter != drafted.head.kind:
        raise ConfigError(
            f"drafter = {config.drafter}: the head in {config.head_dir} is for the drafter "
            f"{drafted.head.kind}",
            param="drafter",
        )
    window = loaded.config.sliding_window
    if config.draft_width > 1 and window is not None and window.length <= MAX_TREE_ROWS:
        raise ConfigError(
            f"draft_width = {config.draft_width}: layers of this model attend to the last "
            f"{window.length} positions alone, too few for trees of {MAX_TREE_ROWS} rows; set 1",
            param="draft_width",
        )
    return drafted


def _describe_drafts(config: EngineConfig, layout: PlaneLayout) -> list[str]:
    """Describes the drafter, and the head whose KV the pages hold."""
    head = f"pages hold KV of the EAGLE head {layout.draft[:12]}" if layout.draft else ""
    if config.role == "prefill" or config.drafter == "none":
        return [f"drafts: {head}"] if head else []
    most = str(config.max_draft_tokens)
    if config.draft_width > 1:
        most += f" in a chain or {MAX_TREE_NODES} in a tree"
    who = f"by {config.drafter}, at most {most} a step of a request"
    return [f"drafts: {who}{'; ' if head else ''}{head}"]


def _head_drafter(
    config: EngineConfig,
    drafted: DraftedModel,
    runner: ModelRunner,
    lora: LoraPool | None,
    wake: Callable[[], None],
) -> Drafter:
    """Creates the drafter of a head, with captured graphs where steps are captured; else the head
    is copied for each draft adapter.

    Raises:
        ConfigError: There is not enough memory for the graphs.
    """
    if lora is not None and not lora.takes_drafts:
        lora = None  # Graphs with adapters would be as those without.
    graphs = _chain_graphs(config, drafted, runner, lora)
    trees = _tree_graphs(config, drafted, runner, lora)

    def of(model: DraftedModel) -> EagleDrafter:
        return EagleDrafter(model, runner.pool, runner.page_table, config.page_size, graphs, trees)

    if graphs is not None or not config.enable_lora:
        return of(drafted)
    return AdaptedDrafter(
        of(drafted), lambda folder: of(drafted.adapted(folder)), drafted.head.layer_bytes, wake
    )


def _chain_graphs(
    config: EngineConfig, drafted: DraftedModel, runner: ModelRunner, lora: LoraPool | None
) -> ChainGraphs | None:
    if runner.graphs is None or runner.inputs is None or drafted.head.kind != "eagle3":
        return None
    most = config.max_running_requests
    adapters = None if lora is None else AdapterRows(lora, runner.pool.device, most, [1])
    shapes = chain_shapes(config.max_draft_tokens, most, has_lora=lora is not None)
    chains = StaticChains(
        drafted, runner.pool, runner.known, runner.inputs, config.page_size, max(shapes), adapters
    )
    with capturing("drafts"):
        return ChainGraphs(chains, shapes, runner.graphs.capture)


def _tree_graphs(
    config: EngineConfig, drafted: DraftedModel, runner: ModelRunner, lora: LoraPool | None
) -> TreeGraphs | None:
    shapes = tree_shapes(config.draft_width)
    if not shapes or runner.graphs is None or runner.inputs is None:
        return None
    most = min(max(TREE_REQUESTS), config.max_running_requests)
    sizes = sorted({min(size, most) for size in TREE_REQUESTS})
    adapters = None
    if lora is not None:
        adapters = AdapterRows(lora, runner.pool.device, most, [1, config.draft_width])
    trees = StaticTrees(
        drafted, runner.pool, runner.known, runner.inputs, config.page_size, most, adapters
    )
    kinds = (False,) if lora is None else (False, True)
    buckets = [TreeBucket(*of) for of in itertools.product(shapes, sizes, kinds)]
    with capturing("trees of drafts"):
        return TreeGraphs(trees, buckets, runner.graphs.capture)


def _max_drafts(config: EngineConfig) -> int:
    """Most drafts of one request in a step, as a chain."""
    return 0 if config.drafter == "none" else config.max_draft_tokens


def _max_drafts_of_a_step(config: EngineConfig) -> int:
    """Most drafts of all requests in a step."""
    nodes = max((rows - 1 for rows in _tree_rows(config)), default=0)
    return max(config.max_running_requests * _max_drafts(config), max(TREE_REQUESTS) * nodes)


def _tree_rows(config: EngineConfig) -> list[int]:
    """Rows of a request whose drafts form a tree: its last token and the drafts; none without
    trees.
    """
    return [1 + shape.num_drafts for shape in tree_shapes(config.draft_width)]


def _lora_pool(
    config: EngineConfig, loaded: LoadedModel, drafted: DraftedModel | None, device: torch.device
) -> LoraPool | None:
    """Creates the memory for adapters; None if none are served."""
    if not config.enable_lora:
        return None
    dtype: torch.dtype = getattr(torch, loaded.dtype)
    drafts = _draft_adapters(config, drafted, device)
    projections = projections_of(loaded.config, config.lora_projections)
    projections += () if drafts is None else drafts.projections
    limits = plan_lora(config, projections, dtype)
    model, rank = loaded.config, config.max_lora_rank
    return LoraPool(limits, projections, model, config.model_dir, rank, dtype, device, drafts)


def _draft_adapters(
    config: EngineConfig, drafted: DraftedModel | None, device: torch.device
) -> DraftAdapterFiles | None:
    """Draft adapters that adapters may bring for the head, where drafting is captured in graphs."""
    if device.type != "cuda" or not config.cuda_graphs or config.drafter != "eagle3":
        return None
    if drafted is None or not isinstance(drafted.head, Eagle3Head):
        return None
    return DraftAdapterFiles(adaptable_shapes(drafted.head.config))


def _size_pools(
    config: EngineConfig,
    loaded: LoadedModel,
    layout: PlaneLayout,
    max_context_tokens: int,
    device: torch.device,
    lora: LoraPool | None,
    draft: DraftModel | None,
) -> tuple[int, int, list[str]]:
    """Computes the pages of the pool and of a draft model's, null pages included, with a
    description of the calculation.
    """
    size = config.kv_memory_bytes
    if device.type == "cuda" and not config.num_pages and size is None:
        needs = measure_needs(
            loaded.model,
            layout,
            loaded.config.vocab_size,
            config.max_running_requests,
            config.max_step_tokens + config.decodes_beside,
            max_context_tokens,
            device,
            cuda_graphs=config.cuda_graphs,
            lora=lora,
            max_drafts=_max_drafts(config),
            tree_rows=_tree_rows(config),
        )
        if draft is not None:
            needs = draft.added_to(needs, max_context_tokens, layout.page_bytes, device)
        num_pages = pages_of(needs, layout.page_bytes)
        plan = [describe_pool(needs, num_pages, layout)]
        if draft is None:
            return num_pages, 0, plan
        num_draft_pages = needs.drafts // draft.layout.page_bytes
        return num_pages, num_draft_pages, [*plan, draft.describe(num_draft_pages)]
    size = DEFAULT_KV_BYTES if size is None else size
    num_pages = config.num_pages or size // layout.page_bytes
    if num_pages < MIN_PAGES:
        raise ConfigError(
            f"kv_memory_bytes = {size:,} holds {num_pages} pages of "
            f"{layout.page_bytes:,} bytes; give at least {MIN_PAGES * layout.page_bytes:,}"
        )
    num_draft_pages = 0 if draft is None else draft.num_pages(num_pages, max_context_tokens)
    pool_bytes = num_pages * layout.page_bytes
    if draft is not None:
        pool_bytes += num_draft_pages * draft.layout.page_bytes
    if device.type == "cuda":
        check_pool_fits(pool_bytes, device)
    return num_pages, num_draft_pages, [] if draft is None else [draft.describe(num_draft_pages)]


def _staging_memory(config: EngineConfig, page_bytes: int, device: torch.device) -> StagingMemory:
    """Allocates the staging pages of a pool.

    Raises:
        ConfigError: They are too few, or there is not that much memory.
    """
    size = DEFAULT_STAGING_BYTES if config.staging_bytes is None else config.staging_bytes
    num_pages = size // page_bytes
    if config.kv_memory_bytes is not None:
        num_pages = min(num_pages, config.kv_memory_bytes // page_bytes)
    if config.num_pages is not None:
        num_pages = min(num_pages, config.num_pages)
    if num_pages < MIN_STAGING_PAGES:
        raise ConfigError(
            f"staging_bytes = {size:,} holds {num_pages} pages of {page_bytes:,} bytes; give at "
            f"least {MIN_STAGING_PAGES * page_bytes:,}",
            param="staging_bytes",
        )
    kind = DeviceStagingPages if _stages_on_device(config, device) else PinnedStagingPages
    return kind(num_pages, page_bytes, device)


def _staged_window(
    config: EngineConfig, pool: torch.Tensor, memory: StagingMemory, lanes: Lanes
) -> StagedWindow:
    """Creates the staging area of a pool, and the copies between the two."""
    num_pages = len(memory.pages)
    share = LANDING_SHARES[config.role, config.has_store]
    area = StagingArea(memory.pages, min(num_pages - 1, max(1, int(share * num_pages))))
    return StagedWindow(area, memory, PageMover(pool, area, memory, lanes))


def _stages_on_device(config: EngineConfig, device: torch.device) -> bool:
    """Whether staging pages are memory of the pool's device."""
    if config.staging_memory != "auto":
        return config.staging_memory == "device"
    if device.type != "cuda" or config.has_store or config.transport == "data":
        return False
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    is_reached = any(torch.cuda.can_device_access_peer(device.index, other) for other in others)
    return is_reached and nixl_available()[0]


def _device(config: EngineConfig) -> torch.device:
    """The configured device; checks that it exists."""
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(
            f"device: {config.device!r} is no torch device", param="device"
        ) from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: there is no {config.device!r} here", param="device")
    if device.index is not None:
        torch.cuda.set_device(device)  # Kernels are launched on the thread's own device.
    return torch.device("cuda", torch.cuda.current_device())


def _promise_determinism(
    config: EngineConfig, loaded: LoadedModel, layout: PlaneLayout, device: torch.device
) -> list[str]:
    """Describes what deterministic mode does on this machine.

    Raises:
        ConfigError: Some operation would depend on what else a step holds.
    """
    if device.type == "cuda":
        return _promise_on_gpu(config, loaded, device)
    native = native_cpu()
    group = loaded.config.num_heads // loaded.config.num_kv_heads
    if native is None:
        reason = f"it needs the native operations ({native_cpu_missing()})"
    elif layout.dim % 8 or layout.dim > native.max_dim or group > native.max_group:
        reason = f"the native attention does not take heads of {layout.dim} in groups of {group}"
    else:
        return [
            "deterministic: the native operations compute each row in one order, whatever else a "
            "step holds; there is no slower path to take"
        ]
    raise ConfigError(f"deterministic: {reason}", param="deterministic")


def _promise_on_gpu(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> list[str]:
    """Describes deterministic mode on a GPU; see `_promise_determinism`."""
    capability = torch.cuda.get_device_capability(device)
    if loaded.dtype == "float32":
        reason = "products in float32 are cuBLAS's, which cuts them by their rows; take bfloat16"
    elif capability < (9, 0):
        reason = f"tested from compute capability 9.0 on, {device} has {capability}"
    elif loaded.config.num_heads // loaded.config.num_kv_heads > MAX_FIXED_GROUP:
        reason = f"attention takes at most {MAX_FIXED_GROUP} query heads of one KV head"
    elif not isinstance(loaded.model, DecoderOnlyLM | DraftedModel):
        reason = f"nothing is known of the operations of {type(loaded.model).__name__}"
    else:
        return [
            "deterministic: products and attention take one order for every step, which takes "
            "longer (docs/decisions/0024)"
        ]
    raise ConfigError(f"deterministic: {reason}", param="deterministic")


def _sampling_device(
    vocab_size: int, device: torch.device
) -> tuple[torch.device | None, list[str]]:
    """Where tokens are drawn, and why not on the GPU if there is one."""
    if device.type != "cuda":
        return None, []
    fault = device_sampler_fault(vocab_size, device)
    if fault is None:
        return device, []
    return None, [f"tokens are drawn on the host, which takes longer: {fault}"]


def _missing_native(device: torch.device) -> list[str]:
    """Describes what is slower here for lack of a C compiler, or of a permission."""
    native = native_cpu()
    if device.type != "cpu" or (native is not None and not native.is_amx_refused):
        return []
    if native is not None:
        return ["the system refuses AMX: prompts and batches in bfloat16 take several times longer"]
    reason = native_cpu_missing()
    return [f"no native CPU operations ({reason}): oneDNN and PyTorch serve, several times slower"]


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("weft", "torch", "nixl"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return versions
