"""Engine settings: resolved values, checked together before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from weft.engine.errors import ConfigError
from weft.engine.memory.eviction import EvictionName
from weft.engine.scheduler.policies import PolicyName

Role = Literal["decode", "prefill"]
DrafterName = Literal["none", "ngram", "eagle", "eagle3", "model"]
DraftGateName = Literal["measured", "fixed"]
HEAD_DRAFTERS = ("eagle", "eagle3")
"""That draft with the head in `draft_dir`, which must be of that kind; eagle is EAGLE-1 and 2."""

MAX_TREE_NODES = 31
"""Drafts of a request in one step that form a tree."""
MAX_TREE_REQUESTS = 4
"""Of a step with trees: with more, rows are no longer cheap."""
MAX_DECODES_BESIDE = 64
"""Rows of a large step hardly cost more for so many others."""
NEVER_SHIP_TOKENS = 1 << 40
"""As `local_prefill_max_tokens`: every prompt is prefilled locally."""


class Bound(NamedTuple):
    """What a number may be, by itself."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def allows(self, value: float) -> bool:
        """Whether a number is within; NaN never is."""
        return (
            value == value
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
        )

    def __str__(self) -> str:
        limits = ((">=", self.ge), (">", self.gt), ("<=", self.le))
        return " and ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)


