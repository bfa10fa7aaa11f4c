"""The components of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from weft.contract.give_way import HostPriority
from weft.contract.layout import CacheLayout
from weft.contract.reports import EngineInfo
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.port import Executor
from weft.engine.executor.ranks.attention_dp import LockstepExecutor
from weft.engine.loop.carriers import Carrier
from weft.engine.loop.intake import Intake
from weft.engine.loop.stats import UNKNOWN_STEP_S
from weft.engine.requests.companions import Companion
from weft.engine.requests.media_axes import MediaAxes
from weft.engine.requests.media_rows import EncoderFacts
from weft.engine.sampling.sampler import Sampler
from weft.engine.scheduler.adapters import Adapters
from weft.engine.scheduler.ports import Drafter, DraftGate, MaskSource
from weft.engine.sources.tiers.build import TierComponents
from weft.engine.transfer.transport import Transport
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import PrefixTree
from weft.pages.tiers.layer_pool import LayerPool


@dataclass(slots=True, kw_only=True)
class EngineComponents:
    """The components that `Engine` wires together."""

    executor: Executor
    local: LocalExecutor
    """Memory of this process's device; also the executor, if there are no other ranks."""
    layout: CacheLayout
    memory: PageMemory
    prefixes: PrefixTree | None
    """Index of `memory`; None: no prefix caching."""
    carriers: tuple[Carrier, ...] = ()
    """The model's companions on the device."""
    intake: Intake
    constraints: MaskSource
    transport: Transport
    info: EngineInfo
    tiers: TierComponents | None = None
    """Tiers below the pool; None: there are none."""
    layer_pool: LayerPool | None = None
    """Access to the pool for loads by layer; None: pages are loaded whole."""
    wake: Callable[[], None] = lambda: None
    """Called by other threads when the engine should take a turn."""
    sampler: Sampler | None = None
    """The sampler; None: tokens are sampled on the host."""
    adapters: Adapters = field(default_factory=Adapters)
    encoder: EncoderFacts | None = None
    """The model's encoder of media; None: there is none here."""
    media_axes: MediaAxes = field(default_factory=lambda: MediaAxes(None))
    """Rotations of requests with media."""
    media_row_bytes: int = 0
    """Bytes of a row of media; 0: there is no memory for any."""
    media_slot_rows: int = 0
    """Rows of media for each slot, where others send those that this worker cannot make."""
    drafter: Drafter | None = None
    gate: DraftGate | None = None
    """Decides how many drafts pay; None without a drafter."""
    whole_prompt_tokens: int = 0
    """Longest prompt of a model that computes prompts whole; 0: they may be cut."""
    token_s: float = UNKNOWN_STEP_S
    """Seconds per token of a small step."""
    stage_counters: Callable[[], dict[str, int]] = dict
    """Counters of a pipeline's stages; empty without stages."""
    lockstep: LockstepExecutor | None = None
    """The executor, if other workers share this one's experts."""
    host: HostPriority = field(default_factory=HostPriority)
    """The lock that background threads yield while the engine thread works."""

    @property
    def companions(self) -> tuple[Companion, ...]:
        return tuple(carrier.companion for carrier in self.carriers)
