"""The parts of an engine in the order in which they are made, and what they tell one another."""

from __future__ import annotations

from weft.contract.clock import Clock
from weft.contract.errors import WeftError
from weft.contract.timeline import FillRecord
from weft.engine.base.config import EngineConfig
from weft.engine.loop.beams import BeamSearches
from weft.engine.loop.build import make_store
from weft.engine.loop.carriers import CompanionPacker
from weft.engine.loop.chats import make_sessions
from weft.engine.loop.draws import StepSampler
from weft.engine.loop.experts import ExpertControl
from weft.engine.loop.fill_jobs import ComputeJobs
from weft.engine.loop.fill_pace import FillPace
from weft.engine.loop.groups import RequestGroups
from weft.engine.loop.outgoing import Outgoing
from weft.engine.loop.output import OutputProcessor
from weft.engine.loop.parts import EngineComponents
from weft.engine.loop.pipeline import StepOwner, StepPipeline
from weft.engine.loop.profiles import StepProfiles
from weft.engine.loop.sleep import CachedPages, SleepControl
from weft.engine.loop.stats import EngineStats
from weft.engine.loop.stream_pace import StreamPace
from weft.engine.loop.tail_rows import TailRows
from weft.engine.loop.weights import WeightControl
from weft.engine.requests.media_rows import FilledMedia, MediaRows
from weft.engine.requests.media_store import MediaStore
from weft.engine.requests.pages import RequestPages
from weft.engine.requests.request import Request
from weft.engine.sampling.sampler import Sampler
from weft.engine.scheduler.events import FillEvents, OnRequest, SchedulerEvents
from weft.engine.scheduler.limits import SchedulerLimits
from weft.engine.scheduler.policies import make_queue
from weft.engine.scheduler.ports import Fills
from weft.engine.scheduler.prompt_budget import PromptBudget
from weft.engine.scheduler.running import Drafting
from weft.engine.scheduler.scheduler import Scheduler
from weft.engine.sources.audit import PageAudit
from weft.engine.sources.cost import FillCosts, LocalLoad
from weft.engine.sources.owner import OwnerFills
from weft.engine.sources.store_layers import StoreLoads
from weft.engine.sources.tiers.fills import TieredFills
from weft.engine.sources.tiers.layer_loads import LayerLoads, LayerPolicy
from weft.engine.sources.tiers.tiers import Tiers
from weft.engine.sources.tiers.write_through import write_through
from weft.pages.fills.filler import MAX_CHUNK_BYTES, MAX_DEVICE_CHUNK_BYTES, Filler
from weft.pages.memory.events import KvEvents
from weft.pages.tiers.policy import TierPolicy

LEAST_PIECE_ON_GPU, LEAST_PIECE = 512, 64
"""Fewest prompt tokens of a step in a pipeline of stages: a step of more tokens takes hardly less
time for each of them.
"""


