"""Engine settings: resolved values, checked together before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from weft.contract.errors import ConfigError

Role = Literal["decode", "prefill"]
DrafterName = Literal["none", "ngram", "mtp", "eagle", "eagle3", "model"]
DraftGateName = Literal["measured", "fixed"]
PolicyName = Literal["fcfs", "longest_prefix", "shortest_remaining", "priority", "fair"]
"""Admission policies (`weft.engine.scheduler.policies`)."""
EvictionName = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
"""Eviction policies (`weft.engine.memory.eviction`)."""
HEAD_DRAFTERS = ("mtp", "eagle", "eagle3")
"""Drafters that use a draft head: mtp the checkpoint's own, the others that in `draft_dir`; eagle
covers EAGLE-1 and EAGLE-2 heads.
"""
_NEED_NO_DIR = ("none", "ngram", "mtp")

MAX_TREE_NODES = 31
"""Most drafts in the draft tree of one request in one step."""
MAX_TREE_REQUESTS = 4
"""Most requests in a step that verifies trees; in larger steps extra rows are no longer cheap."""
MAX_DECODES_BESIDE = 64
"""Rows of running requests that a step takes in addition to `max_step_tokens` on a GPU; this many
rows hardly slow a large step down.
"""
NEVER_SHIP_TOKENS = 1 << 40
"""Value of `local_prefill_max_tokens` with which every prompt is prefilled locally."""


class Bound(NamedTuple):
    """Lower and upper bound of one number, independent of other settings."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def allows(self, value: float) -> bool:
        """Whether a number lies within the bounds; NaN never does."""
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
    "device_memory_share": Bound(gt=0, le=1),
    "num_pages": Bound(ge=4),
    "checkpoint_tokens": Bound(ge=1),
    "max_context_tokens": Bound(ge=2),
    "max_running_requests": Bound(ge=1, le=4096),
    "max_waiting_requests": Bound(ge=1),
    "max_queued_fill_tokens": Bound(ge=0),
    "max_tokens_in_flight": Bound(ge=1),
    "max_step_tokens": Bound(ge=16),
    "prefill_chunk_tokens": Bound(ge=1),
    "inter_token_target_s": Bound(gt=0),
    "step_lead_s": Bound(ge=0),
    "stream_interval_s": Bound(ge=0, le=1),
    "shared_step_tokens": Bound(ge=1),
    "last_piece_tokens": Bound(ge=0),
    "first_token_weight": Bound(ge=0, le=1e6),
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
    "tp": Bound(ge=1, le=64),
    "ep": Bound(ge=1, le=64),
    "rank_timeout_s": Bound(gt=0, le=3600),
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
    "lora_whole_matrices": Bound(ge=0, le=64),
    "lora_added_tokens": Bound(ge=0, le=4096),
    "max_draft_tokens": Bound(ge=1, le=32),
    "draft_width": Bound(ge=1, le=6),
    "constraint_compile_s": Bound(gt=0, le=600),
    "constraint_cache": Bound(ge=1, le=65_536),
}
"""Bounds of the numeric engine settings by name; None: no bound. Services use the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine's settings. Services build it from their own settings; libraries use it as is."""

    model_dir: Path
    model_name: str = "model"
    role: Role = "decode"
    worker_id: str = "worker-0"
    """Stable worker name, kept over restarts."""
    task: Literal["auto", "generate", "embed", "classify", "score"] = "auto"
    """The task that the model serves: tokens, embeddings, classes, or scores computed from the
    logits of two tokens. auto: the model's files decide.
    """
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16."""
    quantization: str = "auto"
    """Number format of the weights of linear layers. auto: the checkpoint's format. Otherwise a
    format into which the loader quantises a checkpoint of floats, such as int8."""
    kv_dtype: Literal["auto", "fp8_e4m3", "int8"] = "auto"
    """Number format of K and V in pages. auto: that of the activations. The others: 8 bits, with a
    scale for each position and head; fp8_e4m3 on CPUs, and on GPUs of compute capability 8.9 and
    later."""
    device: str = "cpu"
    """A torch device. With tp > 1 either rank 0's device, after which the other ranks take the
    next GPUs, or one device for each rank, separated by commas."""
    tp: int = 1
    """Number of ranks (tensor parallelism). Each rank is a process that holds a share of the
    weights and of the KV pool."""
    ep: int = 1
    """Number of ranks among which the experts of mixtures are divided whole (expert parallelism):
    1, every rank has a part of each expert; or tp."""
    rank_timeout_s: float = 10.0
    """Seconds that a rank waits for another rank in a step before the engine ends."""
    check_ranks: bool = False
    """Whether ranks compare hashes of each sum at the next sum, to find faults; on CPUs."""
    page_size: int = 16
    """Token positions per page."""
    kv_memory_bytes: int | None = None
    """Size of the KV pool, bytes; ignored if num_pages is given. None: 1 GiB on a CPU, 2 GiB
    with states of recurrent layers; on a GPU the memory that the weights, the largest step and the
    graphs leave free.
    """
    device_memory_share: float = 1.0
    """Largest share of a GPU's memory that this engine takes for everything together, where the
    pool takes the free memory. Lower it to run several workers on one GPU.
    """
    num_pages: int | None = None
    window_pages: Literal["auto", "free", "keep"] = "auto"
    """Pages of sliding-window layers. auto: the engine frees pages behind the window unless a
    feature needs all of them (`keeps_windows`). free: it also does so where it exchanges pages with
    a KV store or other workers, which must have the same setting. keep: the engine keeps all.
    """
    checkpoint_tokens: int = 1024
    """Models with recurrent layers: tokens from one state that the prefix cache keeps of a prompt
    to the next, rounded down to whole pages."""
    max_context_tokens: int | None = None
    """Most tokens of a prompt and its output together; None: the model's limit."""
    max_running_requests: int = 64
    max_waiting_requests: int = 1024
    max_queued_fill_tokens: int = 262_144
    """Queued prompt tokens beyond which a filler declines fills as busy."""
    max_tokens_in_flight: int | None = None
    """Prompt tokens that a filler admits at a time for other workers. They are in flight until
    their pages have left; a longer prompt is admitted alone. None: as many as the pool has room
    for.
    """
    max_step_tokens: int = 512
    """Most new tokens in one step, and the largest prefill chunk. On a GPU a step takes up to
    `MAX_DECODES_BESIDE` tokens of running requests in addition.
    """
    prefill_chunk_tokens: int = 256
    """Largest chunk of one prompt in a step; a multiple of page_size."""
    shared_step_tokens: int | None = None
    """Prompt tokens of a step up to which further prompts join the first one. In a larger step the
    first prompts would wait for later ones, although fewer tokens keep the device busy. None: as
    many as fit.
    """
    last_piece_tokens: int | None = None
    """Prompt tokens that a filler leaves for the last step of a long prompt while no other prompt
    waits: only that step's pages are still to be shipped when all is computed. 0: as few steps as
    possible. None: what suits the transport (`Transport.last_piece_tokens`).
    """
    inter_token_target_s: float = 0.1
    """Inter-token latency target, seconds. The scheduler cuts prompt chunks so that a step that
    also decodes meets the target, unless the delay of first tokens outweighs it.
    """
    first_token_weight: float = 1.0
    """Worth of a second of delay of a first token, in seconds of delay of next tokens
    (`weft.engine.scheduler.prompt_budget`, `weft.engine.sources.cost`). 0: prompts always keep to
    the target, and are shipped while requests run.
    """
    step_lead_s: float = 0.002
    """On a GPU worker that exchanges pages with other workers: seconds before the expected end of
    a step of running requests at which the engine begins the next step, in addition to the host's
    own time. Requests that arrive before take part in the next step. With a value longer than a
    step the next step begins at once.
    """
    stream_interval_s: float | None = 0.0
    """Seconds for which next tokens of samples may gather before they leave the engine. None: on a
    GPU 0; on a CPU by the number of samples and the processor time of their steps
    (`weft.engine.loop.stream_pace`).
    """
    scheduling_policy: PolicyName = "fcfs"
    """Order in which waiting requests are admitted (`weft.engine.scheduler.policies`)."""
    ageing_s: float = 30.0
    """Waiting time, seconds, that counts as one level of priority or makes up for one full step of
    prompt tokens. A request that has waited this long is no longer passed over for its short
    cached prefix.
    """
    preemption_threshold: int | None = 10
    """Only with the policy `priority`: the scheduler preempts a running request for one that is
    this many levels more urgent.
    """
    max_fill_fraction: float = 0.3
    """Largest share of the pool that remote fills may reserve."""
    max_quarantine_fraction: float = 0.1
    """Largest share of the pool that may stay in quarantine for longer than a lease; the worker
    exits if more does. 1: the worker never exits for this reason.
    """
    local_prefill_max_tokens: int | None = None
    """None: the cost rule decides where a prompt's remainder is computed. N: this engine computes
    remainders of at most N tokens, and other workers compute longer ones.
    """
    has_store: bool = False
    """Whether the engine looks prompts up in a KV store and puts computed pages there."""
    lease_s: float = 10.0
    renew_interval_s: float = 3.0
    fill_progress_timeout_s: float = 5.0
    transport: Literal["auto", "nixl", "data"] = "auto"
    staging_bytes: int | None = None
    """Bytes of the staging area, which pages pass through on their way from and to a pool on a
    GPU. None: 2 GiB in host memory; in GPU memory a sixteenth of it, at most 4 GiB. Never more
    than the size of the pool, if that is given.
    """
    staging_memory: Literal["auto", "host", "device"] = "auto"
    """Kind of memory used for staging pages. auto: GPU memory if NIXL works, no KV store is
    configured, and another GPU of this host can reach this one or another worker shares it
    (`device_memory_share`); else host memory.
    """
    force_staging: bool = False
    """Whether to stage pages of a pool on a CPU too (tests)."""
    page_digests: bool = True
    """Whether the engine checks pages that arrive against their sender's digests. Without the
    check, corruption in transit goes unnoticed. A KV store requires it, and so does every peer
    that has it on.
    """
    num_threads: int | None = None
    """Compute threads; default: all cores."""
    prefix_cache: bool = True
    kv_eviction_policy: EvictionName = "lru"
    """Order in which cached pages are evicted (`weft.engine.memory.eviction`)."""
    session_pool_share: float = 0.25
    """Largest share of the pool's pages that chat sessions may pin; 0: sessions pin nothing."""
    session_tenant_share: float = 1.0
    """Largest share of the session pages that one tenant may pin."""
    session_ttl_s: float = 600.0
    """Seconds of inactivity after which a session loses its pins."""
    host_cache_bytes: int = 0
    """Host memory for pages evicted from the pool; 0: none."""
    disk_cache_dir: Path | None = None
    """Folder for pages on disk; the engine uses its subfolder named by the worker's id. None: the
    engine keeps no pages on disk.
    """
    disk_cache_bytes: int = 10 << 30
    """Most bytes of pages on disk."""
    write_through_threshold: int = 0
    """Number of requests that must find a page before the engine copies it to host memory, disk
    and KV store; 0: the engine copies a page when it is computed."""
    load_back_threshold: int | None = None
    """None: the engine loads pages from tiers and the KV store if that is faster than computing
    them. N: the engine loads them if they hold at least N tokens.
    """
    enable_lora: bool = False
    """Whether to serve LoRA adapters; memory for them is allocated at start."""
    max_lora_rank: int = 64
    """Largest rank an adapter may have."""
    max_loras: int = 16
    """Most adapters on the device at once, and so in one step."""
    lora_memory_bytes: int | None = None
    """Device memory of adapters on each rank, bytes. None: room for max_loras adapters of rank 16
    that change every projection of the model. Draft adapters for an EAGLE-3 head on a GPU need
    additional memory.
    """
    lora_projections: tuple[str, ...] = ()
    """Projections that adapters may change; the device memory of adapters is divided among them:
    q, k, v, o, gate, up, down; embed_tokens, lm_head; router; experts, or shared_experts for
    adapters whose experts share A of gate and up and B of down. Empty: those of the first seven
    that the model has.
    """
    lora_host_bytes: int = 4 << 30
    """Host memory of adapters, bytes; the engine reads adapters that do not fit from disk again."""
    lora_whole_matrices: int = 0
    """Most adapters on the device at once that replace the embedding, and most that replace the LM
    head, if lora_projections names these. Their memory comes in addition.
    """
    lora_added_tokens: int = 0
    """Most tokens that an adapter may add to the model's vocabulary. The embedding and the LM head
    get this many additional rows.
    """
    draft_dir: Path | None = None
    """Directory of the draft head or draft model. An EAGLE head keeps its KV in the model's pages,
    so workers that fill each other's pages must have the same head. With drafter = model the
    directory holds a whole model, whose KV stays on this worker.
    """
    mtp_head: bool = False
    """Whether to load the MTP head that the model's checkpoint brings, whose KV lies in the model's
    pages like that of a head in draft_dir. drafter = mtp includes it.
    """
    drafter: DrafterName = "none"
    """Source of the draft tokens, of which the model verifies several in one step: mtp (the head
    that the checkpoint brings), eagle3 or eagle (a head of that kind in draft_dir), model (a
    smaller model of the same vocabulary in draft_dir), or ngram (a search in the request's own
    text).
    """
    max_draft_tokens: int = 5
    """Most drafts in the draft chain of one request in one step. With draft_gate = measured the
    engine chooses a smaller number if that yields more tokens a second."""
    draft_width: int = 1
    """With eagle3: width of draft trees. This many nodes of each level get as many children each,
    up to 31 drafts in a step. The gate measures whether trees pay. 1: chains only.
    """
    draft_gate: DraftGateName = "measured"
    """How the gate chooses the number of drafts. measured: the number that yields the most tokens a
    second. fixed: always the largest number, as trees where trees are allowed and a step has few
    requests.
    """
    poison_free_pages: bool = False
    """Fill pages with NaN when they become free (tests)."""
    deterministic: bool = False
    """Whether a request's results have the same bits alone, in any batch and with any division into
    steps. The engine refuses to start if the machine's operations do not guarantee that.
    """
    constraint_compile_s: float = 10.0
    """Seconds that compiling one constraint may take."""
    constraint_cache: int = 256
    """Most compiled constraints that the engine keeps for later requests."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Whether the engine plans and starts a step while the device still runs the previous one.
    auto: on a GPU.
    """
    cuda_graphs: bool = True
    """Whether to capture steps as CUDA graphs at start."""
    enable_faults: bool = False
    """Whether tests can inject faults, and the engine audits published pages."""
    dummy_weights: bool = False
    """Random weights instead of the checkpoint's (benchmarks)."""

    def __post_init__(self) -> None:
        values = ((name, getattr(self, name), bound) for name, bound in BOUNDS.items())
        wrong = [
            f"{name} = {value}: must be {bound}"
            for name, value, bound in values
            if value is not None and not bound.allows(value)
        ]
        # Relations between fields are checked only once each field is right by itself.
        wrong = wrong or [
            f"{name} = {getattr(self, name)}: must be {wanted}"
            for name, is_good, wanted in self._relations()
            if not is_good
        ]
        if wrong:
            raise ConfigError("; ".join(wrong))

    def _relations(self) -> list[tuple[str, bool, str]]:
        """Constraints between fields: name, whether it holds, and what must hold, in words."""
        chains = self.draft_width == 1
        return [
            *self._relations_of_ranks(),
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
                "window_pages",
                self.window_pages != "free" or not self.keeps_windows,
                f"auto or keep: {self.keeps_windows}",
            ),
            (
                "drafter",
                self.drafter in _NEED_NO_DIR or self.draft_dir is not None,
                "another one, or draft_dir given",
            ),
            (
                "mtp_head",
                not self.reads_mtp or self.draft_dir is None,
                "off, and drafter another than mtp, with draft_dir: pages hold KV of one head",
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

    def _relations_of_ranks(self) -> list[tuple[str, bool, str]]:
        """Constraints that tensor parallelism adds, in the form of `_relations`."""
        of_experts = ("ep", self.ep in (1, self.tp), f"1 or tp = {self.tp}")
        if self.tp == 1:
            return [of_experts, ("check_ranks", not self.check_ranks, "off with tp = 1")]
        return [
            of_experts,
            (
                "check_ranks",
                not (self.check_ranks and self.is_on_gpu),
                "off on GPUs, whose captured sums are not compared",
            ),
            (
                "tp",
                not (self.enable_lora and self.lora_whole_matrices),
                "1 with lora_whole_matrices, which are not sent to other ranks",
            ),
            ("tp", self.task in ("auto", "generate"), f"1 with task = {self.task}"),
            ("tp", self.drafter != "model", "1 with drafter = model, which is not divided"),
            ("tp", self.draft_width == 1, "1 with draft_width > 1: ranks draft chains alone"),
        ]

    @property
    def reads_mtp(self) -> bool:
        """Whether the checkpoint's MTP head is loaded."""
        return self.mtp_head or self.drafter == "mtp"

    @property
    def head_dir(self) -> Path | None:
        """Directory of the EAGLE head; None: there is none."""
        return None if self.drafter == "model" else self.draft_dir

    @property
    def has_head(self) -> bool:
        """Whether pages hold the KV of a draft head."""
        return self.reads_mtp or self.head_dir is not None

    @property
    def most_drafts(self) -> int:
        """Most drafts of one request in a step, as a chain."""
        return 0 if self.drafter == "none" else self.max_draft_tokens

    @property
    def _tree_rows(self) -> int:
        """Rows of the largest step that verifies trees."""
        return (1 + MAX_TREE_NODES) * min(MAX_TREE_REQUESTS, self.max_running_requests)

    @property
    def is_on_gpu(self) -> bool:
        """Whether the model is on a CUDA device."""
        return self.device.partition(":")[0] == "cuda"

    @property
    def is_overlapped(self) -> bool:
        """Whether a step starts before the previous one is committed."""
        return self.overlap == "on" or (self.overlap == "auto" and self.is_on_gpu)

    @property
    def decodes_beside(self) -> int:
        """Rows of running requests that a step takes in addition to `max_step_tokens`.

        Only on a GPU: a separate step for the last few tokens of prompts would take nearly as long
        as a step of some hundred.
        """
        return min(MAX_DECODES_BESIDE, self.max_running_requests) if self.is_on_gpu else 0

    @property
    def keeps_windows(self) -> str:
        """The reason why the engine keeps pages behind sliding windows; empty: it frees them."""
        reasons = (
            (self.window_pages == "keep", "window_pages is keep"),
            (self.tp > 1, "ranks divide one page group"),
            (
                self.window_pages == "auto"
                and (self.role == "prefill" or self.has_store or not self.never_fills),
                "this worker may exchange pages with others; with window_pages = free on all of "
                "them it may free its own",
            ),
            (self.draft_width > 1, "drafts form trees"),
        )
        return next((text for is_so, text in reasons if is_so), "")

    @property
    def never_fills(self) -> bool:
        """Whether this engine never asks other workers for pages."""
        return (self.local_prefill_max_tokens or 0) >= NEVER_SHIP_TOKENS

    @property
    def has_tiers(self) -> bool:
        """Whether there are tiers of the engine's own."""
        return bool(self.host_cache_bytes) or self.disk_cache_dir is not None

    @property
    def moves_pages(self) -> bool:
        """Whether pages leave the pool or come into it: from other workers, a store or tiers."""
        return self.ships_pages or self.has_tiers

    @property
    def ships_pages(self) -> bool:
        """Whether this engine may exchange pages with other workers."""
        is_alone = self.role == "decode" and self.transport == "data" and not self.has_store
        return not (is_alone and self.never_fills)
