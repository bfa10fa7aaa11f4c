"""What the process of a rank other than the first does.

The process loads its share of the model as rank 0 does, and all ranks agree after each phase. Then
it runs the frames that rank 0 sends. It ends when rank 0 dies (the kernel kills it), when the group
ends, or when it fails itself.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.arrays import Int64Array
from weft.contract.errors import ConfigError, RanksLost, WeftError
from weft.engine.base.config import HEAD_DRAFTERS, EngineConfig
from weft.engine.base.placement import unbound
from weft.engine.base.processes import die_with_parent
from weft.engine.executor.adapter_rows import make_lora_pool
from weft.engine.executor.device import find_device
from weft.engine.executor.drafts.build import head_graphs
from weft.engine.executor.drafts.chains import ChainGraphs, LaterChains
from weft.engine.executor.drafts.eager_chains import Chains
from weft.engine.executor.graphs import captures_steps
from weft.engine.executor.kv_format import kept_layout
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.media_warm_up import warm_up_media
from weft.engine.executor.memory_plan import (
    divide_states,
    measure_needs,
    pages_of,
    time_token,
)
from weft.engine.executor.orders import PageOrder
from weft.engine.executor.port import Launched, Logits
from weft.engine.executor.rank_jobs import RankResult
from weft.engine.executor.ranks.context import launch_share, least_divided
from weft.engine.executor.ranks.frames import (
    Barrier,
    DraftOrder,
    Draw,
    SharedTokens,
    Step,
    Tokens,
    decode,
)
from weft.engine.executor.ranks.host_memory import memories_of, serve, share_of_pages
from weft.engine.executor.ranks.host_writes import HostPool, serve_writes, writes_shares
from weft.engine.executor.ranks.hosts import end_when_silent, join, share_on_host
from weft.engine.executor.ranks.link import LinkClosed, RankLink, config_of_json
from weft.engine.executor.ranks.share import (
    SharedMemory,
    blocks_of,
    context_peers_of,
    expert_moves_of,
    gather_of,
    layouts_of_stages,
    link_stages,
    linked_stages_of,
    load_share,
    media_of,
    num_media_rows,
    peers_of,
    pool_of,
    sized_layout,
    sleep_memory,
    stages_that_map,
    window_pools_of,
    with_media_rows,
)
from weft.engine.executor.ranks.start import START_LIMIT_S, Ranks
from weft.engine.executor.step_input import StepInput
from weft.engine.model.stage import Neighbours
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.linked_stages import BroadcastStages, LinkedStages
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shards import layout_of_rank, num_pages_of_all
from weft.engine.parallel.shared import SharedGroup
from weft.engine.parallel.stage_links import SocketStages, StageEnds
from weft.engine.parallel.stages import names_of_neighbours, stage_of_rank
from weft.engine.sampling.device_draws import WAYS

logger = logging.getLogger(__name__)

UNBOUNDED = 1 << 62
"""Number of pages that a rank offers if its own memory sets no bound."""


class FollowerGroup:
    """Implements `weft.engine.executor.ranks.share.RankGroup`."""

    def __init__(
        self,
        link: RankLink,
        rank: int,
        size: int,
        group: SharedGroup | HostGroup,
        store_path: str,
        neighbours: SocketStages | None = None,
    ) -> None:
        self.rank = rank
        self.memory: socket.socket | None = None
        """Over which rank 0 reads and writes this host's pages; None: they are rank 0's own, or
        another rank's.
        """
        self.writes: socket.socket | None = None
        """Over which rank 0 says which pages this host writes; None if rank 0 or another rank of
        this host writes.
        """
        self.beats: socket.socket | None = None
        """Over which rank 0 says that it runs; None: another rank of this host listens."""
        self.local: Ranks | None = None
        """The other ranks of this host, for which this one answers; None: there are none, or
        another rank answers for this one.
        """
        self.neighbours: Neighbours | None = neighbours
        self.size = size
        self.group = group
        self.store_path = store_path
        self._link = link
        self._notices: list[str] = []

    def note(self, notices: list[str]) -> None:
        """Tells rank 0, with the next phase, what its users should know of this rank."""
        self._notices += notices

    def agree(self, phase: str, number: int = 0, text: str = "") -> int:
        """Waits until rank 0 has heard of this phase from all ranks, and returns the least number
        of all. Raises LinkClosed if rank 0 has ended.
        """
        if self.local is not None:
            number = self.local.collect(phase, number, text)
            self._notices += self.local.notices
            self.local.notices.clear()
        message = {"phase": phase, "number": number, "text": text, "notices": self._notices}
        self._link.send(message)
        self._notices = []
        answer, _ = self._link.receive()
        number = int(answer["number"])
        if self.local is not None:
            self.local.answer(number)
        return number

    def begin(self, limit_s: float) -> None:
        """Ends the start: a rank that is late by more than `limit_s` is lost."""
        self.group.limit(limit_s)
        if self.local is not None:
            self.local.begin(limit_s)
        if self.beats is not None and isinstance(self.group, HostGroup):
            end_when_silent(self.beats, self.group, limit_s)

    def combine(self, result: RankResult) -> None:
        """Tells rank 0 how a job of this rank ended."""
        if self.local is not None:
            result = self.local.combine(result)
        with contextlib.suppress(LinkClosed):  # Rank 0 has ended, and this process follows.
            self._link.send(result.to_message())

    def share(self, size: int) -> Segment:
        if isinstance(self.group, HostGroup):
            return share_on_host(self.local, size)
        answer, memory = self._link.receive()
        if memory is None or answer["size"] != size:
            raise ConfigError(f"rank 0 has a pool of {answer['size']} bytes, this rank of {size}")
        return Segment(memory, size)


class Drafting(NamedTuple):
    """A draft head's chains on this rank, without and with graphs."""

    eager: Chains
    captured: ChainGraphs | None

    def later(self, step: StepInput, draft_limits: Int64Array) -> LaterChains:
        """The drafts that a step verifies, with `draft_limits` as in the frame `Step`."""
        assert self.captured is not None
        own = slice(step.num_decodes, step.num_decodes + step.num_verified)
        requests = StepInput(
            slots=step.slots[own],
            starts=step.starts[own],
            max_starts=step.max_starts[own],
            counts=step.counts[own],
            num_verified=step.num_verified,
            draft_limits=draft_limits,
            adapters=None if step.adapters is None else step.adapters[own],
        )
        counts = (requests.counts - 1).tolist()
        return LaterChains(self.captured, counts, requests, to_host=False)


