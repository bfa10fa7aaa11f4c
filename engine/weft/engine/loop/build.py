"""Loads the components of an engine: model, pool, memory, transport."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.adapters import AdapterOrder
from weft.contract.clock import Clock
from weft.contract.give_way import HostPriority
from weft.contract.keys import TOKEN_BYTES, WIDE_TOKEN_BYTES
from weft.contract.layout import CacheLayout
from weft.contract.store import StoreLookup, StorePut
from weft.engine.base.config import EngineConfig
from weft.engine.base.machine_lock import machine_lock
from weft.engine.base.placement import unbound
from weft.engine.base.triton_compiler import ensure_triton_compiles
from weft.engine.executor.adapter_rows import LoraPool, make_lora_pool
from weft.engine.executor.device import (
    find_device,
    missing_native,
    promise_determinism,
    sampling_device,
    slower_latents,
    wider_experts,
)
from weft.engine.executor.drafts.build import (
    describe_drafts,
    draft_adapters,
    max_drafts_of_a_step,
    tree_rows,
)
from weft.engine.executor.embeddings import MediaEmbeddings
from weft.engine.executor.expert_counts import ExpertCounts
from weft.engine.executor.graphs import Progress, captures_steps
from weft.engine.executor.kv_format import kept_layout
from weft.engine.executor.local import LocalExecutor, RankPool
from weft.engine.executor.media_warm_up import warm_up_media
from weft.engine.executor.memory_plan import (
    time_token,
)
from weft.engine.executor.rank_jobs import of_one_rank
from weft.engine.executor.ranks.attention_dp import AttentionGroup, LockstepExecutor
from weft.engine.executor.ranks.context import ContextExecutor, least_divided
from weft.engine.executor.ranks.host_memory import Mirror, share_of_pages, spread
from weft.engine.executor.ranks.host_writes import (
    HostPool,
    HostSenders,
    open_senders,
    writes_shares,
)
from weft.engine.executor.ranks.hosts import HostRanks
from weft.engine.executor.ranks.leader import RankLeader
from weft.engine.executor.ranks.ranked import RankedExecutor
from weft.engine.executor.ranks.share import (
    SharedMemory,
    blocks_of,
    context_peers_of,
    expert_moves_of,
    gather_of,
    has_companions,
    layouts_of_stages,
    link_stages,
    linked_stages_of,
    load_share,
    media_of,
    num_slot_rows,
    peers_of,
    pool_of,
    sized_layout,
    sleep_memory,
    stages_that_map,
    whole_layout,
    window_pools_of,
)
from weft.engine.executor.ranks.staged import StagedExecutor
from weft.engine.executor.ranks.start import Ranks
from weft.engine.executor.sleeping import SleepMemory
from weft.engine.features.constraints.constraints import Constraints
from weft.engine.features.lora.manager import AdapterManager
from weft.engine.features.speculative.build import make_drafter, make_gate
from weft.engine.features.speculative.draft_model import DraftModel, load_draft_model
from weft.engine.loop.carriers import (
    CompanionPacker,
    describe_layer_loads,
    describe_recurrent,
    describe_store,
    keeps_in_store,
    make_carriers,
)
from weft.engine.loop.combinations import (
    check_combination,
    check_recurrent,
)
from weft.engine.loop.info import describe_engine
from weft.engine.loop.intake import Intake
from weft.engine.loop.parts import EngineComponents
from weft.engine.loop.pools import Pools, describe_context, size_pools
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.model.loader import LoadedModel
from weft.engine.model.refit import Refit
from weft.engine.model.weights.refill import tensors_of
from weft.engine.parallel.shards import describe_shards, describe_shared_experts
from weft.engine.parallel.shared import SharedGroup
from weft.engine.parallel.stages import describe_stages
from weft.engine.requests.media_axes import MediaAxes
from weft.engine.requests.media_rows import EncoderFacts
from weft.engine.requests.request import Request
from weft.engine.sampling.device_draws import WAYS
from weft.engine.sampling.sampler import Sampler
from weft.engine.scheduler.adapters import Adapters
from weft.engine.scheduler.ports import Drafter
from weft.engine.sources.store import StoreLink
from weft.engine.sources.tiers.build import load_tiers
from weft.engine.transfer.build import host_exchange, staged_exchange, staging_memory
from weft.engine.transfer.mover import Lanes
from weft.engine.transfer.transport import Transport
from weft.kernels.ops.peers.spec import Peers
from weft.pages.memory.eviction import EVICTION_POLICIES
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import PrefixTree

if TYPE_CHECKING:
    from weft.engine.parallel.device_peers import DevicePeers

SIZING_TIMEOUT_S = 600.0
"""Longest wait for other engines that start on the same GPU."""
logger = logging.getLogger(__name__)

MAX_SWITCH_S = 5e-4
"""Longest switch interval of Python's lock. With the default of 5 ms, steps would be that late
while another thread reads an adapter or makes masks.
"""


@dataclass(frozen=True, slots=True)
class _Models:
    loaded: LoadedModel
    """The target model. If it has a draft head, `drafted` contains it."""
    drafted: DraftedModel | None
    """The model with its draft head; None: it has none."""
    draft: DraftModel | None
    layout: CacheLayout
    """Of whole pages."""
    own_layout: CacheLayout
    """What this host, or this stage's GPU, has of them."""
    max_context_tokens: int
    """Most tokens of a request, as far as the model and the settings limit it."""
    model_context_tokens: int
    """Most tokens of a request, as far as the model alone limits it."""


