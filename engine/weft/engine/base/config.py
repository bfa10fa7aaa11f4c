"""Engine settings: resolved values, checked together before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from weft.engine.base.errors import ConfigError

Role = Literal["decode", "prefill"]
DrafterName = Literal["none", "ngram", "eagle", "eagle3", "model"]
DraftGateName = Literal["measured", "fixed"]
PolicyName = Literal["fcfs", "longest_prefix", "shortest_remaining", "priority", "fair"]
"""Admission policies (`weft.engine.scheduler.policies`)."""
EvictionName = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
"""Eviction policies (`weft.engine.memory.eviction`)."""
HEAD_DRAFTERS = ("eagle", "eagle3")
"""Drafters that use the head in `draft_dir`, which must be of that kind; eagle is EAGLE-1 and 2."""

MAX_TREE_NODES = 31
"""Most drafts of a request in one step that form a tree."""
MAX_TREE_REQUESTS = 4
"""Most requests in a step that verifies trees; with more, extra rows are no longer cheap."""
MAX_DECODES_BESIDE = 64
"""Rows of running requests that a large step has room for in addition; so many hardly slow it down.
"""
NEVER_SHIP_TOKENS = 1 << 40
"""Value of `local_prefill_max_tokens` with which every prompt is prefilled locally."""


class Bound(NamedTuple):
    """Lower and upper bound of one number, independent of other settings."""

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
    "device_memory_share": Bound(gt=0, le=1),
    "num_pages": Bound(ge=4),
    "max_context_tokens": Bound(ge=2),
    "max_running_requests": Bound(ge=1, le=4096),
    "max_waiting_requests": Bound(ge=1),
    "max_queued_fill_tokens": Bound(ge=0),
    "max_step_tokens": Bound(ge=16),
    "prefill_chunk_tokens": Bound(ge=1),
    "inter_token_target_s": Bound(gt=0),
    "step_lead_s": Bound(ge=0),
    "shared_step_tokens": Bound(ge=1),
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
    """What the model serves: tokens, embeddings, classes, or scores by the logits of two tokens;
    auto: what its files are for.
    """
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16."""
    quantization: str = "auto"
    """Number format of the products' weights: auto (what the checkpoint has), or int8, made at load
    from floats."""
    device: str = "cpu"
    """A torch device. With tp > 1 that of rank 0, whose followers take the next GPUs, or one a
    rank, separated by commas."""
    tp: int = 1
    """Ranks, processes that hold a share of the weights and of the KV pool each: tensor
    parallelism."""
    rank_timeout_s: float = 10.0
    """Seconds that a rank waits for another one in a step; then the engine ends."""
    page_size: int = 16
    """Token positions per page."""
    kv_memory_bytes: int | None = None
    """Size of the KV pool, bytes; ignored if num_pages is given. None: 1 GiB on a CPU; on a GPU
    what the weights, the largest step and the graphs leave.
    """
    device_memory_share: float = 1.0
    """Share of a GPU's memory that a pool sized by what is left leaves this engine at most, all of
    its other memory included: for several workers on one GPU.
    """
    num_pages: int | None = None
    window_pages: Literal["auto", "keep"] = "auto"
    """Pages of layers with a sliding window, in models that also have others: auto, they are freed
    behind the window unless something needs them all (`keeps_windows`); keep, all are kept.
    """
    max_context_tokens: int | None = None
    """Longest prompt and output together; by default the model's limit."""
    max_running_requests: int = 64
    max_waiting_requests: int = 1024
    max_queued_fill_tokens: int = 262_144
    """Queued prompt tokens beyond which a filler declines as busy."""
    max_step_tokens: int = 512
    """Most new tokens in one step, on a GPU beside 64 of running requests; also the largest prefill
    chunk.
    """
    prefill_chunk_tokens: int = 256
    """Largest chunk of one prompt in a step; a multiple of page_size."""
    shared_step_tokens: int | None = None
    """Prompt tokens of a step up to which further prompts join the first one: with more, prompts
    that come first would wait for those behind them, and a device is busy with fewer. None: as many
    as fit.
    """
    inter_token_target_s: float = 0.1
    """Inter-token latency target, seconds: prompt chunks are cut so that a step that also decodes
    keeps to it, unless first tokens that wait count for more.
    """
    first_token_weight: float = 1.0
    """Worth of a second of delay of a first token, in seconds of delay of next tokens
    (`weft.engine.scheduler.prompt_budget`). 0: prompts always keep to the target.
    """
    step_lead_s: float = 0.002
    """On a GPU worker that exchanges pages with others: seconds before the expected end of a step
    of running requests at which the next one begins, in addition to what the host needs for that.
    What comes until then takes part in it. Longer than a step: it begins at once.
    """
    scheduling_policy: PolicyName = "fcfs"
    """Order in which waiting requests are admitted (`weft.engine.scheduler.policies`)."""
    ageing_s: float = 30.0
    """Waiting time that counts as one level of priority or makes up for one full step of prompt
    tokens, and after which a short prefix does not matter.
    """
    preemption_threshold: int | None = 10
    """With `priority`: a running request is preempted for one that is this many levels more urgent.
    """
    max_fill_fraction: float = 0.3
    """Largest share of the pool that remote fills may reserve."""
    max_quarantine_fraction: float = 0.1
    """Largest share of the pool that may be quarantined for longer than a lease: beyond it the
    worker is to exit. 1: never.
    """
    local_prefill_max_tokens: int | None = None
    """None: the cost rule decides. N: remainders of at most N tokens run locally, longer ones ship.
    """
    has_store: bool = False
    """Whether there is a KV store in which to look prompts up and to put computed pages."""
    lease_s: float = 10.0
    renew_interval_s: float = 3.0
    fill_progress_timeout_s: float = 5.0
    transport: Literal["auto", "nixl", "data"] = "auto"
    staging_bytes: int | None = None
    """Memory that pages pass through on their way from and to a pool on a GPU. None: 2 GiB in the
    host's memory, in the GPU's own a sixteenth of it and at most 4 GiB; no more than the size of
    the pool if that is given.
    """
    staging_memory: Literal["auto", "host", "device"] = "auto"
    """Kind of memory used for staging pages. auto: the GPU's own where NIXL works, another GPU of
    this host can reach it or another worker shares it (`device_memory_share`), and no KV store is
    there; else the host's.
    """
    force_staging: bool = False
    """Whether to stage pages of a pool on a CPU too (tests)."""
    page_digests: bool = True
    """Whether pages that arrive are checked against their sender's digests. Without, corruption in
    transit goes unnoticed; a KV store requires it, and so does every peer that has it on.
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
    """Folder for pages on disk, in a subfolder named by the worker's id; None: none are kept there.
    """
    disk_cache_bytes: int = 10 << 30
    """Most bytes of pages on disk."""
    write_through_threshold: int = 0
    """Requests that find a page before it is copied to host memory, disk and KV store; 0: it is
    copied when it is computed."""
    load_back_threshold: int | None = None
    """None: pages are loaded from tiers and the KV store if that is faster than computing them. N:
    they are loaded if at least N tokens are held.
    """
    enable_lora: bool = False
    """Whether to serve LoRA adapters; memory for them is allocated at start."""
    max_lora_rank: int = 64
    """Largest rank an adapter may have."""
    max_loras: int = 16
    """Most adapters on the device at once, and so in one step."""
    lora_memory_bytes: int | None = None
    """Device memory of adapters. None: as much as max_loras adapters of rank 16 take that change
    every projection of the model. Draft adapters for an EAGLE-3 head on a GPU need additional
    memory.
    """
    lora_projections: tuple[str, ...] = ()
    """Projections that adapters may change, among which that memory is divided: q, k, v, o, gate,
    up, down; embed_tokens, lm_head; router; experts, or shared_experts where all of them share A of
    gate and up and B of down. Empty: the first seven, as far as the model has them.
    """
    lora_host_bytes: int = 4 << 30
    """Host memory of adapters; those beyond it are read from disk again."""
    lora_whole_matrices: int = 0
    """Adapters on the device at once that bring an embedding of their own, and as many that bring
    an LM head, where lora_projections names these. Their memory comes in addition.
    """
    lora_added_tokens: int = 0
    """Most tokens that an adapter may add to the model's vocabulary. Embedding and LM head get as
    many rows more.
    """
    draft_dir: Path | None = None
    """Directory of the draft. An EAGLE head keeps its KV in the model's pages: workers that fill
    each other's pages must have the same one. With drafter = model it holds a whole model, whose KV
    is never shared.
    """
    drafter: DrafterName = "none"
    """Source of the draft tokens that the model verifies, several in one step: eagle3 or eagle, a
    head of that kind in draft_dir; model, a smaller model of the same vocabulary there; or ngram,
    which searches the request's own text.
    """
    max_draft_tokens: int = 5
    """Most drafts of a request in one step that form a chain; how many pay is measured."""
    draft_width: int = 1
    """With eagle3: width of draft trees; this many nodes of each level get as many children each,
    up to 31 drafts a step; whether trees pay is measured. 1: chains only.
    """
    draft_gate: DraftGateName = "measured"
    """How the number of drafts is chosen: measured, the number that yields the most tokens a
    second; or fixed, always the most, as trees where allowed and a step has few requests.
    """
    poison_free_pages: bool = False
    """Fill pages with NaN when they become free (tests)."""
    deterministic: bool = False
    """Whether a request gets the same bits alone, in any batch and however it is cut into steps;
    refused where the machine's operations do not guarantee that.
    """
    constraint_compile_s: float = 10.0
    """Seconds that compiling one constraint may take."""
    constraint_cache: int = 256
    """Most compiled constraints that are kept for later requests."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Whether to plan and start a step while the device still runs the previous one; auto: on a
    GPU.
    """
    cuda_graphs: bool = True
    """Capture steps at start; on CUDA devices only."""
    enable_faults: bool = False
    """Whether faults can be injected and published pages are audited (tests of the mesh)."""
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

    def _relations_of_ranks(self) -> list[tuple[str, bool, str]]:
        """The same for what several ranks do not do yet."""
        if self.tp == 1:
            return []
        needs = [
            ("tp", not self.deterministic, "1 with deterministic: sums depend on it"),
            ("tp", not self.enable_lora, "1 with LoRA adapters, which are not divided yet"),
            ("tp", self.task in ("auto", "generate"), f"1 with task = {self.task}"),
            (
                "tp",
                self.drafter in ("none", "ngram"),
                f"1 with drafter = {self.drafter}, whose head or model is not divided yet",
            ),
        ]
        if self.is_on_gpu:
            needs += [
                ("cuda_graphs", not self.cuda_graphs, "off with tp > 1 on GPUs"),
                (
                    "tp",
                    not self.ships_pages,
                    "1 on GPUs for workers that exchange pages with others: give --transport data "
                    f"and --local-prefill-max-tokens {NEVER_SHIP_TOKENS}, and no KV store",
                ),
                (
                    "tp",
                    not self.host_cache_bytes and self.disk_cache_dir is None,
                    "1 on GPUs with tiers (host_cache_bytes, disk_cache_dir)",
                ),
            ]
        return needs

    @property
    def head_dir(self) -> Path | None:
        """Directory of the EAGLE head; None: there is none."""
        return None if self.drafter == "model" else self.draft_dir

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
        """Rows of running requests for which a step has room beside `max_step_tokens`.

        On a GPU, where a few tokens that prompts leave to a step of their own cost nearly as much
        as some hundred.
        """
        return min(MAX_DECODES_BESIDE, self.max_running_requests) if self.is_on_gpu else 0

    @property
    def keeps_windows(self) -> str:
        """Why pages are kept behind sliding windows, in words; empty: they are freed."""
        reasons = (
            (self.window_pages == "keep", "window_pages is keep"),
            (self.tp > 1, "ranks divide one page group"),
            (
                self.role == "prefill" or self.has_store or not self._never_fills,
                "this worker may exchange pages with others",
            ),
            (self.host_cache_bytes > 0 or self.disk_cache_dir is not None, "there are tiers"),
            (self.drafter != "none", "tokens are drafted"),
        )
        return next((text for is_so, text in reasons if is_so), "")

    @property
    def _never_fills(self) -> bool:
        """Whether no other worker is asked for pages."""
        return (self.local_prefill_max_tokens or 0) >= NEVER_SHIP_TOKENS

    @property
    def ships_pages(self) -> bool:
        """Whether this engine may exchange pages with other workers."""
        is_alone = self.role == "decode" and self.transport == "data" and not self.has_store
        return not (is_alone and self._never_fills)