def load(config: EngineConfig, others: FollowerGroup) -> tuple[LocalExecutor, Drafting | None, int]:
    """Loads this rank's share, in the same phases as rank 0. The last value is as that of
    `least_divided`.
    """
    assert config.num_threads is not None
    torch.set_num_threads(config.num_threads)
    if config.is_on_gpu:
        from weft.kernels.shared.kernel_cache import begin_naming

        begin_naming()
    device = find_device(config)
    peers = peers_of(others, config, device)
    context = context_peers_of(others, config, device)
    stages = link_stages(others, config, device, peers)
    sleep = sleep_memory(config, device)
    with sleep.loading():
        loaded, drafted = load_share(config, ModelConfig.load(config.model_dir), others, peers)
    shared = SharedMemory(others, peers, device, context or stages)
    lora = make_lora_pool(config, loaded, device, ranks=shared)
    layout = kept_layout(config, loaded, device)
    of_stages = stages_that_map(config, loaded, device)
    max_step_tokens = config.max_step_tokens + config.decodes_beside
    most = loaded.config.max_position_embeddings
    max_tokens = min(config.max_context_tokens or most, most)
    is_in_last_stage = stage_of_rank(others.rank, config.pp, config.tp) == config.pp - 1
    has_logits = is_in_last_stage and config.cp == 1
    num_pages = num_blocks = UNBOUNDED
    if device.type == "cuda" and not config.num_pages and config.kv_memory_bytes is None:
        own = layout_of_rank(sized_layout(layout, of_stages), config.tp)
        needs = measure_needs(
            loaded.model,
            own,
            loaded.config.num_embeddings,
            config.max_running_requests,
            max_step_tokens,
            max_tokens,
            device,
            cuda_graphs=captures_steps(config, loaded),
            share=config.device_memory_share,
            lora=lora,
            max_drafts=config.most_drafts,
            has_logits=has_logits,
            has_media=num_media_rows(config, loaded, own) > 0,
        )
        needs = with_media_rows(needs, config, loaded, own, device)
        if own.states is not None and needs.for_pool > 0:
            most_requests = config.max_running_requests, config.most_drafts
            num_blocks, left = divide_states(own, needs.for_pool, *most_requests, on_gpu=True)
            needs = replace(needs, states=needs.for_pool - left)
        num_pages = num_pages_of_all(pages_of(needs, own.page_bytes), config.dcp)
    num_pages = others.agree("pages", num_pages)
    num_pieces = [
        others.agree("pieces", num_blocks if one is layout.states else UNBOUNDED)
        for one in layout.companions
    ]
    own, pool = pool_of(config, shared, layout, num_pages, context, of_stages)
    media = media_of(config, loaded, layout, device, peers)
    max_tokens = min(max_tokens, (num_pages - 1) * config.page_size)
    executor = LocalExecutor(
        loaded.model,
        own,
        num_pages,
        config.max_running_requests,
        max_tokens,
        device,
        max_step_tokens=max_step_tokens,
        cuda_graphs=captures_steps(config, loaded),
        lora=lora,
        drafted=drafted,
        max_drafts=config.most_drafts,
        num_pieces=num_pieces,
        pool=pool,
        window_pools=window_pools_of(shared, layout, num_pieces),
        blocks=blocks_of(config, shared, own, num_pieces, of_stages),
        num_ranks=config.tp,
        rank=others.rank,
        peers=None if isinstance(peers, SharedGroup) else peers,
        has_logits=has_logits,
        media=media,
        has_axes=config.rotates_by_axes(loaded.config),
        refit=loaded.refit,
        packed=loaded.packed,
        combine=others.combine,
        sleep=sleep,
        experts=expert_moves_of(config, loaded, others, device),
        beside_stages=linked_stages_of(others),
    )
    executor.gather, executor.stages = gather_of(config, others, context, pool), stages
    if others.memory is not None:
        layouts = layouts_of_stages(config, loaded, device)
        stage = stage_of_rank(others.rank, config.pp, config.tp)
        assert isinstance(others.group, HostGroup)
        serve(others.memory, others.group, memories_of(executor, layouts, stage, shared.rows))
        if others.writes is not None and writes_shares(config):
            own_pool = HostPool(executor.page_rows, share_of_pages(layouts, stage))
            serve_writes(config, others.writes, others.group, own_pool)
    others.agree("pool")
    least = 0 if config.cp == 1 else least_divided(config, executor, others)
    time_token(executor, own, config.max_running_requests, config.max_step_tokens, max_tokens)
    if media is not None and config.is_on_gpu:
        has_steps = not loaded.config.attends_to_clips
        limits = config.max_running_requests, config.max_step_tokens, max_tokens
        warm_up_media(executor, media, *limits, has_steps=has_steps)
        if config.cuda_graphs:
            media.capture()
    drafting = None
    if drafted is not None and config.drafter in HEAD_DRAFTERS and is_in_last_stage:
        graphs = None if config.pp > 1 else head_graphs(config, drafted, executor, None)[0]
        drafting = Drafting(executor.chains(drafted, executor.page_table), graphs)
    ways = others.agree("drawing", len(WAYS))
    executor.capture_draws(None, WAYS[:ways])
    return executor, drafting, least