def load_parts(
    config: EngineConfig,
    *,
    wake: Callable[[], None] = lambda: None,
    progress: Progress = lambda done, total, what: None,
) -> EngineComponents:
    """Loads the model and creates the pool.

    Args:
        wake: Called from other threads when the engine should turn.
        progress: Called with (done, total, what in words) as each phase begins and proceeds: in
            bytes while weights load, in graphs while they are captured. A total of 0 is unknown.

    Raises:
        ModelError, ConfigError: The directory or the settings cannot be used.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    sys.setswitchinterval(min(sys.getswitchinterval(), MAX_SWITCH_S))
    ranks: RankLeader | None = None
    model = check_combination(config)
    if config.is_on_gpu:
        ensure_triton_compiles()
        from weft.kernels.shared.kernel_cache import begin_naming, time_compiling

        begin_naming()
        time_compiling()
    if config.attention_dp > 1:
        return _load_beside_others(config, model, wake, progress)
    if config.num_ranks > 1:
        own = replace(config, device=config.device_of_rank(0))
        ranks = Ranks(config, wake) if config.hosts == 1 else HostRanks(config, wake)
        config = own
    device = find_device(config)
    try:
        with _sizing_turn(config, device, progress):
            return _load_parts(config, model, device, ranks, wake, progress)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _load_beside_others(
    config: EngineConfig, model: ModelConfig, wake: Callable[[], None], progress: Progress
) -> EngineComponents:
    """As `load_parts`, for an engine that shares its experts with others."""
    progress(0, 0, f"waiting for the other {config.attention_dp - 1} workers with shared experts")
    device = find_device(config)
    group = AttentionGroup(config, model, device, wake)
    try:
        return _load_parts(config, model, device, None, wake, progress, group)
    except BaseException as error:
        group.fail_start(error)
        raise


def _sizing_turn(
    config: EngineConfig, device: torch.device, progress: Progress
) -> AbstractContextManager[None]:
    """A block in which no other engine on this machine takes memory of the GPU.

    An engine that gives its pool all remaining memory needs this, because free memory can only be
    measured for the whole device.
    """
    if device.type != "cuda" or config.num_pages or config.kv_memory_bytes is not None:
        return nullcontext()
    name = f"gpu-{torch.cuda.get_device_properties(device).uuid}"
    told = "waiting for another worker that starts on this GPU"
    return machine_lock(name, SIZING_TIMEOUT_S, lambda: progress(0, 0, told))


def _load_parts(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    ranks: RankLeader | None,
    wake: Callable[[], None],
    progress: Progress,
    group: AttentionGroup | None = None,
) -> EngineComponents:
    peers = None if ranks is None else peers_of(ranks, config, device)
    context = None if ranks is None else context_peers_of(ranks, config, device)
    stages = None if ranks is None else link_stages(ranks, config, device, peers)
    sleep = sleep_memory(config, device)
    with sleep.loading():
        models = _load_models(config, model, device, ranks, peers, progress, group)
    loaded, layout, vocab_size = models.loaded, models.layout, models.loaded.config.num_embeddings
    if layout.states is not None:
        # Checked again: the files of a class from outside Weft may not show its recurrent layers.
        check_recurrent(config, loaded.config)
    promise = promise_determinism(config, loaded, layout, device) if config.deterministic else []
    is_apart = device.type == "cuda" or config.hosts > 1
    is_staged = config.ships_pages and (is_apart or config.force_staging)
    # Pages of several hosts pass the memory of host 0, whatever their devices.
    moved_on = torch.device("cpu") if config.hosts > 1 else device
    lanes = Lanes(moved_on, layout.page_bytes) if is_staged else None
    staging = staging_memory(config, layout.page_bytes, moved_on) if is_staged else None
    drafts = draft_adapters(config, models.drafted, device)
    shared = None if ranks is None else SharedMemory(ranks, peers, device, context or stages)
    media = media_of(config, loaded, layout, device, peers)
    with sleep.loading() if shared is None else nullcontext():
        lora = make_lora_pool(config, loaded, device, drafts, shared)
    progress(0, 0, "measuring memory")
    pools = size_pools(
        config,
        loaded,
        sized_layout(models.own_layout, stages_that_map(config, loaded, device)),
        models.max_context_tokens,
        models.draft,
        device,
        lora,
        ranks,
    )
    shards: list[str] = []
    if isinstance(ranks, Ranks) and peers is not None:
        pids = ranks.pids[: config.tp]
        shards = [describe_shards(loaded.config, pids, config.ep, peers.sums, config.dcp)]
    if isinstance(ranks, Ranks) and config.cp > 1:
        told = ", ".join(map(str, ranks.pids))
        shards = [f"context parallel: {config.cp} ranks (processes {told}) divide long prompts"]
    if ranks is not None and config.pp > 1:
        shards += [describe_stages(loaded.config, config.pp, ranks.places, config.tp)]
        if (linked := linked_stages_of(ranks)) is not None:
            shards += [linked.how]
    pool_tokens = (pools.num_pages - 1) * config.page_size
    max_tokens = min(models.max_context_tokens, pool_tokens)
    progress(0, 0, "allocating the KV pool")
    executor = _make_executor(
        *(config, models, pools, max_tokens, device, lora, shared, peers, context),
        *(progress, media, sleep),
    )
    executor.stages = stages
    ranked: RankedExecutor | StagedExecutor | ContextExecutor | LockstepExecutor | None = None
    if ranks is not None and config.pp > 1:
        hosts = ranks.memory if isinstance(ranks, HostRanks) else None
        lanes_and_hosts = lanes_of(config), hosts
        ranked = StagedExecutor(executor, ranks, *lanes_and_hosts, _device_peers(peers))
    elif ranks is not None and config.cp > 1:
        progress(0, 0, "timing divided prompts")
        least = least_divided(config, executor, ranks)
        shards += [f"chunks of prompts are divided from {least} tokens on"]
        ranked = ContextExecutor(executor, ranks, context, least)
    elif ranks is not None:
        ranked = RankedExecutor(executor, ranks, _device_peers(peers))
    elif group is not None:
        ranked = LockstepExecutor(executor, group)
        shards = [describe_shared_experts(loaded.config, group.rank, group.size)]
    progress(0, 0, "timing steps")
    token_s = time_token(
        executor,
        models.own_layout,
        config.max_running_requests,
        config.max_step_tokens,
        max_tokens,
    )
    if media is not None and config.is_on_gpu:
        progress(0, 0, "warming up images")
        has_steps = not loaded.config.attends_to_clips  # Steps with clips write pages of requests.
        limits = config.max_running_requests, config.max_step_tokens, max_tokens
        warm_up_media(executor, media, *limits, has_steps=has_steps)
        if config.cuda_graphs:
            media.capture(lambda done, total: progress(done, total, "capturing graphs of images"))
    progress(0, 0, "warming up drawing")
    draws_on, faults = sampling_device(loaded.config, device)
    # Graphs are captured here, so no other thread may use the device yet.
    drafter: Drafter | None
    on_order: list[Callable[[AdapterOrder], None]] = []
    if models.draft is not None:
        drafter = models.draft.drafter(pools.num_draft_pages, max_tokens, device, progress)
    else:
        drafter = make_drafter(
            config,
            models.drafted,
            executor,
            lora,
            wake,
            on_order,
            (ranked if isinstance(ranked, RankedExecutor | StagedExecutor) else executor).chains,
            (ranked or executor).page_table,
            draws_on_device=draws_on is not None,
        )
    sampler = Sampler(
        vocab_size,
        config.max_running_requests,
        device=draws_on,
        max_masked_rows=max_drafts_of_a_step(config),
    )
    tables = sampler.plain_tensors
    ways = 1 if tables is None else len(WAYS)
    if ranks is not None:
        ranks.agree("drawing", ways)
    executor.capture_draws(tables, WAYS[:ways])
    if ranks is not None:
        ranks.ready()
    progress(0, 0, "opening transports")
    exchange = host_exchange(config, executor.pool_bytes)
    if lanes is not None and staging is not None:
        pages, mark = executor.device_pages, (ranked or executor).mark
        mark = ranked.mark_pages if isinstance(ranked, StagedExecutor) else mark
        exchange = staged_exchange(config, pages, staging, lanes, mark)
    senders: HostSenders | None = None
    if isinstance(ranks, HostRanks) and writes_shares(config):
        share = share_of_pages(layouts_of_stages(config, loaded, device), config.pp - 1)
        pool = HostPool(executor.page_rows, share)
        senders = open_senders(config, pool, ranks.writers, ranks.notices)
    nixl_source = None if senders is None else senders.source
    plane = Transport(config, exchange, wake, senders, nixl_source)
    ends = loaded.config.eos_token_ids
    adapted = () if lora is None else lora.projections
    encoder_digest, vision = _encoder_digest(config, loaded, layout), loaded.config.vision
    # A search needs every token on the host, and requests that are alike but for their pages.
    has_beams = (
        drafter is None
        and (ranked or executor).facts.num_lanes == 1
        and not has_companions(layout)
        and not config.rotates_by_axes(loaded.config)
    )
    intake = Intake(
        config,
        layout,
        loaded.digest,
        vocab_size,
        ends,
        max_tokens,
        adapted,
        loaded.pooling,
        loaded.embedding_size,
        encoder_digest=encoder_digest,
        has_uncut_spans=vision is not None and vision.sees_both_ways,
        aligned_by=loaded.config.aligned_by,
        beam_pages=pools.num_pages - 1 if has_beams else 0,
    )
    constraints = Constraints(config, vocab_size, ends, wake)
    prefixes: PrefixTree | None = None
    if config.prefix_cache and not loaded.config.is_encoder:
        width = WIDE_TOKEN_BYTES if encoder_digest else TOKEN_BYTES
        policy = EVICTION_POLICIES[config.kv_eviction_policy]
        prefixes = PrefixTree(config.page_size, policy, width)
    carriers = make_carriers(
        config, layout, pools.num_pieces, prefixes, executor, ranked or executor
    )
    sizes = layout.page_bytes, sum(carrier.num_pages for carrier in carriers)
    is_alone = ranked is None or group is not None
    by_layer = executor.layer_pool if is_alone else None
    tiers = load_tiers(config, *sizes, executor.page_pool, executor.pin)
    slower = [*missing_native(device), *slower_latents(config, loaded, device)]
    for problem in slower:
        logger.warning(problem)
    notices = [
        *(*plane.notices, *pools.notices, *shards),
        *([] if lora is None else [lora.limits.describe()]),
        *(*faults, *slower, *wider_experts(loaded, device)),
        *(*describe_drafts(config, layout), *promise),
        *([] if tiers is None else tiers.notices),
        *describe_recurrent(layout, pools.num_pieces),
        *describe_store(config, layout),
        *describe_layer_loads(
            config,
            layout,
            is_by_layer=by_layer is not None,
            has_nixl=plane.target is not None,
        ),
        *_describe_media(config, loaded, layout),
        *describe_context(config, models.model_context_tokens, pool_tokens),
        *([] if not config.bindings else unbound(config.bindings[0], "the engine")),
        *([] if ranks is None else ranks.notices),
    ]
    host = HostPriority()
    if group is not None:
        progress(0, 0, "waiting for the other workers with shared experts")
        group.begin()
    return EngineComponents(
        executor=ranked or executor,
        local=executor,
        layout=layout,
        memory=PageMemory(pools.num_pages, prefixes, tracks_freed=config.poison_free_pages),
        prefixes=prefixes,
        carriers=carriers,
        intake=intake,
        constraints=constraints,
        transport=plane,
        info=replace(
            describe_engine(config, loaded, layout, pools.num_pages, max_tokens, plane, notices),
            encoder_digest=encoder_digest,
            expert_group="" if group is None else group.incarnation,
            expert_group_rank=config.attention_dp_rank,
            expert_group_size=0 if group is None else group.size,
        ),
        tiers=tiers,
        layer_pool=by_layer,
        wake=wake,
        sampler=sampler,
        adapters=(
            Adapters()
            if lora is None
            else AdapterManager(lora.limits, lora, wake, host, on_order=on_order)
        ),
        encoder=_encoder_facts(loaded),
        media_row_bytes=0 if media is None else media.row_bytes,
        media_slot_rows=num_slot_rows(config, loaded, layout),
        media_axes=MediaAxes(
            vision.grid_of if vision is not None and vision.axes else None,
            loaded.config.max_position_embeddings,
        ),
        drafter=drafter,
        gate=make_gate(config) if drafter is not None else None,
        whole_prompt_tokens=max_tokens if loaded.config.is_encoder else 0,
        token_s=token_s,
        stage_counters=ranked.counters if isinstance(ranked, StagedExecutor) else dict,
        lockstep=ranked if isinstance(ranked, LockstepExecutor) else None,
        host=host,
    )


def make_store(
    config: EngineConfig,
    parts: EngineComponents,
    num_held_pages: Callable[[Request, int], int],
    send: Callable[[StoreLookup | StorePut], None],
    clock: Clock,
    packer: CompanionPacker | None,
) -> StoreLink | None:
    """An engine's side of the KV store; None: there is no store for its model."""
    if not keeps_in_store(config, parts.layout):
        return None
    sizes = config.page_size, parts.memory
    store = StoreLink(*sizes, num_held_pages, parts.transport, send, clock, packer)
    if config.write_through_threshold == 0:
        store.offer_kept()
    return store