BOUNDS: Mapping[str, Bound] = {
    "page_size": Bound(ge=1, le=256),
    "kv_memory_bytes": Bound(ge=1 << 16),
    "num_pages": Bound(ge=4),
    "max_context_tokens": Bound(ge=2),
    "max_running_requests": Bound(ge=1, le=4096),
    "max_waiting_requests": Bound(ge=1),
    "max_queued_fill_tokens": Bound(ge=0),
    "max_step_tokens": Bound(ge=16),
    "prefill_chunk_tokens": Bound(ge=1),
    "inter_token_target_s": Bound(gt=0),
    "ageing_s": Bound(gt=0, le=1e6),
    "preemption_threshold": Bound(ge=1, le=2_000_000),
    "max_fill_fraction": Bound(gt=0, le=1),
    "max_quarantine_fraction": Bound(ge=0, le=1),
    "local_prefill_max_tokens": Bound(ge=0),
    "lease_s": Bound(gt=0, le=3600),
    "renew_interval_s": Bound(gt=0),
    "fill_progress_timeout_s": Bound(gt=0),
    "staging_bytes": Bound(ge=1 << 12),
    "num_threads": Bound(ge=1, le=1024),
    "session_pool_share": Bound(ge=0, le=1),
    "session_tenant_share": Bound(gt=0, le=1),
    "session_ttl_s": Bound(gt=0, le=7 * 86_400),
    "host_cache_bytes": Bound(ge=0),
    "disk_cache_bytes": Bound(ge=1 << 12),
    "write_through_threshold": Bound(ge=0),
    "load_back_threshold": Bound(ge=0),
    "max_lora_rank": Bound(ge=1, le=512),
    "max_loras": Bound(ge=1, le=1024),
    "lora_memory_bytes": Bound(ge=1),
    "lora_host_bytes": Bound(ge=1),
    "max_draft_tokens": Bound(ge=1, le=32),
    "draft_width": Bound(ge=1, le=6),
    "constraint_compile_s": Bound(gt=0, le=600),
    "constraint_compile_bytes": Bound(ge=1 << 26),
    "constraint_cache_bytes": Bound(ge=1 << 20),
}
"""Of the numbers among an engine's settings, by name; None is none. Services have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine's settings. Services build it from their own settings; libraries use it as is."""

    model_dir: Path
    model_name: str = "model"
    role: Role = "decode"
    worker_id: str = "worker-0"
    """Stable over restarts."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16."""
    device: str = "cpu"
    page_size: int = 16
    """Token positions a page."""
    kv_memory_bytes: int | None = None
    """Size of the KV pool; ignored when num_pages is given. None: 1 GiB on a CPU, on a GPU what is
    left beside the weights, the largest step and the graphs."""
    num_pages: int | None = None
    max_context_tokens: int | None = None
    """Upper bound on prompt + output; default is the model's."""
    max_running_requests: int = 64
    max_waiting_requests: int = 1024
    max_queued_fill_tokens: int = 262_144
    """A filler with more prompt tokens queued declines as busy."""
    max_step_tokens: int = 512
    """New tokens one step may bring, on a GPU beside 64 of running requests; also the largest
    prefill chunk."""
    prefill_chunk_tokens: int = 256
    """Largest chunk of one prompt a step; a multiple of page_size."""
    inter_token_target_s: float = 0.1
    """What prompts may add to a step that others decode in: their chunks are cut to it."""
    scheduling_policy: PolicyName = "fcfs"
    """Who is admitted next (`weft.engine.scheduler.policies`)."""
    ageing_s: float = 30.0
    """Waiting that counts as one level of priority; after which a short prefix does not matter."""
    preemption_threshold: int | None = 10
    """With `priority`: a running request makes room for one that is so many levels more urgent."""
    max_fill_fraction: float = 0.3
    """Share of the pool that reservations of remote fills may hold."""
    max_quarantine_fraction: float = 0.1
    """Share of the pool that may be in quarantine for longer than a lease: beyond it the worker
    is to end. 1: never."""
    local_prefill_max_tokens: int | None = None
    """None: cost rule. N: remainders of at most N tokens run locally, longer ones ship."""
    has_store: bool = False
    """A KV store is there: look prompts up in it, put computed pages into it."""
    lease_s: float = 10.0
    renew_interval_s: float = 3.0
    fill_progress_timeout_s: float = 5.0
    transport: Literal["auto", "nixl", "data"] = "auto"
    staging_bytes: int | None = None
    """Memory that pages pass through on their way from and to a pool on a GPU. None: 2 GiB, or as
    much as a pool whose size is given."""
    staging_memory: Literal["auto", "host", "device"] = "auto"
    """Whose memory that is. auto: the GPU's own where NIXL works, another GPU of this host can
    reach it, and no KV store is there; else the host's."""
    force_staging: bool = False
    """Stage pages of a pool on a CPU too (tests)."""
    page_digests: bool = True
    """Pages that arrive are checked against digests of their sender. Off, damage on the way goes
    unnoticed; a KV store needs it, and so does every peer that has it on."""
    num_threads: int | None = None
    """Compute threads; default: all cores."""
    prefix_cache: bool = True
    kv_eviction_policy: EvictionName = "lru"
    """Which cached page is given up first (`weft.engine.memory.eviction`)."""
    session_pool_share: float = 0.25
    """Of the pool's pages that chat sessions may have pinned; 0: sessions pin nothing."""
    session_tenant_share: float = 1.0
    """Of these, what sessions of one tenant may have."""
    session_ttl_s: float = 600.0
    """A session in which nothing has ended for so long loses its pins."""
    host_cache_bytes: int = 0
    """Host memory for pages that the pool gives up; 0: none."""
    disk_cache_dir: Path | None = None
    """Folder for pages on disk, in a folder by the worker's id; None: none are kept there."""
    disk_cache_bytes: int = 10 << 30
    """Of pages on disk at most."""
    write_through_threshold: int = 0
    """Requests that find a page before it is copied to host memory, disk and KV store; 0: it is
    copied when it is computed."""
    load_back_threshold: int | None = None
    """None: pages are loaded from tiers and the KV store if that is faster than computing them.
    N: if they hold N tokens or more."""
    enable_lora: bool = False
    """Serve adapters (LoRA) beside the model; memory for them is set aside at start."""
    max_lora_rank: int = 64
    """Largest rank of an adapter."""
    max_loras: int = 16
    """Adapters on the device at once, and so of one step."""
    lora_memory_bytes: int | None = None
    """Device memory of adapters. None: as much as max_loras adapters of rank 16 take that change
    every projection of the model. What they bring for an EAGLE-3 head on a GPU takes some beside
    it."""
    lora_projections: tuple[str, ...] = ()
    """What adapters may change, among which that memory is divided: q, k, v, o, gate, up, down;
    embed_tokens, lm_head; experts, or shared_experts where all of them share A of gate and up and B
    of down. Empty: the first seven, as far as the model has them."""
    lora_host_bytes: int = 4 << 30
    """Host memory of adapters that were read; those beyond it are read from disk again."""
    draft_dir: Path | None = None
    """Of an EAGLE head for the model. Its KV lies in the model's pages: a worker that is to fill
    or be filled by another one must have the same. With drafter = model of a whole model, whose KV
    is nobody else's business."""
    drafter: DrafterName = "none"
    """Who guesses tokens for the model to verify, several in one step: eagle3 or eagle, a
    head of that kind in draft_dir; model, a smaller model of the same vocabulary there; or ngram,
    which looks in the request's own text."""
    max_draft_tokens: int = 5
    """Guesses of a request in one step at most that form a chain; how many pay is measured."""
    draft_width: int = 1
    """With eagle3: drafts may form trees, so many nodes of each level with as many children each,
    and up to 31 a step; whether they pay is measured. 1: chains alone."""
    draft_gate: DraftGateName = "measured"
    """How many drafts are made: measured, as many as bring the most tokens a second; or fixed,
    always the most, in trees if they may form trees and a step has few requests."""
    poison_free_pages: bool = False
    """Fill pages with NaN when they become free (tests)."""
    deterministic: bool = False
    """Same bits for a request alone, in any batch and however it is cut into steps; refused where
    the machine's operations do not give that."""
    constraint_compile_s: float = 10.0
    """Processor time that compiling one constraint (schema, expression, grammar) may take."""
    constraint_compile_bytes: int = 1 << 30
    """Memory that compiling one constraint may take, in a process apart."""
    constraint_cache_bytes: int = 256 << 20
    """Of compiled constraints kept; one may take a quarter."""
    early_compiler: bool = True
    """Start the process that compiles constraints once some may come; else with the first."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Plan and start a step while the device still runs the one before; auto: on a GPU."""
    cuda_graphs: bool = True
    """Capture steps at start; on CUDA devices only."""
    enable_faults: bool = False
    """Faults can be injected, and published pages are audited (tests of the mesh)."""
    dummy_weights: bool = False
    """Random weights instead of the checkpoint's (benchmarks)."""

    def __post_init__(self) -> None:
        values = ((name, getattr(self, name), bound) for name, bound in BOUNDS.items())
        wrong = [
            f"{name} = {value}: must be {bound}"
            for name, value, bound in values
            if value is not None and not bound.allows(value)
        ]
        # What fields must be to each other says little while one is wrong by itself.
        wrong = wrong or [
            f"{name} = {getattr(self, name)}: must be {wanted}"
            for name, is_good, wanted in self._relations()
            if not is_good
        ]
        if wrong:
            raise ConfigError("; ".join(wrong))

    def _relations(self) -> list[tuple[str, bool, str]]:
        """What fields must be to each other: name, whether it is, and what in words."""
        chains = self.draft_width == 1
        return [
            (
                "prefill_chunk_tokens",
                self.prefill_chunk_tokens % self.page_size == 0,
                f"a multiple of page_size ({self.page_size})",
            ),
            (
                "max_step_tokens",
                self.max_step_tokens >= max(self.prefill_chunk_tokens, self.max_running_requests),
                "at least prefill_chunk_tokens and max_running_requests",
            ),
            (
                "page_digests",
                self.page_digests or not self.has_store,
                "on beside a KV store, which takes no unchecked pages",
            ),
            ("lease_s", self.lease_s > self.renew_interval_s, "> renew_interval_s"),
            (
                "drafter",
                self.drafter in ("none", "ngram") or self.draft_dir is not None,
                "another one, or draft_dir given",
            ),
            (
                "draft_width",
                chains or self.drafter == "eagle3",
                "1 unless drafter = eagle3: only such heads grow trees",
            ),
            (
                "draft_width",
                chains or not self.deterministic,
                "1 with deterministic: rows of trees are summed up in another order",
            ),
            (
                "max_step_tokens",
                chains or self.max_step_tokens >= self._tree_rows,
                f">= {self._tree_rows} with draft_width > 1",
            ),
        ]

    @property
    def head_dir(self) -> Path | None:
        """Of an EAGLE head; None: there is none."""
        return None if self.drafter == "model" else self.draft_dir

    @property
    def _tree_rows(self) -> int:
        """Of the largest step of trees."""
        return (1 + MAX_TREE_NODES) * min(MAX_TREE_REQUESTS, self.max_running_requests)

    @property
    def is_on_gpu(self) -> bool:
        """The model is on a CUDA device."""
        return self.device.partition(":")[0] == "cuda"

    @property
    def is_overlapped(self) -> bool:
        """A step begins before the one before it is committed."""
        return self.overlap == "on" or (self.overlap == "auto" and self.is_on_gpu)

    @property
    def decodes_beside(self) -> int:
        """Tokens of running requests for which a step has room beside `max_step_tokens`.

        On a GPU, where a few tokens that prompts leave to a step of their own cost nearly as much
        as some hundred.
        """
        return min(MAX_DECODES_BESIDE, self.max_running_requests) if self.is_on_gpu else 0

    @property
    def ships_pages(self) -> bool:
        """Others may ask this engine for pages, or it others."""
        never_fills = (self.local_prefill_max_tokens or 0) >= NEVER_SHIP_TOKENS
        is_alone = self.role == "decode" and self.transport == "data" and not self.has_store
        return not (is_alone and never_fills)