def follow(
    executor: LocalExecutor,
    drafting: Drafting | None,
    group: SharedGroup | HostGroup,
    launch: Callable[[StepInput], Launched | None],
    *,
    leaves_pages: bool = False,
) -> None:
    """Runs the frames that rank 0 sends, until the group ends, which raises RanksLost.

    Args:
        leaves_pages: Whether another rank does orders on pages for this one too.
    """
    logits: Logits | None = None
    draws = executor.has_logits
    while True:
        # On a CPU the ranks' threads share the cores, so that spinning would slow rank 0.
        frame = decode(group.take(spins=executor.facts.is_asynchronous))
        match frame:
            case Step(step, pages, draft_limits, windows):
                pages.enter(executor.page_table)
                windows.enter(executor.window_tables)
                if draft_limits is not None:
                    assert drafting is not None
                    step.drafts = drafting.later(step, draft_limits)
                launched = launch(step)
                logits = None if launched is None else launched.logits
            case DraftOrder(lasts, counts, pages):
                pages.enter(executor.page_table)
                if draws:
                    assert drafting is not None
                    with torch.inference_mode():
                        drafting.eager.run(lasts, counts)
            case Draw(way):
                if draws:
                    assert logits is not None
                    assert logits.captured is not None
                    logits.captured(way, None)
            case Tokens(tokens):
                executor.keep(torch.from_numpy(tokens))
            case SharedTokens(num_tokens):
                if draws:
                    executor.keep_shared(num_tokens)
            case Barrier():
                executor.meet()
            case _:
                if not (leaves_pages and isinstance(frame, PageOrder)):
                    executor.order(frame)
        group.end()


def _launch_stage(executor: LocalExecutor, neighbours: SocketStages, step: StepInput) -> Launched:
    with neighbours.computing():
        return executor.launch(step)