def _load_models(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    ranks: RankLeader | None,
    peers: Peers | None,
    progress: Progress,
    group: AttentionGroup | None,
) -> _Models:
    exchange = None if group is None else group.dispatch
    loaded, drafted = load_share(config, model, ranks, peers, exchange, progress)
    if group is not None:
        group.loaded(loaded.digest.hex())
    layout = own_layout = kept_layout(config, loaded, device)
    if config.has_pages_by_stage:
        layout = whole_layout(config, loaded, device)
    most = min(loaded.config.max_position_embeddings, loaded.pooling.max_tokens or sys.maxsize)
    return _Models(
        loaded,
        drafted,
        load_draft_model(config, loaded, progress),
        layout,
        own_layout,
        min(config.max_context_tokens or most, most),
        most,
    )


def _make_executor(
    config: EngineConfig,
    models: _Models,
    pools: Pools,
    max_tokens: int,
    device: torch.device,
    lora: LoraPool | None,
    shared: SharedMemory | None,
    peers: SharedGroup | DevicePeers | None,
    context: DevicePeers | None,
    progress: Progress,
    media: MediaEmbeddings | None,
    sleep: SleepMemory,
) -> LocalExecutor:
    layout, pool, blocks = models.own_layout, None, None
    windows: Sequence[RankPool] = ()
    if shared is not None:
        of_stages = stages_that_map(config, models.loaded, device)
        layout, pool = pool_of(config, shared, layout, pools.num_pages, context, of_stages)
        windows = window_pools_of(shared, models.layout, pools.num_pieces)
        blocks = blocks_of(config, shared, layout, pools.num_pieces, of_stages)
    executor = LocalExecutor(
        models.loaded.model,
        layout,
        pools.num_pages,
        config.max_running_requests,
        max_tokens,
        device,
        max_step_tokens=_max_step_tokens(config, models),
        cuda_graphs=captures_steps(config, models.loaded),
        lora=lora,
        drafted=models.drafted,
        max_drafts=config.most_drafts,
        tree_rows=tree_rows(config),
        num_pieces=pools.num_pieces,
        window_pools=windows,
        heads=models.loaded.heads,
        is_fixed=config.deterministic,
        on_capture=progress,
        pool=pool,
        blocks=blocks,
        num_ranks=config.tp,
        peers=_device_peers(peers),
        media=media,
        has_axes=config.rotates_by_axes(models.loaded.config),
        refit=_refit_of(config, models),
        packed=models.loaded.packed,
        combine=of_one_rank if shared is None else shared.others.combine,
        sleep=sleep,
        beside=partial(_sleeping_beside, models, lora, is_alone=config.num_ranks == 1),
        loads_by_layer=config.loads_by_layer,
        counts=_counts_of(config, models, device),
        experts=None
        if shared is None
        else expert_moves_of(config, models.loaded, shared.others, device),
        beside_stages=None if shared is None else linked_stages_of(shared.others),
    )
    if shared is not None:
        executor.gather = gather_of(config, shared.others, context, pool)
        if isinstance(shared.others, HostRanks):
            layouts, hosts = layouts_of_stages(config, models.loaded, device), shared.others.memory
            spread(executor, layouts, hosts)
            if shared.rows is not None:
                shared.send = Mirror(shared.rows, hosts, config.hosts - 1)
        shared.others.agree("pool")
    return executor


