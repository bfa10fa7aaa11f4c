"""Engine settings: resolved values, checked together before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weft.checkpoint.eagle3_config import NUM_AUX_LAYERS
from weft.checkpoint.quantization import ASKED_HELP, AskedFormat
from weft.contract.binding import Binding
from weft.contract.errors import ConfigError
from weft.contract.settings import (
    MAX_CONTEXT_TOKENS,
    RoleName,
    TransportName,
    setting,
    settings_of,
)
from weft.pages.config import PageConfig
from weft.pages.memory.eviction import EvictionName

if TYPE_CHECKING:
    from weft.checkpoint.config import ModelConfig

Role = RoleName
TaskName = Literal["auto", "generate", "embed", "classify", "score"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
KvDtypeName = Literal["auto", "fp8_e4m3", "int8"]
DrafterName = Literal["none", "ngram", "mtp", "eagle", "eagle3", "model"]
DraftGateName = Literal["measured", "fixed"]
PolicyName = Literal["fcfs", "longest_prefix", "shortest_remaining", "priority", "fair"]
"""Admission policies (`weft.engine.scheduler.policies`)."""
MAX_GROUP_NAME = 64
"""Most bytes of the name of workers that share experts."""
HEAD_DRAFTERS = ("mtp", "eagle", "eagle3")
"""Drafters that use a draft head. mtp uses that of the checkpoint; eagle (EAGLE-1 and EAGLE-2) and
eagle3 use that in `draft_dir`.
"""
_NEED_NO_DIR = ("none", "ngram", "mtp")

MAX_TREE_NODES = 31
"""Most drafts in the draft tree of one request in one step."""
MAX_TREE_REQUESTS = 4
"""Most requests in a step that verifies trees. In larger steps, extra rows are no longer cheap."""
MAX_DECODES_BESIDE = 64
"""Rows of running requests that a step takes in addition to `max_step_tokens` on a GPU. This many
rows hardly slow a large step down.
"""
NEVER_SHIP_TOKENS = 1 << 40
"""Value of `local_prefill_max_tokens` with which every prompt is prefilled locally."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(PageConfig):
    """One engine's settings. Services declare theirs from these fields and build this from them;
    libraries use it as is.
    """

    model_dir: Path
    model_name: str = "model"
    role: Role = "decode"
    """decode: it owns requests; prefill: it fills pages for workers that do; both."""
    worker_id: str = setting(
        "id that stays the same over restarts, and that no other worker has; empty = role, host "
        "name and port",
        "worker-0",
    )
    task: TaskName = setting(
        "what the model serves: text, embeddings, classes, or scores by the logits of yes and no; "
        "auto = what its files are for",
        "auto",
    )
    dtype: DtypeName = setting(
        "number format of weights and KV; auto = what the machine computes fast",
        "auto",
    )
    quantization: AskedFormat = setting(ASKED_HELP, "auto")
    trust_remote_code: bool = setting(
        "run the modelling code that a model's directory brings, if neither Weft nor transformers "
        "has its architecture: it may do whatever this worker may",
        False,
    )
    kv_dtype: KvDtypeName = setting(
        "number format of K and V in pages; auto = that of the activations; fp8_e4m3 and int8 = 8 "
        "bits and a scale for each vector",
        "auto",
    )
    device: str = setting(
        "torch device; auto = a GPU where one is usable, else the CPU; with tp, that of the first "
        "rank, which the others follow, or one a rank, separated by commas",
        "cpu",
    )
    tp: int = setting(
        "ranks of the engine, processes that share the weights, the KV pool and the work of each "
        "step: tensor parallelism",
        1,
        ge=1,
        le=64,
    )
    pp: int = setting(
        "stages of the engine, processes that each hold consecutive layers with their weights and "
        "KV, and hand the rows of each step on: pipeline parallelism; on GPUs of one host at most "
        "2",
        1,
        ge=1,
        le=64,
    )
    cp: int = setting(
        "ranks of the engine, processes that each hold all weights and divide the tokens of long "
        "prompts: context parallelism, for prefill workers",
        1,
        ge=1,
        le=64,
    )
    cp_least_tokens: int | None = setting(
        "with cp: tokens of the shortest chunk of a prompt that the ranks divide, at least 32 a "
        "rank; none = from where on dividing was faster when both were timed at the start",
        None,
        ge=64,
    )
    dcp: int = setting(
        "ranks among which the pages of a KV head are divided that tp would give each of them: "
        "decode context parallelism, for latents and models with fewer KV heads than ranks",
        1,
        ge=1,
        le=64,
    )
    hosts: int = setting(
        "hosts of the engine, with one stage and its tp ranks on each: as many as pp",
        1,
        ge=1,
        le=64,
    )
    host_rank: int = setting(
        "number of this host, from 0; host 0 serves requests, and the others follow its steps",
        0,
        ge=0,
        le=63,
    )
    rendezvous: str = setting(
        "with hosts: host:port at which host 0 listens and the others reach it",
        "",
    )
    tls_cert: Path | None = None
    """Certificate with which hosts know one another; None: the mesh has no TLS."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    ep: int = setting(
        "ranks among which the experts of mixtures are divided whole, expert parallelism: 1, each "
        "rank has a part of every expert, or as many as tp",
        1,
        ge=1,
        le=64,
    )
    attention_dp: int = setting(
        "workers that share the experts of one model, with whole experts on each, and nothing "
        "else: each has requests and KV of its own, and all enter steps together (data-parallel "
        "attention); they start, drain and end together",
        1,
        ge=1,
        le=64,
    )
    attention_dp_rank: int = setting(
        "with attention_dp: number of this worker among those, from 0",
        0,
        ge=0,
        le=63,
    )
    attention_dp_group: str = setting(
        "with attention_dp: name by which those workers, all of one host, find one another",
        "",
    )
    redundant_experts: int = setting(
        "further experts of each layer that each rank has memory for, with ep: balance_experts "
        "copies there what most tokens choose",
        0,
        ge=0,
        le=1024,
    )
    balance_experts: Literal["off", "order", "auto"] = setting(
        "with ep: whether experts get other ranks by what was counted of them, when told to or "
        "also by itself (docs/parallel.md)",
        "off",
    )
    balance_interval_s: float = setting(
        "with balance_experts = auto: time between two looks at what was counted, in seconds",
        60.0,
        gt=0,
        le=86400,
    )
    balance_above: float = setting(
        "with balance_experts = auto: work of the most loaded rank over the mean of all, from "
        "which on experts get other ranks",
        1.1,
        ge=1,
        le=64,
    )
    count_experts: bool = setting(
        "on a GPU: lets steps keep the experts of their rows, so that they can be counted, as a "
        "CPU always does; balance_experts implies it",
        False,
    )
    numa_bind: bool | None = setting(
        "bind each rank, before it begins, to the cores and the memory of its GPU's NUMA node; "
        "none = on GPUs of hosts that have several nodes",
        None,
    )
    numa_bind_nodes: str = setting(
        "NUMA nodes to bind to instead: one, or one a rank, separated by commas; on a CPU these or "
        "numa_bind_cpus are needed",
        "",
    )
    numa_bind_cpus: str = setting(
        "cores to bind to instead of all of the node's, as 0-55,112-167: one list, or one a rank, "
        "separated by |",
        "",
    )
    nics: str = setting(
        "network devices that NIXL uses, as mlx5_0 or eth0, separated by commas: one list, or one "
        "a rank, separated by |; auto = the active RDMA port that is nearest to the rank's GPU, "
        "and all interfaces; all = UCX chooses; UCX_NET_DEVICES, if set, has precedence",
        "auto",
    )
    weights_offer: str = ""
    """A `WeightOffer` in JSON: the packed weights of a worker, to be copied; empty: the weights are
    read from files.
    """
    bindings: tuple[Binding, ...] = ()
    """What each rank's process is bound to; empty: nothing."""
    rank_timeout_s: float = setting(
        "time that a rank waits for another one in a step before the worker ends, in seconds",
        10.0,
        gt=0,
        le=3600,
    )
    check_ranks: bool = setting(
        "compare hashes of the ranks' sums, each at the next sum, on CPUs, and end the worker if "
        "they differ",
        False,
    )
    page_size: int = setting("tokens per KV page", 16, ge=1, le=256)
    sleep_host_bytes: int | None = setting(
        "on a GPU: lets weights sleep (docs/architecture/weights.md), and the KV pool of a worker "
        "that ships no pages; so many bytes of the host's memory are reserved for them at the "
        "start, the rest when they first sleep; none = they do not sleep",
        None,
        ge=0,
    )
    sleep_dir: str = setting(
        "on a CPU: folder for the weights of a worker that sleeps, on a disk rather than in "
        "memory; default the system's for such files",
        "",
    )
    kv_memory_bytes: int | None = setting(
        "size of the KV pool, in bytes; default 1 GiB, on a GPU all that remains",
        None,
        ge=1 << 16,
    )
    device_memory_share: float = setting(
        "largest share of a GPU's memory that a KV pool of default size may leave this worker "
        "with, for several workers on one GPU",
        1.0,
        gt=0,
        le=1,
    )
    num_pages: int | None = setting(
        "size of the KV pool in pages, instead of kv_memory_bytes",
        None,
        ge=4,
    )
    enable_return_routed_experts: bool = setting(
        "keep the numbers of each token's experts in its KV pages, for requests that ask for them "
        "(docs/dialects.md); workers that exchange pages have the same setting",
        False,
    )
    window_pages: Literal["auto", "free", "keep"] = setting(
        "KV pages of layers with a sliding window: auto frees them behind the window where this "
        "worker exchanges no pages; free does so where it exchanges pages with a KV store or "
        "workers that have the same setting; keep keeps all",
        "auto",
    )
    checkpoint_tokens: int = setting(
        "models with recurrent layers: tokens from one state that the prefix cache keeps of a "
        "prompt to the next",
        1024,
        ge=1,
    )
    max_context_tokens: int | None = setting(MAX_CONTEXT_TOKENS, None)
    max_running_requests: int = setting(
        "requests in one step; default 64, on a GPU 256",
        64,
        ge=1,
        le=4096,
    )
    max_waiting_requests: int = setting("requests queued in addition to those", 1024, ge=1)
    max_queued_fill_tokens: int = setting(
        "queued prompt tokens beyond which a prefill worker declines more: the decode worker asks "
        "another one or computes them itself",
        262_144,
        ge=0,
    )
    max_tokens_in_flight: int | None = setting(
        "prompt tokens that a prefill worker admits at a time, until their pages have left; later "
        "prompts wait in the order of scheduling_policy; default as many as the pool holds",
        None,
        ge=1,
    )
    max_step_tokens: int = setting(
        "new tokens in one step; default 512, on a GPU 8192 (plus the tokens of up to 64 running "
        "requests)",
        512,
        ge=16,
    )
    prefill_chunk_tokens: int = setting(
        "largest chunk of one prompt in a step, in tokens; default 256, on a GPU 4096",
        256,
        ge=1,
    )
    shared_step_tokens: int | None = setting(
        "prompt tokens of a step up to which further prompts join the first one; default as many "
        "as fit, on a GPU prefill worker 2048: a prompt does not wait for those behind it",
        None,
        ge=1,
    )
    last_piece_tokens: int | None = setting(
        "tokens that a prefill worker leaves for the last step of a long prompt while no other "
        "prompt waits, since that step's pages are shipped when all is computed; 0 = as few steps "
        "as possible; default 0, from a GPU through host memory 512",
        None,
        ge=0,
    )
    inter_token_target_s: float = setting(
        "time that prompts may add to a step that also decodes, in seconds; prompt chunks are "
        "sized to it, unless first tokens that wait count for more",
        0.1,
        gt=0,
    )
    fillers_on_host: bool = setting(
        "prefill workers run on this worker's host: on a CPU, steps of running requests leave them "
        "inter_token_target_s between two while they fill prompts",
        False,
    )
    first_token_weight: float = setting(
        "worth of a second of delay of a first token, in seconds of delay of next tokens; 0 = "
        "prompts always keep to inter_token_target_s, and ship while requests run",
        1.0,
        ge=0,
        le=1e6,
    )
    step_lead_s: float = setting(
        "on a GPU worker that exchanges pages: time before the expected end of a step of running "
        "requests at which the next one begins, in seconds; what comes until then takes part in "
        "it",
        0.002,
        ge=0,
    )
    stream_interval_s: float | None = setting(
        "time for which next tokens gather before gateways get them in one message, in seconds: "
        "each message takes processor time from workers that share its cores; first tokens and "
        "ends do not wait; 0 = the tokens of each step at once; none = 0 on a GPU, and on a CPU "
        "with 8 and more running samples the time in which the engine takes 3 ms of processor "
        "time for each of them",
        0.0,
        ge=0,
        le=1,
    )
    scheduling_policy: PolicyName = setting(
        "order of admission: first come first served, longest cached prefix, shortest_remaining "
        "(fewest prompt tokens to compute), most urgent priority, or fair (the tenant that was "
        "served the fewest tokens)",
        "fcfs",
    )
    ageing_s: float = setting(
        "waiting time that counts as one level of priority or makes up for one full step of "
        "prompt tokens, and after which a longer prefix does not overtake, in seconds",
        30.0,
        gt=0,
        le=1e6,
    )
    preemption_threshold: int | None = setting(
        "with scheduling_policy = priority: levels by which a request must be more urgent to "
        "preempt a running one; none = never",
        10,
        ge=1,
        le=2_000_000,
    )
    max_fill_fraction: float = setting(
        "share of the KV pool that remote fills may reserve",
        0.3,
        gt=0,
        le=1,
    )
    local_prefill_max_tokens: int | None = setting(
        "prompt remainders of at most this many tokens are prefilled by the decode worker, longer "
        "ones by prefill workers; 0 = ship whenever there is a full page; none = by measured cost",
        None,
        ge=0,
    )
    has_store: bool = False
    """Whether the engine looks prompts up in a KV store and puts computed pages there."""
    lease_s: float = setting("duration of a fill's lease, in seconds", 10.0, gt=0, le=3600)
    renew_interval_s: float = setting("interval between lease renewals, in seconds", 3.0, gt=0)
    fill_progress_timeout_s: float = setting(
        "time without progress after which a fill is given to another filler, in seconds",
        5.0,
        gt=0,
    )
    transport: TransportName = "auto"
    staging_bytes: int | None = setting(
        "memory that pages pass through on their way from and to a KV pool on a GPU, in bytes; "
        "default 2 GiB in the host's memory, in the GPU's own a sixteenth of it and at most 4 "
        "GiB; no more than the pool if its size is given",
        None,
        ge=1 << 12,
    )
    staging_memory: Literal["auto", "host", "device"] = setting(
        "kind of that memory: `device` = the GPU's own, which workers on it and on other GPUs of "
        "the host reach; auto = device where NIXL works, another GPU of the host can reach it or "
        "device_memory_share is below 1, and no KV store is there",
        "auto",
    )
    force_staging: bool = setting(
        "stage the pages of a KV pool on a CPU too (tests; slower)",
        False,
    )
    page_digests: bool = setting(
        "check pages that arrive against digests of their sender; off: corruption in transit goes "
        "unnoticed",
        True,
    )
    num_threads: int | None = setting("compute threads; default all cores", None, ge=1, le=1024)
    prefix_cache: bool = setting("reuse KV of earlier prompts", True)
    kv_eviction_policy: EvictionName = setting(
        "order of evicting cached KV pages: least recently, least frequently or most recently "
        "used, first in, last in (filo), of least urgent requests, or slru: those never found "
        "again before the others",
        "lru",
    )
    session_pool_share: float = setting(
        "share of the KV pool that chat sessions may pin, to be evicted last; 0 = sessions pin "
        "nothing",
        0.25,
        ge=0,
        le=1,
    )
    session_tenant_share: float = setting(
        "share of that for the sessions of one tenant",
        1.0,
        gt=0,
        le=1,
    )
    session_ttl_s: float = setting(
        "time without a finished request after which a session loses its pins, in seconds",
        600.0,
        gt=0,
        le=7 * 86_400,
    )
    host_cache_bytes: int = setting(
        "host memory for KV pages evicted from the pool, in bytes; 0 = none",
        0,
        ge=0,
    )
    write_through_threshold: int = setting(
        "number of requests that must find a KV page before it is copied to host memory, disk and "
        "KV store; 0 = when it is computed; evicted pages go to host memory in any case",
        0,
        ge=0,
    )
    load_back_threshold: int | None = setting(
        "number of tokens from which pages are loaded from tiers or the KV store; none = where "
        "measured to be faster than computing them",
        None,
        ge=0,
    )
    load_by_layer: Literal["auto", "always", "never"] = setting(
        "begin to compute a prompt while its pages still come from host memory or disk, layer by "
        "layer; auto = where nothing else runs and it is measured to pay; always = where nothing "
        "else runs, and on CPUs also from a KV store",
        "auto",
    )
    language_model_only: bool = setting(
        "leave the image tower of the model's checkpoint out: a decode worker then takes images "
        "only where prefill workers compute them (not Gemma 3 with window_pages = free)",
        False,
    )
    media_bytes: int = setting(
        "host memory for images of prompts, in bytes, for models that take some; those of "
        "unfinished requests are never dropped",
        256 << 20,
        ge=1 << 20,
    )
    media_rows: int = setting(
        "rows of images on the device at once, each as long as the model's hidden state, or some "
        "times that (DeepStack): an image takes as many as it has tokens; one with more is refused",
        16384,
        ge=64,
        le=1 << 20,
    )
    max_step_patches: int = setting(
        "patches of images that are encoded before a step that also decodes; a single image may "
        "have more",
        4096,
        ge=1,
    )
    enable_lora: bool = False
    """Whether to serve LoRA adapters, whose memory is allocated at the start."""
    max_lora_rank: int = setting("largest rank of an adapter", 64, ge=1, le=512)
    max_loras: int = setting(
        "adapters on the device at once, and so in one step",
        16,
        ge=1,
        le=1024,
    )
    lora_memory_bytes: int | None = setting(
        "device memory of adapters, in bytes; default = enough for max_loras adapters of rank 16 "
        "that change every projection",
        None,
        ge=1,
    )
    lora_projections: tuple[str, ...] = setting(
        "projections that adapters may change, which share that memory, separated by commas: q, "
        "k, v, o, gate, up, down; embed_tokens, lm_head; router; experts, or shared_experts where "
        "all of them share A of gate and up and B of down; default = the first seven, as far as "
        "the model has them, and what adapters need that are registered or in expected_adapters, "
        "with their rank, whole matrices and added tokens",
        (),
    )
    lora_host_bytes: int = setting(
        "host memory of adapters, in bytes; others are read from disk again",
        4 << 30,
        ge=1,
    )
    lora_whole_matrices: int = setting(
        "adapters on the device at once that bring a whole embedding or LM head "
        "(modules_to_save), where lora_projections names these; 0 = such adapters are refused",
        0,
        ge=0,
        le=64,
    )
    lora_added_tokens: int = setting(
        "most tokens that an adapter may add to the model's vocabulary, where lora_projections "
        "names embed_tokens and lm_head; 0 = such adapters are refused",
        0,
        ge=0,
        le=4096,
    )
    draft_dir: Path | None = setting(
        "folder of an EAGLE head for the model, whose KV lies in the model's pages, so that all "
        "workers that exchange pages must have the same; with drafter = model, of a whole draft "
        "model, needed by decode workers only; none = neither",
        None,
    )
    mtp_head: bool = setting(
        "load the MTP head that the model's checkpoint brings, whose KV lies in the model's "
        "pages, so that all workers that exchange pages must load it; drafter = mtp includes this",
        False,
    )
    drafter: DrafterName = setting(
        "source of draft tokens that the model verifies, several in one step, where that is "
        "measured to pay: mtp (the head that the model's checkpoint brings), eagle3 or eagle (the "
        "head in draft_dir, of that kind), model (a smaller model of the same vocabulary there), "
        "or ngram, which searches the request's text",
        "none",
    )
    max_draft_tokens: int = setting(
        "most drafts of a request in one step that form a chain",
        5,
        ge=1,
        le=32,
    )
    draft_width: int = setting(
        "with eagle3, drafts may form trees with this many children per node and up to 31 drafts "
        "of a request in one step, where that is measured to pay; 1 = chains only",
        1,
        ge=1,
        le=6,
    )
    draft_gate: DraftGateName = setting(
        "measured: the number of drafts that yields the most tokens a second; fixed: always the "
        "most, whether or not they pay",
        "measured",
    )
    poison_free_pages: bool = setting(
        "fill free KV pages with NaN, so that wrong reads are noticed (slow)",
        False,
    )
    deterministic: bool = setting(
        "give a request the same bits alone, in any batch and in any chunks, or refuse to start",
        False,
    )
    constraint_compile_s: float = setting(
        "time limit for compiling one output constraint, in seconds",
        10.0,
        gt=0,
        le=600,
    )
    constraint_cache: int = setting(
        "most compiled output constraints that are kept",
        256,
        ge=1,
        le=65_536,
    )
    overlap: Literal["auto", "on", "off"] = setting(
        "plan and start a step while the device still runs the previous one; auto = on for GPUs, "
        "since a CPU gains nothing",
        "auto",
    )
    cuda_graphs: bool = setting(
        "capture steps on a GPU as CUDA graphs at start; off: less memory and a faster start, "
        "much slower steps",
        True,
    )
    enable_faults: bool = False
    dummy_weights: bool = setting("random weights, for benchmarks", False)

    def __post_init__(self) -> None:
        values = ((name, getattr(self, name), setting) for name, setting in SETTINGS.items())
        wrong = [
            f"{name} = {value}: must be {setting.bounds}"
            for name, value, setting in values
            if setting.bounds and value is not None and not setting.allows(value)
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
        """Constraints between fields: name, whether the constraint holds, and the constraint in
        words.
        """
        chains = self.draft_width == 1
        return [
            *self._relations_of_ranks(),
            *self._relations_of_bindings(),
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
            (
                "prefix_cache",
                self.prefix_cache or not self.has_tiers,
                "on with host_cache_bytes or disk_cache_dir, whose tiers it fills",
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
        devices = len(self.device.split(","))
        of_all = [
            ("hosts", self.hosts in (1, self.pp), f"1, or as many as pp = {self.pp}"),
            ("host_rank", self.host_rank < self.hosts, f"below hosts = {self.hosts}"),
            ("ep", self.ep in (1, self.tp), f"1 or tp = {self.tp}"),
            (
                "device",
                devices in (1, self.ranks_of_host),
                f"one device, or one for each of {self.ranks_of_host} ranks",
            ),
        ]
        if self.attention_dp > 1:
            of_all += self._relations_of_attention_dp()
        if self.balance_experts != "off" or self.redundant_experts:
            of_all += self._relations_of_balance()
        if self.pp > 1:
            of_all += self._relations_of_stages()
        if self.cp > 1:
            of_all += self._relations_of_context()
        if self.dcp > 1:
            of_all += self._relations_of_divided_pages()
        if self.tp == 1:
            return [*of_all, ("check_ranks", not self.check_ranks, "off with tp = 1")]
        return [
            *of_all,
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

    def _relations_of_attention_dp(self) -> list[tuple[str, bool, str]]:
        name = self.attention_dp_group
        return [
            (
                "attention_dp",
                not self.is_on_gpu or self.attention_dp == 2,
                "1 or 2 on GPUs, where more have not run yet",
            ),
            (
                "attention_dp",
                self.num_ranks == 1,
                "1 with tp, pp or cp: each worker is one process",
            ),
            (
                "attention_dp_rank",
                self.attention_dp_rank < self.attention_dp,
                f"below attention_dp = {self.attention_dp}",
            ),
            (
                "attention_dp_group",
                0 < len(name.encode()) <= MAX_GROUP_NAME and name.isprintable(),
                f"1 to {MAX_GROUP_NAME} printable bytes, the same for all workers that share "
                "experts",
            ),
            ("attention_dp", self.task in ("auto", "generate"), f"1 with task = {self.task}"),
            (
                "drafter",
                self.drafter in ("none", "ngram") and not self.has_head,
                "none or ngram with attention_dp: draft heads and models do not take part in "
                "steps of other workers",
            ),
            (
                "deterministic",
                not self.deterministic,
                "off with attention_dp, under which experts are summed up in another order",
            ),
            (
                "sleep_host_bytes",
                self.sleep_host_bytes is None,
                "unset with attention_dp: other workers compute with this one's experts",
            ),
        ]

    def _relations_of_balance(self) -> list[tuple[str, bool, str]]:
        is_alone = self.pp == self.cp == self.hosts == 1
        return [
            (
                "redundant_experts",
                not self.redundant_experts or self.moves_experts,
                "0 with balance_experts = off: nobody would use them",
            ),
            ("balance_experts", self.ep > 1, "off with ep = 1: experts are divided among no ranks"),
            ("balance_experts", is_alone, "off with pp, cp or hosts"),
            (
                "balance_experts",
                not self.deterministic,
                "off with deterministic: sums would depend on where experts are",
            ),
            (
                "balance_experts",
                not self.enable_lora,
                "off with enable_lora: adapters' rows stay with the experts of the start",
            ),
            (
                "balance_experts",
                self.sleep_host_bytes is None,
                "off with sleep_host_bytes, whose memory is not moved yet",
            ),
        ]

    @property
    def moves_experts(self) -> bool:
        """Whether experts may get other ranks."""
        return self.balance_experts != "off"

    @property
    def counts_experts(self) -> bool:
        """Whether the experts of rows can be counted, if the model has some."""
        is_here = self.pp == self.cp == 1
        return is_here and (self.count_experts or self.moves_experts or not self.is_on_gpu)

    def _relations_of_stages(self) -> list[tuple[str, bool, str]]:
        is_divided = self.hosts > 1
        return [
            *(self._relations_of_gpu_stages() if self.is_on_gpu else []),
            ("pp", self.task in ("auto", "generate"), f"1 with task = {self.task}"),
            (
                "pp",
                self.tp == 1 or self.is_on_gpu or not self.has_head,
                "1 on a CPU with tp and a draft head, which drafts while ranks compute other steps",
            ),
            ("pp", self.draft_width == 1, "1 with draft_width > 1: stages draft chains alone"),
            ("pp", self.drafter != "model", "1 with drafter = model, which has no stages"),
            (
                "pp",
                not (self.enable_lora and self.lora_whole_matrices),
                "1 with lora_whole_matrices, which are not sent to other stages",
            ),
            (
                "rendezvous",
                not is_divided or ":" in self.rendezvous,
                f"host:port of host 0, with hosts = {self.hosts}",
            ),
        ]

    def _relations_of_gpu_stages(self) -> list[tuple[str, bool, str]]:
        is_divided = self.hosts > 1
        return [
            ("pp", self.pp == 2 or is_divided, "1 or 2 on GPUs of one host"),
            ("dcp", self.dcp == 1, "1 on GPUs with pp"),
            (
                "hosts",
                not (is_divided and self.tp > 1 and self.enable_lora),
                "1 on GPUs with tp and adapters",
            ),
            (
                "staging_memory",
                not is_divided or self.staging_memory != "device",
                "auto or host with hosts, whose pages pass the memory of host 0",
            ),
        ]

    @property
    def has_pages_by_stage(self) -> bool:
        """Whether each stage has pages for its own layers; else all stages share whole pages."""
        return self.hosts > 1 or (self.pp > 1 and self.is_on_gpu)

    @property
    def most_sent_rows(self) -> int:
        """Most rows that a stage sends on in a step: of the stream, and of the layers' states that
        an EAGLE-3 head reads.
        """
        rows = self.max_step_tokens + self.decodes_beside
        return rows * (1 if self.head_dir is None else 1 + NUM_AUX_LAYERS)

    def _relations_of_context(self) -> list[tuple[str, bool, str]]:
        return [
            ("cp", self.tp == self.pp == 1, "1 with tp or pp"),
            (
                "cp_least_tokens",
                self.cp_least_tokens is None or self.cp_least_tokens >= 32 * self.cp,
                f">= {32 * self.cp}, 32 for each rank",
            ),
            ("cp", self.task in ("auto", "generate"), f"1 with task = {self.task}"),
            (
                "cp",
                not (self.enable_return_routed_experts and self.is_on_gpu),
                "1 on GPUs with enable_return_routed_experts",
            ),
            ("cp", self.drafter == "none" and not self.has_head, "1 with drafts"),
            (
                "cp",
                not (self.enable_lora and self.lora_whole_matrices),
                "1 with lora_whole_matrices, which are not sent to other ranks",
            ),
        ]

    def _relations_of_divided_pages(self) -> list[tuple[str, bool, str]]:
        return [
            ("dcp", self.tp % self.dcp == 0, f"a divisor of tp = {self.tp}"),
            ("dcp", self.hosts == 1, f"1 with hosts = {self.hosts}"),
            ("dcp", self.drafter in ("none", "ngram") and not self.has_head, "1 with draft heads"),
            (
                "dcp",
                not self.deterministic,
                "1 with deterministic: sums depend on which pages a prompt gets",
            ),
        ]

    @property
    def num_ranks(self) -> int:
        """Processes that run the steps."""
        return self.tp * self.pp * self.cp

    @property
    def ranks_of_host(self) -> int:
        return self.num_ranks // self.hosts

    def _relations_of_bindings(self) -> list[tuple[str, bool, str]]:
        nodes, cores, nics = self.numa_bind_nodes, self.numa_bind_cpus, self.nics
        is_named = bool(nodes or cores)
        divided = " x ".join(
            f"{name} = {size}"
            for name, size in (("tp", self.tp), ("pp", self.pp), ("cp", self.cp))
            if size > 1 or name == "tp"
        )
        lists = {
            "numa_bind_nodes": nodes.split(","),
            "numa_bind_cpus": cores.split("|"),
            "nics": nics.split("|"),
        }
        return [
            ("numa_bind", self.numa_bind is not False or not is_named, "on, to bind to what"),
            (
                "numa_bind",
                not self.numa_bind or self.is_on_gpu or is_named,
                "with numa_bind_nodes or numa_bind_cpus on a CPU",
            ),
            *(
                (
                    name,
                    len(parts) in (1, self.num_ranks),
                    f"for all ranks, or for each of {divided}",
                )
                for name, parts in lists.items()
            ),
        ]

    def device_of_rank(self, rank: int) -> str:
        """A rank's entry in its host's list of devices; of a single GPU, the one that is as many
        places after it.
        """
        devices, rank = self.device.split(","), rank % self.ranks_of_host
        if len(devices) > 1:
            return devices[rank].strip()
        kind, _, index = self.device.partition(":")
        if kind == "cpu" or self.tp == 1:
            return self.device
        return f"{kind}:{int(index or 0) + rank}"

    def has_tower(self, model: ModelConfig) -> bool:
        """Whether the engine loads the tower of its model."""
        is_left_out = self.language_model_only and not model.attends_to_clips
        return model.tower is not None and not is_left_out

    def takes_media(self, model: ModelConfig) -> bool:
        """Whether prompts may have media: an owner without a tower takes those whose media prefill
        workers encode.
        """
        is_filled = self.role == "decode" and self.ships_pages and model.tower is not None
        return is_filled or self.has_tower(model)

    def rotates_by_axes(self, model: ModelConfig) -> bool:
        """Whether requests may rotate elsewhere than at their tokens' positions."""
        vision = model.vision
        return vision is not None and vision.axes is not None and self.takes_media(model)

    @property
    def reads_mtp(self) -> bool:
        return self.mtp_head or self.drafter == "mtp"

    @property
    def head_dir(self) -> Path | None:
        """Directory of the EAGLE head; None: there is none."""
        return None if self.drafter == "model" else self.draft_dir

    @property
    def has_head(self) -> bool:
        return self.reads_mtp or self.head_dir is not None

    @property
    def most_drafts(self) -> int:
        """Most drafts of one request in a step, as a chain."""
        return 0 if self.drafter == "none" else self.max_draft_tokens

    @property
    def _tree_rows(self) -> int:
        return (1 + MAX_TREE_NODES) * min(MAX_TREE_REQUESTS, self.max_running_requests)

    @property
    def is_on_gpu(self) -> bool:
        return self.device.partition(":")[0] == "cuda"

    @property
    def is_overlapped(self) -> bool:
        """Whether a step starts before the previous one is committed."""
        return self.overlap == "on" or (self.overlap == "auto" and self.is_on_gpu)

    @property
    def decodes_beside(self) -> int:
        """Rows of running requests that a step takes in addition to `max_step_tokens`. Only on a
        GPU: a separate step for the last few tokens of prompts would take nearly as long as a step
        of some hundred tokens.
        """
        return min(MAX_DECODES_BESIDE, self.max_running_requests) if self.is_on_gpu else 0

    @property
    def keeps_windows(self) -> str:
        """Why the engine keeps pages that sliding windows have passed; empty: it frees them."""
        reasons = (
            (self.window_pages == "keep", "window_pages is keep"),
            (
                self.num_ranks > 1 and (self.is_on_gpu or self.num_ranks > self.tp or self.dcp > 1),
                "of several processes only tp's on CPUs free them",
            ),
            (
                self.window_pages == "auto"
                and (self.fills_others or self.has_store or not self.never_fills),
                "this worker may exchange pages with others; with window_pages = free on all of "
                "them it may free its own",
            ),
            (self.draft_width > 1, "drafts form trees"),
        )
        return next((text for is_so, text in reasons if is_so), "")

    @property
    def fills_others(self) -> bool:
        return self.role != "decode"

    @property
    def owns_requests(self) -> bool:
        return self.role != "prefill"

    @property
    def never_fills(self) -> bool:
        return (self.local_prefill_max_tokens or 0) >= NEVER_SHIP_TOKENS

    @property
    def has_tiers(self) -> bool:
        return bool(self.host_cache_bytes) or self.disk_cache_dir is not None

    @property
    def loads_by_layer(self) -> bool:
        """Whether pages of tiers, or of a KV store, may come layer by layer."""
        if self.load_by_layer == "never":
            return False
        return self.has_tiers or self.reads_stores_by_layer

    @property
    def reads_stores_by_layer(self) -> bool:
        """Whether pages of KV stores are read layer by layer, if NIXL is there. Workers on GPUs
        copy layers from memory of their host only, so they get a store's pages whole.
        """
        return self.has_store and self.load_by_layer == "always" and not self.is_on_gpu

    @property
    def moves_pages(self) -> bool:
        """Whether pages leave the pool or come into it: from other workers, a store or tiers."""
        return self.ships_pages or self.has_tiers

    @property
    def takes_pages(self) -> bool:
        """Whether pages come into the pool from elsewhere."""
        return self.has_tiers or self.has_store or (self.owns_requests and self.ships_pages)

    @property
    def ships_pages(self) -> bool:
        """Whether this engine may exchange pages with other workers."""
        is_alone = self.role == "decode" and self.transport == "data" and not self.has_store
        return not (is_alone and self.never_fills)


SETTINGS = settings_of(EngineConfig)
"""Settings that users of services have too; services declare theirs from these."""