def take_part(config: EngineConfig, others: FollowerGroup) -> None:
    """Loads this rank's share and runs frames until the group ends, which raises RanksLost."""
    executor, drafting, least = load(config, others)
    gc.collect()
    gc.freeze()
    others.agree("ready")
    # Rank 0 has half this limit, so that it times out first and reports the error.
    others.begin(2 * config.rank_timeout_s)
    launch: Callable[[StepInput], Launched | None] = executor.launch
    if config.cp > 1:
        rank, size = others.rank, others.size
        launch = partial(launch_share, executor, rank=rank, size=size, least=least)
    elif isinstance(others.neighbours, SocketStages):
        launch = partial(_launch_stage, executor, others.neighbours)
    # Between hosts such orders are frames, which the first rank of a host with one pool does alone.
    has_one_pool = config.hosts > 1 and not config.is_on_gpu
    leaves_pages = has_one_pool and isinstance(others.group, SharedGroup)
    try:
        follow(executor, drafting, others.group, launch, leaves_pages=leaves_pages)
    finally:
        if isinstance(others.neighbours, SocketStages | LinkedStages | BroadcastStages):
            others.neighbours.close()


def follow_host(config: EngineConfig) -> int:
    """Takes part in the engine of host 0 from another host, until host 0 or the connection to it
    ends. Returns the exit status: 1 after an error, which is logged.
    """
    try:
        host = join(config)
    except LinkClosed:
        logger.error("host 0 at %s has ended during the start", config.rendezvous)
        return 1
    except WeftError as error:
        logger.error("%s", error.message)
        return 1
    config, group = host.config, host.group
    rank = config.host_rank * config.tp
    others = FollowerGroup(host.link, rank, config.num_ranks, group, "")
    others.memory, others.writes, others.beats = host.memory, host.writes, host.beats
    try:
        others.agree("connected")
        copies: Sequence[socket.socket] = ()
        if config.tp > 1:
            others.local = Ranks(config, partial(_lose_local, group))
            group.local, copies = others.local.group, others.local.copies
            others.store_path = others.local.store_path
            config = replace(config, num_threads=torch.get_num_threads())
        config = replace(config, device=config.device_of_rank(rank))
        if config.num_threads is None:
            config = replace(config, num_threads=torch.get_num_threads())
        names = names_of_neighbours(rank, config.pp, config.tp)
        stage = stage_of_rank(rank, config.pp, config.tp)
        others.neighbours = SocketStages(
            host.rows, group, stage, names, config.most_sent_rows, copies
        )
        take_part(config, others)
    except LinkClosed:
        logger.error("host 0 has ended during the start")
    except RanksLost as lost:
        logger.error("%s", lost)
        _tell(host.link, ConfigError.reason, str(lost))
    except WeftError as error:
        logger.error("%s", error.message)
        _tell(host.link, error.reason, error.message)
    except Exception as error:
        logger.exception("this host fails")
        _tell(host.link, ConfigError.reason, f"{type(error).__name__}: {error}")
    finally:
        if others.local is not None:
            others.local.close()
    return 1


def _lose_local(group: HostGroup) -> None:
    """Runs in a thread of the ranks of this host, of which one has ended."""
    assert group.local is not None
    reason = group.local.reason
    group.why = lambda: reason
    group.stop()


def main(argv: list[str]) -> int:
    """Entry point of `rank_process`; returns the exit status."""
    die_with_parent(int(argv[1]))
    # Ctrl-C reaches the whole process group; rank 0 decides when all ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = RankLink(socket.socket(fileno=int(argv[0])))
    try:
        hello, memory = link.receive()
        logging.basicConfig(level=hello["log_level"])
        config = config_of_json(hello["config"])
        assert memory is not None
        segment = Segment(memory, hello["segment"])
        rank = int(hello["rank"])
        size, checks = config.ranks_of_host, config.check_ranks
        first, shard = divmod(rank, size)
        group = SharedGroup(
            segment, shard, size, START_LIMIT_S, is_checked=checks, first_rank=first * size
        )
        neighbours = None
        if config.pp > 1:
            before, after = (
                None if number < 0 else socket.socket(fileno=number)
                for number in hello["stage_ends"]
            )
            names = names_of_neighbours(rank, config.pp, config.tp)
            stage = stage_of_rank(rank, config.pp, config.tp)
            ends, most_rows = StageEnds(before, after), config.most_sent_rows
            neighbours = SocketStages(ends, group, stage, names, most_rows)
        size, store_path = config.num_ranks, hello["store_path"]
        others = FollowerGroup(link, rank, size, group, store_path, neighbours)
        if config.bindings:
            others.note(unbound(config.bindings[rank], f"rank {rank}"))
        take_part(replace(config, device=config.device_of_rank(rank)), others)
    except LinkClosed:
        return 0
    except RanksLost as lost:
        _tell(link, ConfigError.reason, str(lost))
        return 0
    except WeftError as error:
        _tell(link, error.reason, error.message)
    except Exception as error:
        traceback.print_exc()
        _tell(link, ConfigError.reason, f"{type(error).__name__}: {error}")
    return 1


def _tell(link: RankLink, reason: str, message: str) -> None:
    with contextlib.suppress(LinkClosed):
        link.send({"error": message, "reason": reason})
