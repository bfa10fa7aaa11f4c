"""Reports of an engine about its load, its tiers, and its properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.contract.adapters import AdapterState
from weft.contract.experts import ExpertBalance
from weft.contract.fills import StagingCounts
from weft.contract.handle import SharedTargetInfo
from weft.contract.layout import StatePlane
from weft.contract.tasks import Task
from weft.contract.wire import wire

QUIET_REPORT_S = 0.5
"""Seconds between the reports of an engine in which nothing happens."""
_MAX_PROBLEM_BYTES = 256


@dataclass(slots=True, kw_only=True)
class TierReport:
    """State of one tier below the pool."""

    name: str
    """host, disk, or store (the KV store, which counts its pages itself)."""
    total_pages: int
    free_pages: int
    cached_pages: int
    used_pages: int
    """Pages that can be read, and pages reserved for loads in progress."""
    load_bytes_per_s: float = field(metadata=wire(name="load_bytes_per_second"))
    """Measured load bandwidth, bytes per second; 0: unknown."""
    counters: dict[str, int]
    """Counters since start (`weft.pages.tiers.tier.TierCounters`)."""


@dataclass(slots=True, kw_only=True)
class WindowCounts:
    """Pages by state in a page group whose pages are freed after a sliding window has
    passed them.
    """

    free: int
    cached: int
    used: int


@dataclass(slots=True, kw_only=True)
class StateCounts:
    """Blocks of recurrent layers by state, and how much of the prefix cache they make usable."""

    free: int
    cached: int
    used: int
    checkpoint_tokens: int
    """Most tokens of a prompt from one block that is kept to the next."""
    prefix_pages: int
    """Pages of KV in the prefix cache, in use or not."""
    continuable_pages: int
    """Pages among them that save a request work: a block follows them or a later page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInUse:
    """The version of the weights, and the pause by a trainer, as in `WeightStatus`."""

    version: str
    state: str
    pause: str
    num_updates: int
    problem: str = field(default="", metadata=wire(cut_bytes=_MAX_PROBLEM_BYTES))
    """Why there is no version, while the state is failed."""


@dataclass(slots=True, kw_only=True)
class LoadReport:
    """The engine's state, sent every 100 ms, after important changes, and less often by an engine
    in which nothing happens.
    """

    running_requests: int
    waiting_requests: int
    filling_requests: int
    queued_tokens: int
    """Prompt tokens still to be computed; for waiting requests without their cached prefixes."""
    request_tokens: int
    """Prompt and generated tokens of all requests."""
    total_pages: int
    free_pages: int
    cached_pages: int
    used_pages: int
    quarantined_pages: int
    quarantine_over_s: float
    """Seconds for which quarantined pages, or staging pages, are above `max_quarantine_fraction`.
    """
    staging: StagingCounts | None = None
    """Staging pages of a pool that peers cannot reach directly; None: they can."""
    prefill_tokens_per_second: float
    """Measured; 0: not known yet."""
    recent_prefill_tokens_per_second: float
    """The recent rate; 0: no prompt was computed lately."""
    decode_tokens_per_second: float
    decode_step_s: float
    """Mean time of the latest steps in which requests decoded; 0: none did yet."""
    decode_step_requests: float
    """Mean number of requests that decoded in those steps."""
    new_token_ratio: float
    """Share of their `max_tokens` that requests are expected to generate, for admission."""
    stale_after_s: float
    is_draining: bool
    asleep: list[str] = field(default_factory=list)
    """What sleeps; no requests are taken until nothing does."""
    is_idle: bool
    """Whether no request, lease or put exists, so that the engine can end without harm."""
    transport_detail: str
    """Transports and lanes in use; lanes are known only after pages have travelled."""
    counters: dict[str, int]
    tiers: list[TierReport] = field(default_factory=list)
    adapters: list[AdapterState] = field(default_factory=list)
    """Adapters whose state has changed since the last report. Unchanged adapters are not listed,
    since there may be thousands.
    """
    gone_adapters: list[bytes] = field(default_factory=list)
    """Digests of adapters that were removed since the last report."""
    sessions: int = 0
    """Chat sessions with pinned pages."""
    pinned_pages: int = 0
    """Number of pages pinned for them, cached or used."""
    window_pages: dict[str, WindowCounts] = field(default_factory=dict)
    """Pages of the planes whose pages are freed after a window, by name."""
    state_counts: StateCounts | None = None
    """Blocks of recurrent layers; None: the model has no such layers."""
    draft_depths: dict[int, int] = field(default_factory=dict)
    """Drafts per request, by the least number of requests in a step for which the entry holds;
    empty if nothing is drafted."""
    weights: WeightsInUse | None = None
    """None: the engine is of an older version."""
    experts: ExpertBalance | None = None
    """None: the experts stay where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Properties that an engine reports once, when it is ready."""

    epoch: int
    model_digest: bytes
    dtype: str
    weight_format: str
    """Number formats that the layers' products are computed with, bytes per weight, and the format
    of the file, in words.
    """
    vocab_size: int = field(metadata=wire(name="vocabulary_size"))
    max_context_tokens: int
    num_pages: int
    page_size: int
    page_bytes: int
    layers: int
    kv_heads: int
    head_dim: int
    transports: list[str]
    transport_detail: str
    versions: dict[str, str]
    notices: list[str]
    engine_pid: int
    incoming: SharedTargetInfo | None = None
    """Memory into which the server puts data of fills; None: the engine does."""
    outgoing: SharedTargetInfo | None = None
    """Memory from which the server sends data of fills; None: it gets them in messages."""
    kv_parts: tuple[str, ...] = ("k", "v")
    """Parts that a page holds for each position and head, of `head_dim` elements each."""
    draft: str = ""
    """Hexadecimal digest of the draft head whose KV is the last layer; empty: there is none."""
    task: Task = "generate"
    """Task that the model serves."""
    embedding_size: int = 0
    """Entries of the model's embeddings; 0: it serves none."""
    num_labels: int = 0
    """Classes of the model's classification head; 0: it has none."""
    encoder_digest: bytes = b""
    """Digest of its encoder of images, a part of keys; empty: prompts have none here."""
    lacks_encoder: bool = False
    """Whether it has left out its model's encoder of images; others compute what needs it."""
    max_loras: int = 0
    """Most adapters on the device at once; 0: the engine serves none."""
    max_lora_rank: int = 0
    states: StatePlane | None = None
    """What blocks of recurrent layers contain; None: the model has no such layers."""
    further_planes: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Numbers of layers, heads and elements of a head in the planes after the first, by name:
    planes whose pages are freed after a window, and planes of layers with other heads.
    """
    expert_group: str = ""
    """Names the workers with which it shares experts, as long as these live; empty: it has all."""
    expert_group_rank: int = 0
    expert_group_size: int = 0
    start_work_seconds: dict[str, float] = field(default_factory=dict)
    """What `START_WORK` has added up until the engine was ready."""


PIPELINE = "pipeline: "
"""Begins the notice that tells which stages a worker has, and where."""
_BUBBLES = "stages were idle for "


def describe_bubbles(counters: Mapping[str, int]) -> str:
    """How long the stages of a worker's pipeline had nothing to compute, in words, since it
    started; empty: there are no stages, or no step has run.
    """
    if not (total := counters.get("stage_us", 0)):
        return ""
    share = counters.get("bubble_us", 0) / total
    return f"{_BUBBLES}{share:.0%} of the time with steps under way (bubbles)"


def tells_of_stages(notice: str) -> bool:
    """Whether one of a worker's notices tells which stages it has, or how long they were idle."""
    return notice.startswith((PIPELINE, _BUBBLES))