def _counts_of(config: EngineConfig, models: _Models, device: torch.device) -> ExpertCounts | None:
    if not config.counts_experts or models.loaded.config.moe is None:
        return None
    return ExpertCounts(models.loaded.config, _max_step_tokens(config, models), device)


def _sleeping_beside(
    models: _Models, lora: LoraPool | None, *, is_alone: bool
) -> list[torch.Tensor]:
    """Tensors that sleep with the weights and that no update fills: those of towers, pooling, heads
    and models that draft, and of adapters. Of several ranks draft heads and adapters stay awake,
    since they lie in memory that the ranks share, or reach it.
    """
    loaded, draft = models.loaded, models.draft
    found = [tensor for _, tensor in loaded.packed.tensors()]
    if is_alone:
        roots = (loaded.heads, lora, models.drafted)
        found += [tensor for root in roots if root is not None for tensor in tensors_of(root)]
    return found if draft is None else [*found, *draft.tensors()]


def lanes_of(config: EngineConfig) -> int:
    """Steps that stages have under way at once. On a prefill worker of several hosts one step's
    rows are on the link meanwhile; elsewhere one more step would make generated tokens wait. Rank 0
    of GPUs draws from a step before it launches the one after the next, which takes its memory.
    """
    if config.is_on_gpu:
        return min(config.pp, 2)
    return config.pp + (config.hosts > 1 and config.role == "prefill")


