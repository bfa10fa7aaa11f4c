"""Loads a rank's share of the model and makes its part of the pool. All ranks run this code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.dtypes import resolve_dtype
from weft.contract.errors import ConfigError
from weft.contract.layout import CacheLayout, PageGroup, StatePart, StatePlane
from weft.engine.base.config import EngineConfig
from weft.engine.executor.drafts.build import load_head
from weft.engine.executor.embeddings import MediaEmbeddings
from weft.engine.executor.expert_moves import ExpertMoves
from weft.engine.executor.graphs import MEDIA_SIZES, Progress, captures_media
from weft.engine.executor.kv_format import dtype_of, kept_layout
from weft.engine.executor.local import RankPool, activations_dtype
from weft.engine.executor.memory_plan import MemoryNeeds, with_media
from weft.engine.executor.peer_weights import peer_weights
from weft.engine.executor.rank_jobs import RankResult
from weft.engine.executor.ranks.context import DeviceGather, HostGather
from weft.engine.executor.ranks.host_memory import MIRROR_ROW_BYTES, parts_of_stage
from weft.engine.executor.routes import by_page
from weft.engine.executor.sleeping import SleepMemory
from weft.engine.executor.states import RankBlocks
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.model.loader import LoadedModel, load_model
from weft.engine.model.stage import ModelShare, Neighbours, Stage
from weft.engine.parallel.dispatch import ExpertDispatch
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.linked_stages import BroadcastStages, LinkedStages
from weft.engine.parallel.nccl_links import link_over_nccl
from weft.engine.parallel.page_ranks import HostPageRanks, memory_bytes
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shards import kv_heads_of, layout_of_rank, num_pages_here
from weft.engine.parallel.shared import SharedGroup, segment_bytes
from weft.engine.parallel.stage_links import SocketStages
from weft.engine.parallel.stages import layers_of_stages, names_of_neighbours, stage_of_rank
from weft.engine.transfer.device_pages import DevicePages, PagePart
from weft.kernels.ops.pages.pool import PageShare
from weft.kernels.ops.peers.spec import Peers

if TYPE_CHECKING:
    from weft.engine.parallel.device_peers import DevicePeers
    from weft.engine.parallel.device_stages import DeviceStages

_LOADING = "loading the model"
_COPYING = "copying the model from a worker"


class RankGroup(Protocol):
    """One rank's interface to the other ranks during the start."""

    rank: int
    size: int
    store_path: str
    """File at which the GPUs' ranks find one another."""
    neighbours: Neighbours | None
    """The stages beside this rank's; None: there are no stages."""

    @property
    def group(self) -> SharedGroup | HostGroup: ...

    def agree(self, phase: str, number: int = 0, text: str = "") -> int: ...

    def share(self, size: int) -> Segment: ...

    def combine(self, own: RankResult) -> RankResult | None: ...


def sleep_memory(config: EngineConfig, device: torch.device) -> SleepMemory:
    """What sleeps on this rank. Raises ConfigError if the GPU's driver does not allow it, or the
    host has not enough memory.
    """
    if config.attention_dp > 1:
        problem = (
            "weights do not sleep with attention_dp, since other workers compute with this one's "
            "experts"
        )
        return SleepMemory(problem=problem)
    if device.type != "cuda" or config.sleep_host_bytes is None:
        return SleepMemory(folder=config.sleep_dir)
    from weft.engine.executor.device_arena import DeviceArena

    weights = DeviceArena(device, tensors=list, host_bytes=config.sleep_host_bytes)
    # Memory of this kind cannot be mapped by other processes or registered with NIXL everywhere.
    is_alone = not config.moves_pages and config.tp == 1
    return SleepMemory(weights, DeviceArena(device) if is_alone else None)