class EngineWiring:
    """Makes an engine's parts. Each gets all that it needs when it is made: parts made before it,
    or, of those made later, a method of this class.

    Args:
        owner: The engine, which takes the results of steps.
    """

    def __init__(
        self, config: EngineConfig, parts: EngineComponents, owner: StepOwner, clock: Clock
    ) -> None:
        self.parts = parts
        self._config, self._clock = config, clock
        # What lies in memory, and who is told of it.
        self.out = Outgoing()
        self.kv_events = KvEvents(config.page_size)
        self.memories = (parts.memory, *(each.memory for each in parts.companions))
        """The pages of the first group, and each companion's pieces."""
        self._watch_pages()
        self.pages = RequestPages(parts.memory, parts.prefixes, config.page_size, parts.companions)
        self.sessions = make_sessions(config, parts.prefixes, parts.info.num_pages, clock)
        # Sources of pages.
        self.costs = FillCosts(
            config.local_prefill_max_tokens,
            config.page_size,
            config.first_token_weight,
            self._local_load,
        )
        fill_events = FillEvents(
            self._arrived, self._fill_completed, self._fill_failed, self._fill_lost
        )
        self.tier_policy = TierPolicy(config.write_through_threshold, config.load_back_threshold)
        self.layers = self._make_layers(fill_events)
        self.tiers = self._make_tiers(fill_events)
        self.media = self._make_media()
        self.filled_media: FilledMedia | None = None
        """Set where prompts have media and there is no encoder."""
        if self.media is None and parts.intake.encoder_digest:
            self.filled_media = FilledMedia(parts.media_axes, parts.media_slot_rows)
        self.packer = self._make_packer()
        self.audit: PageAudit | None = None
        if config.enable_faults:
            self.audit = PageAudit(parts.local.page_digests, parts.memory)
        self.owner_fills = OwnerFills(
            config,
            parts.info.epoch,
            parts.layout.page_bytes,
            parts.memory,
            parts.transport,
            self.costs,
            self.out.fill_command,
            clock,
            fill_events,
            packer=self.packer,
            audit=self.audit,
            on_filled=self._on_filled,
            has_encoder=parts.encoder is not None,
            reads_back=parts.encoder is None or not parts.encoder.is_first,
        )
        held = self.pages.num_continuable_pages if self.tiers is None else self.tiers.num_held_pages
        self.store = make_store(config, parts, held, self.out.store, clock, self.packer)
        self.store_loads = self._make_store_loads()
        # Who runs next.
        self._prompt_budget = PromptBudget(
            self.costs,
            config.inter_token_target_s,
            config.first_token_weight,
            config.max_step_tokens,
            spares_running=parts.executor.facts.is_asynchronous,
        )
        sampler = parts.sampler or Sampler(parts.info.vocab_size, config.max_running_requests)
        self.step_sampler = StepSampler(sampler, parts.constraints)
        self.scheduler = self._make_scheduler(drafts_on_device=sampler.is_on_device)
        routes = parts.local.routes
        self.groups = RequestGroups(
            parts.intake, self.scheduler, parts.constraints, self.out, clock, routes
        )
        self.beams = BeamSearches(
            self.groups,
            self.scheduler,
            parts.intake,
            self.step_sampler,
            parts.executor,
            self.out,
            clock,
        )
        self.new_tokens = OutputProcessor(self.out, self.scheduler.running_plans)
        parts.adapters.attach(self.scheduler.waitlist, self.out.adapter_reply, self.fail)
        # Pages for other workers, and steps.
        self.filler = self._make_filler()
        self.pipeline = StepPipeline(
            parts.executor,
            self.step_sampler,
            self.scheduler,
            owner,
            clock,
            is_overlapped=config.is_overlapped,
            drafter=parts.drafter,
            media=self.media or self.filled_media,
            host=parts.host,
            lead_s=config.step_lead_s,
        )
        self.profiles = StepProfiles(
            parts.executor, parts.local.profiler, self.out, clock, config.num_ranks
        )
        self.weights = WeightControl(
            parts.executor,
            parts.local.refits,
            parts.intake,
            self.scheduler,
            self.groups,
            self.filler,
            self.out,
            clock,
            self._make_sleep(),
            config.tp,
        )
        self.experts = ExpertControl(
            config,
            parts.executor,
            parts.local.counts,
            parts.local.experts,
            self.out,
            clock,
        )
        self.stats = EngineStats(clock, config.max_step_tokens, parts.token_s)
        interval_s = config.stream_interval_s
        if interval_s is None and parts.executor.facts.is_asynchronous:
            interval_s = 0.0
        self.pace = StreamPace(interval_s, clock)
        gives_way = config.fillers_on_host and not parts.executor.facts.is_asynchronous
        self.fill_pace = FillPace(self.scheduler, config.inter_token_target_s if gives_way else 0.0)

    # -- what is made ----------------------------------------------------------------------------

    def _watch_pages(self) -> None:
        stored, removed = self.kv_events.stored, self.kv_events.removed
        # A prefix that ends where no companion has a piece cannot be continued. Companions that
        # know of this tell of such pages themselves.
        tell_themselves = [each.watch(stored, removed) for each in self.parts.companions]
        if not any(tell_themselves):
            memory = self.parts.memory
            memory.on_published.append(lambda _, key, parent: stored(key, parent))
            memory.on_evicted.append(removed)

    def _make_layers(self, fill_events: FillEvents) -> LayerLoads | None:
        config, parts = self._config, self.parts
        if parts.layer_pool is None:
            return None
        return LayerLoads(
            parts.layer_pool,
            LayerPolicy(config.load_by_layer == "always"),
            parts.memory,
            config.page_size,
            parts.layout.page_bytes,
            self._prefill_rate,
            self._is_alone,
            fill_events,
            self._clock,
            parts.wake,
        )

    def _make_store_loads(self) -> StoreLoads | None:
        config, parts, layers = self._config, self.parts, self.layers
        is_usable = config.reads_stores_by_layer and parts.transport.target is not None
        if self.store is None or layers is None or not is_usable:
            return None
        return StoreLoads(
            layers,
            parts.memory,
            config.page_size,
            parts.local.pool_bytes,
            layers.pool.parts,
            self.tier_policy,
            self.out.store,
            self.out.release_hold,
            lambda: parts.executor.mark().wait(),
            self._clock,
            parts.wake,
        )

    def _make_tiers(self, fill_events: FillEvents) -> Tiers | None:
        config, parts = self._config, self.parts
        if parts.tiers is None:
            return None
        return Tiers(
            parts.tiers,
            config.page_size,
            parts.memory,
            self.tier_policy,
            self._prefill_rate,
            self.pages.num_cached_pages,
            self._clock,
            config.fill_progress_timeout_s,
            self.pages.num_continuable_pages,
            fill_events,
            parts.wake,
            parts.carriers,
            self.layers,
        )

    def _make_packer(self) -> CompanionPacker | None:
        config, parts = self._config, self.parts
        if not parts.carriers or not config.ships_pages:
            return None
        return CompanionPacker(
            parts.carriers,
            config.page_size,
            parts.memory,
            parts.executor,
            has_store=config.has_store,
            tail=self._make_tail(),
            on_allocated=None if self.tiers is None else self.tiers.write_back,
        )

    def _make_tail(self) -> TailRows | None:
        config, parts = self._config, self.parts
        media = self.media or self.filled_media
        if media is None or not parts.media_row_bytes:
            return None
        sizes = parts.media_row_bytes, parts.layout.page_bytes, config.page_size
        return TailRows(*sizes, media, parts.executor)

    def _make_media(self) -> MediaRows | None:
        config, encoder = self._config, self.parts.encoder
        if encoder is None:
            return None
        store = MediaStore(config.media_bytes)
        sizes = config.media_rows, config.max_step_patches, config.max_step_tokens
        return MediaRows(store, encoder, *sizes, self.parts.media_axes)

    def _make_scheduler(self, *, drafts_on_device: bool) -> Scheduler:
        config, parts, pages = self._config, self.parts, self.pages
        fills: Fills = self.owner_fills
        if self.tiers is not None or config.has_store:
            fills = TieredFills(
                self.tiers,
                self.store_loads,
                self.owner_fills,
                self.tier_policy,
                parts.layout.page_bytes,
                config.page_size,
                self._prefill_rate,
            )
        leaving: list[OnRequest] = [] if self.sessions is None else [self.sessions.on_leaving]
        events = SchedulerEvents(computing=[self.out.computed_here], leaving=leaving)
        write_through(events, self.tier_policy, self.tiers, self.store)
        drafting = None
        if parts.drafter is not None:
            drafting = Drafting(
                parts.gate,
                parts.drafter.is_on_device and drafts_on_device,
                config.max_draft_tokens,
                parts.info.max_context_tokens,
            )
        waiting = make_queue(
            config.scheduling_policy,
            config.ageing_s,
            pages.num_cached_tokens,
            config.max_step_tokens,
        )
        limits = SchedulerLimits.of(
            config,
            parts.executor.facts.step_sizes,
            parts.whole_prompt_tokens,
            parts.transport.last_piece_tokens,
            parts.executor.facts.num_lanes,
            LEAST_PIECE_ON_GPU if parts.executor.facts.is_asynchronous else LEAST_PIECE,
        )
        return Scheduler(
            limits,
            pages,
            waiting,
            fills,
            self._on_finish,
            self._on_slot_free,
            parts.adapters.residency,
            events=events,
            prompt_budget=self._prompt_budget.tokens,
            drafting=drafting,
            num_leaving_tokens=self._num_leaving_tokens,
            media=self.media or self.filled_media,
        )

    def _make_filler(self) -> Filler:
        config, parts, clock = self._config, self.parts, self._clock
        jobs = ComputeJobs(
            config,
            parts.intake,
            self.scheduler,
            parts.info.max_context_tokens,
            parts.info.num_pages,
            self.look_up,
            parts.adapters.holds,
            clock,
            self.media,
        )
        is_on_host = parts.transport.memory_type == "DRAM"
        shipper = parts.transport.shipper
        # Pages may be read early where each step of a fill writes some. Rows that are computed
        # again for companions alone write none.
        has_rerun = self.pages.allows_rerun
        return Filler(
            config.page_size,
            parts.info.epoch,
            parts.layout.page_bytes,
            parts.memory,
            jobs,
            shipper,
            self.out.fill_reply,
            clock,
            lanes=parts.transport.lanes,
            pieces=self.packer,
            max_chunk_bytes=MAX_CHUNK_BYTES if is_on_host else MAX_DEVICE_CHUNK_BYTES,
            max_chunk_pages=shipper.max_chunk_pages,
            early=shipper if shipper.reads_early and not has_rerun else None,
        )

    def _make_sleep(self) -> SleepControl:
        parts = self.parts
        pages = CachedPages(self.flush, self._are_pages_quiet, lambda: parts.memory.counts().used)
        return SleepControl(
            *(parts.executor, parts.local.sleeper, parts.transport, pages),
            *(parts.adapters, self._clock),
        )

    # -- what parts ask of parts that are made later ---------------------------------------------

    def look_up(self, request: Request) -> None:
        """Asks the tiers and the KV store about a new request."""
        if self.tiers is not None:
            self.tiers.look_up(request)
        if self.store is not None:
            self.store.look_up(request)

    def flush(self) -> int:
        """Drops cached pages that no request uses, and returns how many. Tiers may copy some."""
        if self.sessions is not None:
            self.sessions.pins.clear()
        # The first group comes last. A page that leaves the tree has tiers copy the pieces beside
        # it, if these are still there.
        return sum(memory.flush_cache() for memory in reversed(self.memories))

    @property
    def num_copies(self) -> int:
        """Number of pages held while they are copied to tiers or the KV store, and of loads by
        layer from it.
        """
        num_copies = self.store.num_open_pages if self.store is not None else 0
        num_copies += self.store_loads.num_open if self.store_loads is not None else 0
        return num_copies + (self.tiers.num_open if self.tiers is not None else 0)

    def _are_pages_quiet(self) -> bool:
        return not (self.num_copies or self.owner_fills.num_open or self.filler.num_active)

    def fail(self, request: Request, error: WeftError) -> None:
        """Ends a request of a client with all of its samples, or a fill job."""
        if request.is_fill:
            self.scheduler.finish(request, error)
        else:
            self.groups.fail(request.key, error)

    def _arrived(self, request: Request) -> None:
        self.scheduler.arrived(request)

    def _fill_completed(self, request: Request) -> None:
        self.scheduler.fill_completed(request)

    def _fill_failed(self, request: Request) -> None:
        self.scheduler.fill_failed(request)

    def _fill_lost(self, request: Request) -> None:
        self.scheduler.retract(request)

    def _is_alone(self) -> bool:
        scheduler = self.scheduler
        return not (scheduler.running or scheduler.prefilling or scheduler.filling)

    def _on_filled(self, record: FillRecord) -> None:
        if record.source == "kvstore":
            self.tier_policy.observe("store", record.bytes, record.end_s - record.start_s)

    def _on_finish(self, request: Request) -> None:
        if request.is_fill:
            if request.error is not None:
                self.filler.on_job_failed(request, request.error.message)
        else:
            self.groups.on_finished(request)

    def _on_slot_free(self, slot: int) -> None:
        self.parts.executor.page_table.clear(slot)
        self.step_sampler.free(slot)
        if self.parts.drafter is not None:
            self.parts.drafter.forget(slot)

    def _num_leaving_tokens(self) -> int:
        return self.filler.num_leaving_tokens()

    def _prefill_rate(self) -> float:
        return self.costs.local_tokens_per_s

    def _local_load(self) -> LocalLoad:
        scheduler, config = self.scheduler, self._config
        num_running = len(scheduler.running)
        num_waiting = len(scheduler.prefilling) + 1
        step_tokens = self._prompt_budget.tokens(num_running, num_waiting, is_overflow=True)
        return LocalLoad(
            scheduler.num_prefilling_tokens() + self.pipeline.num_chunk_tokens,
            num_running,
            min(config.max_step_tokens, step_tokens),
            config.prefill_chunk_tokens,
        )