def _refit_of(config: EngineConfig, models: _Models) -> Refit | None:
    """None: parts beside the language model would keep their old weights, or what they made."""
    loaded = models.loaded
    has_media = bool(_encoder_digest(config, loaded, models.layout))
    has_media |= config.attention_dp > 1  # Other workers compute with this one's experts.
    return None if has_media or loaded.pooling.task != "generate" else loaded.refit


def _encoder_digest(config: EngineConfig, loaded: LoadedModel, layout: CacheLayout) -> bytes:
    """Names the encoder of the media in prompts; empty: prompts have none.

    An owner without one takes prompts whose media prefill workers encode. Where it computes a
    prompt's last tokens itself, because it needs more than pages of one group, media must not be
    larger than a page, nor the model be divided into stages.
    """
    if loaded.encoder is not None:
        return loaded.encoder.digest
    if not config.takes_media(loaded.config):
        return b""
    return b"" if _lacks_rows(config, loaded, layout) else loaded.tower_digest


def _lacks_rows(config: EngineConfig, loaded: LoadedModel, layout: CacheLayout) -> bool:
    return has_companions(layout) and not num_slot_rows(config, loaded, layout)


def _describe_media(config: EngineConfig, loaded: LoadedModel, layout: CacheLayout) -> list[str]:
    """A sentence that says why an owner without a tower takes no images, and what to do."""
    is_filled = loaded.encoder is None and config.takes_media(loaded.config)
    if not is_filled or not _lacks_rows(config, loaded, layout):
        return []
    if config.pp > 1:
        problem, instead = f"stages (pp = {config.pp}) take no rows of images", "take pp = 1"
    else:
        problem = "a prompt's last tokens may begin inside of an image, all of which they attend to"
        instead = "set window_pages to keep"
    return [
        f"images are refused: this worker has no image tower (language_model_only), and {problem}; "
        f"{instead}, or load the tower"
    ]


def _encoder_facts(loaded: LoadedModel) -> EncoderFacts | None:
    encoder, is_first = loaded.encoder, loaded.config.attends_to_clips
    if encoder is None:
        return None
    return EncoderFacts(encoder.rows_of, encoder.cost_of, encoder.sees_both_ways, is_first)


def _device_peers(peers: SharedGroup | DevicePeers | None) -> DevicePeers | None:
    return None if isinstance(peers, SharedGroup) else peers


def _max_step_tokens(config: EngineConfig, models: _Models) -> int:
    """Most rows of a step; an encoder's has room for the longest prompt."""
    whole = models.max_context_tokens if models.loaded.config.is_encoder else 0
    return max(config.max_step_tokens + config.decodes_beside, whole)