class SharedMemory:
    """`RankMemory` for the adapters.

    Args:
        peers: Ranks that divide the layers; None: each rank has whole layers.
        whole: GPUs that have whole layers; None: one memory serves all ranks with whole layers.
    """

    def __init__(
        self,
        others: RankGroup,
        peers: SharedGroup | DevicePeers | None,
        device: torch.device,
        whole: DevicePeers | DeviceStages | None = None,
    ) -> None:
        self.rank, self.size = (0, 1) if peers is None else (peers.rank, peers.size)
        if whole is not None:
            self.rank = whole.rank
        self.others, self.peers = others, peers
        self._devices, self._device = peers if whole is None else whole, device
        self.rows: torch.Tensor | None = None
        """Memory of all ranks of a host, [n, MIRROR_ROW_BYTES]; None: other hosts need no copy."""
        self.send: Callable[[], None] | None = None
        """Sends what rank 0 has written there to other hosts, or raises RanksLost; None: there are
        none.
        """

    def memory(self, num_bytes: int) -> Sequence[torch.Tensor]:
        """Raises ConfigError if the system refuses the memory, or if another rank is gone."""
        devices = self._devices
        if devices is None or isinstance(devices, SharedGroup):
            shape = (-(-self.size * num_bytes // MIRROR_ROW_BYTES), MIRROR_ROW_BYTES)
            if self._device.type == "cuda":  # Each of several hosts has one GPU.
                self.rows = torch.zeros(shape, dtype=torch.uint8, device=self._device)
            else:
                segment = self.others.share(shape[0] * MIRROR_ROW_BYTES)
                self.rows = segment.tensor(shape, torch.uint8)
            of_ranks = self.rows.view(-1)[: self.size * num_bytes]
            return of_ranks.view(self.size, num_bytes).unbind()
        memory = devices.mapped.memory(num_bytes)
        self.others.agree("memory")
        return memory

    def publish(self) -> None:
        if self.send is not None:
            self.send()


def stage_of(config: EngineConfig, model: ModelConfig, others: RankGroup) -> Stage | None:
    """The stage of this rank; None: there are no stages."""
    if config.pp == 1:
        return None
    number = stage_of_rank(others.rank, config.pp, config.tp)
    layers = layers_of_stages(model.num_layers, config.pp)[number]
    return Stage(
        number,
        config.pp,
        layers,
        others.neighbours,
        has_own_pages=config.has_pages_by_stage,
        has_head=config.has_head,
    )


def layouts_of_stages(
    config: EngineConfig, loaded: LoadedModel, device: torch.device
) -> list[CacheLayout]:
    """The layouts of what each stage has of pages and blocks, where it has its own."""
    stages = (
        Stage(number, config.pp, layers, has_own_pages=True)
        for number, layers in enumerate(layers_of_stages(loaded.config.num_layers, config.pp))
    )
    return [_layout_of(config, loaded, device, stage) for stage in stages]


def stages_that_map(
    config: EngineConfig, loaded: LoadedModel, device: torch.device
) -> list[CacheLayout]:
    """The layouts of stages with a GPU each, whose pools and blocks rank 0 maps since pages leave
    them; empty: there are none.
    """
    is_mapped = config.pp > 1 and config.is_on_gpu and config.hosts == 1 and config.moves_pages
    return layouts_of_stages(config, loaded, device) if is_mapped else []


def sized_layout(layout: CacheLayout, of_stages: Sequence[CacheLayout]) -> CacheLayout:
    """The layout by whose bytes a rank sizes its pool and blocks: its own, or, of stages that map
    equal memory, the largest of them.
    """
    if not of_stages:
        return layout
    pages = max(of_stages, key=lambda one: one.page_bytes)
    states = [one.states for one in of_stages if one.states is not None]
    most = max(states, key=lambda one: one.layers, default=None)
    return replace(layout, groups=pages.groups, states=most)


def whole_layout(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> CacheLayout:
    """The layout of pages with the layers of all stages."""
    return _layout_of(config, loaded, device, None)


def _layout_of(
    config: EngineConfig, loaded: LoadedModel, device: torch.device, stage: Stage | None
) -> CacheLayout:
    assert isinstance(loaded.model, DecoderOnlyLM | DraftedModel), "check_stages refuses others"
    layout = loaded.model.layout_of(stage, config.page_size)
    return kept_layout(config, loaded, device, layout)


def load_share(
    config: EngineConfig,
    model: ModelConfig,
    others: RankGroup | None,
    peers: Peers | None,
    exchange: ExpertDispatch | None = None,
    progress: Progress = lambda done, total, what: None,
) -> tuple[LoadedModel, DraftedModel | None]:
    """This rank's share of the model's weights, with all of its image tower; also the model with
    its draft head, if it has one. A process without other ranks has all of it, but for experts
    divided by `exchange`. Raises ModelError or ConfigError if the weights cannot be used.
    """
    progress(0, 0, _LOADING)
    rank = 0 if others is None else others.rank
    loaded = load_model(
        config.model_dir,
        config.dtype,
        config.device,
        lambda done, total: progress(done, total, _LOADING),
        quantization=config.quantization,
        dummy=config.dummy_weights,
        is_fixed=config.deterministic,
        num_added_tokens=config.lora_added_tokens if config.enable_lora else 0,
        frees_windows=not config.keeps_windows,
        task=config.task,
        share=ModelShare(
            peers=peers,
            ep=config.ep,
            spare_experts=config.redundant_experts,
            stage=None if others is None else stage_of(config, model, others),
            exchange=exchange,
        ),
        mtp_head=config.reads_mtp,
        max_context_tokens=config.max_context_tokens,
        images=config.has_tower(model),
        trust_remote_code=config.trust_remote_code,
        peer=peer_weights(config, rank, lambda done, total: progress(done, total, _COPYING)),
    )
    if others is not None:
        others.agree("model", text=loaded.digest.hex())
    drafted = load_head(config, loaded)
    return (loaded if drafted is None else replace(loaded, model=drafted)), drafted


def expert_moves_of(
    config: EngineConfig, loaded: LoadedModel, others: RankGroup, device: torch.device
) -> ExpertMoves | None:
    """What puts experts on other ranks; None: they stay. Raises ConfigError if they cannot be
    moved, or the system refuses the memory for it.
    """
    if not config.moves_experts:
        return None
    moves = ExpertMoves(
        loaded.model, loaded.config.num_layers, others.rank, config.ep, device, others.combine
    )
    others.agree("experts", text=moves.form())
    moves.use(others.share(moves.memory_bytes).tensor((moves.memory_bytes,), torch.uint8))
    return moves


def media_of(
    config: EngineConfig,
    loaded: LoadedModel,
    layout: CacheLayout,
    device: torch.device,
    peers: SharedGroup | DevicePeers | None,
) -> MediaEmbeddings | None:
    """The memory for rows of media on this rank, or in a process without other ranks; None: no step
    takes any.
    """
    if not (num_rows := num_media_rows(config, loaded, layout)):
        return None
    dtype = activations_dtype(loaded.model)
    sizes = _row_width(loaded), num_rows, dtype, device, config.max_step_patches
    return MediaEmbeddings(loaded.encoder, *sizes, peers)


def num_slot_rows(config: EngineConfig, loaded: LoadedModel, layout: CacheLayout) -> int:
    """Rows of media for each slot that prefill workers send, since pages of KV are not all that an
    owner without a tower needs; 0: none are sent.
    """
    vision = loaded.config.vision
    is_filled = loaded.encoder is None and config.takes_media(loaded.config)
    if not is_filled or not has_companions(layout):
        return 0
    # A medium that is computed whole may be longer than a page, and stages take no rows.
    is_whole = vision is not None and vision.sees_both_ways
    return 0 if is_whole or config.pp > 1 else config.page_size + 1


def with_media_rows(
    needs: MemoryNeeds,
    config: EngineConfig,
    loaded: LoadedModel,
    layout: CacheLayout,
    device: torch.device,
) -> MemoryNeeds:
    """Adds the memory of `media_of`, of what captured steps take from it, and of encoding."""
    if not (num_rows := num_media_rows(config, loaded, layout)):
        return needs
    itemsize = activations_dtype(loaded.model).itemsize
    row_bytes = _row_width(loaded) * itemsize
    has_states = layout.states is not None
    if config.cuda_graphs and captures_media(loaded.config, has_states=has_states):
        needs = replace(needs, graphs=needs.graphs + max(MEDIA_SIZES) * row_bytes)
    if loaded.encoder is None:
        return replace(needs, media=num_rows * row_bytes)
    sizes = num_rows, config.max_step_patches, itemsize
    return with_media(needs, loaded.encoder, *sizes, device, cuda_graphs=config.cuda_graphs)


def _row_width(loaded: LoadedModel) -> int:
    if loaded.encoder is not None:
        return loaded.encoder.row_width
    assert loaded.config.tower is not None, "only a tower's rows come from others"
    return loaded.config.tower.row_width


def num_media_rows(config: EngineConfig, loaded: LoadedModel, layout: CacheLayout) -> int:
    """Rows of media in the memory of this worker."""
    if loaded.encoder is not None:
        return config.media_rows
    return num_slot_rows(config, loaded, layout) * config.max_running_requests


def has_companions(layout: CacheLayout) -> bool:
    """Whether a request needs more than pages of one group to continue."""
    return layout.states is not None or len(layout.groups) > 1


def peers_of(
    others: RankGroup, config: EngineConfig, device: torch.device
) -> SharedGroup | DevicePeers | None:
    """The memory through which ranks add up partial sums; None: each has whole layers. All ranks
    map it; on GPUs it is the GPUs' own. Raises ConfigError if the GPUs cannot map each other's
    memory.
    """
    if config.tp == 1:
        return None
    group = others.group.local if isinstance(others.group, HostGroup) else others.group
    assert group is not None, "ranks of one host divide layers"
    if device.type == "cpu":
        staged = config.pp > 1 and config.hosts == 1
        own = _stage_group(others, group, config) if staged else group
        if config.dcp > 1:
            own.pages = _page_ranks(others, group, config)
        return own
    group.num_alike = config.tp
    peers = _device_peers(others, group, config, device, config.tp)
    if config.dcp > 1:
        model = ModelConfig.load(config.model_dir)
        peers.divide_pages(config.dcp, *query_shape(config, model))
    return peers


def query_shape(config: EngineConfig, model: ModelConfig) -> tuple[int, int, int, int]:
    """Query heads of a rank, elements of a query and of a result, and bytes of an element, as ranks
    that divide pages exchange them.
    """
    dtype: torch.dtype = getattr(torch, resolve_dtype(config.dtype, config.device))
    latent, heads = model.latent, model.num_heads // config.tp
    if latent is not None:
        return heads, latent.kv_rank + latent.rope_dim, latent.kv_rank, dtype.itemsize
    ((_, planes),) = model.page_planes
    ((_, dim, _),) = planes
    return heads, dim, dim, dtype.itemsize


def context_peers_of(
    others: RankGroup, config: EngineConfig, device: torch.device
) -> DevicePeers | None:
    """Where the GPUs of ranks that divide prompts meet; None: there are none. Raises ConfigError if
    the GPUs cannot map each other's memory.
    """
    if config.cp == 1 or device.type == "cpu":
        return None
    assert isinstance(others.group, SharedGroup), "ranks of one host divide prompts"
    return _device_peers(others, others.group, config, device)


def link_stages(
    others: RankGroup,
    config: EngineConfig,
    device: torch.device,
    peers: SharedGroup | DevicePeers | None,
) -> DeviceStages | None:
    """Makes the neighbours of this rank's stage on a GPU, and returns them if they are on this
    host; on a CPU they are there. Raises ConfigError if the GPUs cannot map each other's memory, or
    those of several hosts are not connected over NCCL.

    Args:
        peers: The ranks of this stage; None: it has one.
    """
    if config.pp == 1 or device.type == "cpu":
        return None
    model = ModelConfig.load(config.model_dir)
    dtype: torch.dtype = getattr(torch, resolve_dtype(config.dtype, config.device))
    sizes, linked = (config.most_sent_rows, model.hidden_size, dtype), None
    if isinstance(others.group, SharedGroup) and config.hosts == 1:
        from weft.engine.parallel.device_peers import DevicePeers, MappedMemory, join
        from weft.engine.parallel.device_stages import DeviceStages

        if isinstance(peers, DevicePeers):
            mapped = peers.mapped
        else:
            ranks = join(others.rank, others.size, others.store_path)
            mapped = MappedMemory(device, ranks, others.agree)
        stages = DeviceStages(others.group, device, mapped, *sizes, config.tp)
        others.neighbours = stages
        others.agree("neighbours")
        return stages
    if isinstance(others.group, HostGroup):
        assert isinstance(others.neighbours, SocketStages), "hosts have connected their stages"
        names = names_of_neighbours(others.rank, config.pp, config.tp)
        ends = others.neighbours.ends
        linked = link_over_nccl(ends, others.group, names, device, *sizes)
    others.neighbours = linked if peers is None else BroadcastStages(linked, peers, device)
    others.agree("neighbours")
    return None


def linked_stages_of(others: RankGroup) -> LinkedStages | None:
    """The links of this rank to stages on GPUs of other hosts; None: it has none."""
    beside = others.neighbours
    if isinstance(beside, BroadcastStages):
        return beside.linked
    return beside if isinstance(beside, LinkedStages) else None


def _device_peers(
    others: RankGroup,
    group: SharedGroup,
    config: EngineConfig,
    device: torch.device,
    tp: int | None = None,
) -> DevicePeers:
    from weft.engine.parallel.device_peers import DevicePeers, join

    model = ModelConfig.load(config.model_dir)
    dtype: torch.dtype = getattr(torch, resolve_dtype(config.dtype, config.device))
    sizes = model.hidden_size, dtype, model.num_embeddings
    ranks = join(group.rank, group.size, others.store_path)
    peers = DevicePeers(group, device, ranks, *sizes, others.agree, tp)
    others.agree("peers")
    return peers


def _page_ranks(others: RankGroup, group: SharedGroup, config: EngineConfig) -> HostPageRanks:
    """The ranks that divide pages with this one. Raises ConfigError if the system refuses
    memory.
    """
    size, of_group = config.dcp, segment_bytes(config.dcp)
    num_groups, number = others.size // size, others.rank // size
    counters, memory = (
        others.share(num_groups * of_group),
        others.share(num_groups * memory_bytes(size)),
    )
    own = SharedGroup(
        counters.part(number * of_group, of_group),
        others.rank % size,
        size,
        group.limit_s,
        whole=group,
    )
    return HostPageRanks(own, memory.part(number * memory_bytes(size), memory_bytes(size)))


def _stage_group(others: RankGroup, group: SharedGroup, config: EngineConfig) -> SharedGroup:
    """The ranks that have this rank's stage. Raises ConfigError if the system refuses memory."""
    size = segment_bytes(config.tp)
    stage, shard = divmod(others.rank, config.tp)
    part = others.share(config.pp * size).part(stage * size, size)
    limit_s, is_checked = group.limit_s, config.check_ranks
    return SharedGroup(part, shard, config.tp, limit_s, is_checked=is_checked, whole=group)


def gather_of(
    config: EngineConfig,
    others: RankGroup,
    context: DevicePeers | None,
    pool: RankPool | None,
) -> HostGather | DeviceGather | None:
    """How ranks that divide prompts exchange K and V; None: there are none."""
    if config.cp == 1:
        return None
    if context is None:
        assert isinstance(others.group, SharedGroup), "ranks of one host divide prompts"
        return HostGather(others.group)
    assert pool is not None
    return DeviceGather(context, pool.of_ranks)


def pool_of(
    config: EngineConfig,
    shared: SharedMemory,
    layout: CacheLayout,
    num_pages: int,
    context: DevicePeers | None = None,
    of_stages: Sequence[CacheLayout] = (),
) -> tuple[CacheLayout, RankPool | None]:
    """The layout of this rank's pages, and its pool; None: the executor allocates it.

    On a CPU all ranks of a host share one pool, in which each has its heads or layers of every
    page. On GPUs each rank has a separate pool, and rank 0 maps the pools of all ranks if pages
    leave the GPUs. So code that moves whole pages need not know of ranks. Ranks of several hosts
    have a pool each, and so have GPUs that divide prompts (`context`).
    Raises ConfigError if the pool does not fit, or pages cannot leave these GPUs.

    Args:
        of_stages: From `stages_that_map`.
    """
    others = shared.others
    if of_stages:
        own = layout_of_rank(layout, shared.size)
        return own, _pool_of_stages(shared, of_stages, num_pages)
    if context is not None:
        pools = _mapped(context.mapped.memory, layout, num_pages)
        others.agree("memory")
        mine, copies = pools[context.rank], None
        if config.takes_pages:
            copies = DevicePages([PagePart(pool, 0, is_copy=pool is not mine) for pool in pools])
        return layout, RankPool(mine, mine, copies, of_ranks=pools)
    if config.has_pages_by_stage and config.tp == 1:
        return layout, None
    if config.is_on_gpu and config.dcp > 1:
        own, pool = _divided_pool(shared, layout, num_pages, config.dcp)
        return own, pool if config.moves_pages else pool._replace(pages=None)
    if config.is_on_gpu and not config.moves_pages:
        return layout_of_rank(layout, shared.size), None
    if config.is_on_gpu:
        return _mapped_pool(shared, layout, num_pages)
    segment = others.share(num_pages * layout.page_bytes)
    memory = segment.tensor((num_pages, layout.page_bytes), torch.uint8)
    whole = by_page(memory.view(dtype_of(layout.plane)), layout.page_shape)
    if shared.size == 1:
        return layout, RankPool(whole, whole, memory=memory)
    return layout, RankPool(whole, _of_rank(whole, layout.groups[0], shared), memory=memory)


def _of_rank(whole: torch.Tensor, group: PageGroup, shared: SharedMemory) -> torch.Tensor:
    """The part of a group's pool that has a rank's heads. Of several planes it is the whole: layers
    know where their heads are.
    """
    if len(group.planes) > 1:
        return whole
    return whole[:, kv_heads_of(group.plane.heads, shared.rank, shared.size)]


def window_pools_of(
    shared: SharedMemory, layout: CacheLayout, num_pieces: Sequence[int]
) -> list[RankPool]:
    """The pools of the page groups of windows of ranks on a CPU: as with `pool_of`, all share them.
    Raises ConfigError if the pools do not fit.

    Args:
        num_pieces: Of each of the layout's companions.
    """
    found = list[RankPool]()
    counts = zip(layout.groups[1:], layout.of_windows(num_pieces), strict=True)
    for number, (group, count) in enumerate(counts, 1):
        segment = shared.others.share(count * group.page_bytes(layout.page_size))
        whole = segment.tensor(layout.pool_shape(count, number), dtype_of(group.plane))
        found.append(RankPool(whole, _of_rank(whole, group, shared)))
    return found


def _divided_pool(
    shared: SharedMemory, layout: CacheLayout, num_pages: int, size: int
) -> tuple[CacheLayout, RankPool]:
    from weft.engine.parallel.device_page_ranks import DevicePageRanks, DividedPool

    peers = shared.peers
    assert peers is not None
    assert isinstance(peers.pages, DevicePageRanks), "ranks of one host divide pages"
    own = layout_of_rank(layout, shared.size)
    pools = _mapped(shared.memory, own, num_pages_here(num_pages, size))
    first = shared.rank // size * size
    divided = DividedPool(peers.pages, pools[first : first + size], peers.meet)
    heads, head_bytes = _first_heads(layout, shared.size)
    parts = [
        PagePart(
            *(pool, heads[rank] * head_bytes),
            is_copy=heads[rank] in heads[: rank // size * size],
            share=PageShare(rank % size, size),
        )
        for rank, pool in enumerate(pools)
    ]
    return own, RankPool(
        pools[shared.rank], pools[shared.rank], DevicePages(parts), divided=divided
    )


def _mapped_pool(
    shared: SharedMemory, layout: CacheLayout, num_pages: int
) -> tuple[CacheLayout, RankPool]:
    own = layout_of_rank(layout, shared.size)
    pools = _mapped(shared.memory, own, num_pages)
    heads, head_bytes = _first_heads(layout, shared.size)
    parts = [
        PagePart(pool, first * head_bytes, is_copy=first in heads[:rank])
        for rank, (pool, first) in enumerate(zip(pools, heads, strict=True))
    ]
    mine = pools[shared.rank]
    return own, RankPool(mine, mine, DevicePages(parts))


def _first_heads(layout: CacheLayout, size: int) -> tuple[list[int], int]:
    """The first KV head of each rank, and the bytes of a head in a page."""
    heads = layout.plane.heads
    firsts = [kv_heads_of(heads, rank, size).start for rank in range(size)]
    return firsts, layout.page_bytes // heads


def _pool_of_stages(
    shared: SharedMemory, of_stages: Sequence[CacheLayout], num_pages: int
) -> RankPool:
    """Raises ConfigError."""
    of_ranks = [layout_of_rank(layout, shared.size) for layout in of_stages]
    num_bytes = num_pages * max(layout.page_bytes for layout in of_ranks)
    flats = _by_stage(_flat_pools(shared.memory, num_bytes), len(of_stages))
    pools = [
        [_pool_in(flat, layout, num_pages) for flat in of_stage]
        for of_stage, layout in zip(flats, of_ranks, strict=True)
    ]
    parts = list[PagePart]()
    for stage, of_stage in enumerate(pools):
        parts += parts_of_stage(of_stages, stage, of_stage)
    stage, shard = _place_of(shared, len(pools))
    mine = pools[stage][shard]
    return RankPool(mine, mine, DevicePages(parts))


def _place_of(shared: SharedMemory, count: int) -> tuple[int, int]:
    """The stage of this rank, of `count`, and its number there."""
    return stage_of_rank(shared.rank, count, shared.size), shared.rank % shared.size


def _by_stage(of_ranks: Sequence[torch.Tensor], count: int) -> list[Sequence[torch.Tensor]]:
    """What the ranks of each of `count` stages have, in the order of the stages."""
    tp = len(of_ranks) // count
    firsts = sorted(range(0, len(of_ranks), tp), key=lambda rank: stage_of_rank(rank, count, tp))
    return [of_ranks[first : first + tp] for first in firsts]


def _mapped(
    memory: Callable[[int], Sequence[torch.Tensor]], layout: CacheLayout, num_pages: int
) -> list[torch.Tensor]:
    """The pools of all ranks. Raises ConfigError."""
    flats = _flat_pools(memory, num_pages * layout.page_bytes)
    return [_pool_in(flat, layout, num_pages) for flat in flats]


def _flat_pools(
    memory: Callable[[int], Sequence[torch.Tensor]], num_bytes: int
) -> Sequence[torch.Tensor]:
    try:
        return memory(num_bytes)
    except RuntimeError as error:
        raise ConfigError(
            f"a KV pool of {num_bytes:,} bytes does not fit: {error}; lower kv_memory_bytes"
        ) from error


def _pool_in(flat: torch.Tensor, layout: CacheLayout, num_pages: int) -> torch.Tensor:
    """The pool at the beginning of some memory."""
    own = flat[: num_pages * layout.page_bytes].view(dtype_of(layout.plane))
    return own.view(layout.pool_shape(num_pages))


def blocks_of(
    config: EngineConfig,
    shared: SharedMemory,
    layout: CacheLayout,
    num_pieces: Sequence[int],
    of_stages: Sequence[CacheLayout] = (),
) -> RankBlocks | None:
    """The blocks of recurrent layers; None: the model has none, or the executor allocates them.

    As with `pool_of`, all ranks on a CPU share them, and on GPUs rank 0 maps those of all ranks if
    blocks leave the GPUs. Raises ConfigError if they do not fit.

    Args:
        layout: From `pool_of`: of all ranks on a CPU, of one rank on a GPU.
        num_pieces: Of each of the layout's companions.
        of_stages: From `stages_that_map`.
    """
    plane, size = layout.states, shared.size
    is_alone = config.has_pages_by_stage and config.tp == 1 and not of_stages
    if plane is None or is_alone or (config.is_on_gpu and not config.moves_pages):
        return None
    num_blocks = layout.of_states(num_pieces)
    if of_stages:
        of_ranks = (layout_of_rank(one, size).states for one in of_stages)
        planes = [one for one in of_ranks if one is not None]
        return _blocks_of_stages(shared, planes, num_blocks)
    if config.is_on_gpu:
        return _mapped_blocks(shared, plane, num_blocks)
    whole: list[torch.Tensor] = []
    for part in plane.parts:
        shape = (num_blocks, plane.layers, *part.shape)
        segment = shared.others.share(num_blocks * plane.layers * part.num_bytes)
        dtype: torch.dtype = getattr(torch, part.dtype)
        whole.append(segment.tensor(shape, dtype))
    own = tuple(part.chunk(size, dim=2)[shared.rank] for part in whole)
    return RankBlocks(tuple(whole), own)


def _mapped_blocks(shared: SharedMemory, plane: StatePlane, num_blocks: int) -> RankBlocks:
    ranks: list[list[torch.Tensor]] = []
    for part in plane.parts:
        memory = _memory_of_states(shared, num_blocks * plane.layers * part.num_bytes)
        ranks.append([_states_in(flat, part, num_blocks, plane.layers) for flat in memory])
    own = tuple(parts[shared.rank] for parts in ranks)
    return RankBlocks(runs_over_ranks(ranks), own, is_mapped=True)


def _blocks_of_stages(
    shared: SharedMemory, planes: Sequence[StatePlane], num_blocks: int
) -> RankBlocks:
    """Rank 0's view of the blocks of all stages, whose ranks have these planes, and this rank's
    own.
    """
    stage, shard = _place_of(shared, len(planes))
    whole, own = list[torch.Tensor](), list[torch.Tensor]()
    for part in planes[0].parts:
        num_bytes = num_blocks * max(plane.layers for plane in planes) * part.num_bytes
        memory = _by_stage(_memory_of_states(shared, num_bytes), len(planes))
        of_stages = [
            [_states_in(flat, part, num_blocks, plane.layers) for flat in of_stage]
            for of_stage, plane in zip(memory, planes, strict=True)
        ]
        for of_stage in of_stages:
            whole += of_stage if shared.size == 1 else runs_over_ranks([of_stage])
        own.append(of_stages[stage][shard])
    return RankBlocks(tuple(whole), tuple(own), is_mapped=True)


def _memory_of_states(shared: SharedMemory, num_bytes: int) -> Sequence[torch.Tensor]:
    try:
        return shared.memory(num_bytes)
    except RuntimeError as error:
        raise ConfigError(f"{num_bytes:,} bytes of recurrent states do not fit: {error}") from error


def _states_in(
    flat: torch.Tensor, part: StatePart, num_blocks: int, num_layers: int
) -> torch.Tensor:
    """[num_blocks, layers, *shape] at the beginning of some memory."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    own = flat[: num_blocks * num_layers * part.num_bytes]
    return own.view(dtype).view(num_blocks, num_layers, *part.shape)


def runs_over_ranks(ranks: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """`RankBlocks.whole` of blocks whose ranks each have separate memory.

    Args:
        ranks: For each part of the plane, [num_blocks, layers, *shape] of each rank.
    """
    return tuple(
        one[:, layer]
        for parts in ranks
        for layer in range(parts[0].shape[1])
        for one in (part.view(*part.shape[:2], -1) for part in parts)
    )
