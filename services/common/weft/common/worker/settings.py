"""Settings shared by prefill and decode workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field
from weft.checkpoint.quantization import ASKED_HELP, AskedFormat
from weft.common.settings import PageSettings
from weft.engine.base.config import BOUNDS, EngineConfig, EvictionName, PolicyName, Role
from weft.engine.base.gpus import resolve_device

_CPU_SIZES = {"max_running_requests": 64, "max_step_tokens": 512, "prefill_chunk_tokens": 256}
_GPU_SIZES = {"max_running_requests": 256, "max_step_tokens": 8192, "prefill_chunk_tokens": 4096}
"""Default step sizes on a GPU, which keep the device busy."""
_GPU_SHARED_TOKENS = 2048
"""Default of `shared_step_tokens` on a GPU: enough prompt tokens to keep it busy."""


def engine_field(name: str, default: Any, description: str) -> Any:
    """A setting with the name and bounds of the engine's."""
    bound = BOUNDS[name]
    return Field(default, ge=bound.ge, gt=bound.gt, le=bound.le, description=description)


class WorkerSettings(PageSettings):
    """A worker: a gRPC server and its engine process."""

    folders: ClassVar[tuple[str, ...]] = ("adapter_root",)

    worker_id: str = Field(
        "",
        max_length=64,
        description="id that stays the same over restarts, and that no other worker has; empty = "
        "role, host name and port",
    )
    advertise: str = Field(
        "",
        max_length=256,
        description="host:port at which other workers reach this one; empty = the same as for "
        "gateways",
    )
    model_dir: Path = Field(description="Hugging Face model directory")
    model_name: str = Field("", max_length=256, description="served name; empty = directory's name")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="number format of weights and KV; auto = what the machine computes fast",
    )
    task: Literal["auto", "generate", "embed", "classify", "score"] = Field(
        "auto",
        description="what the model serves: text, embeddings, classes, or scores by the logits of "
        "yes and no; auto = what its files are for",
    )
    quantization: AskedFormat = Field("auto", description=ASKED_HELP)
    kv_dtype: Literal["auto", "fp8_e4m3", "int8"] = Field(
        "auto",
        description="number format of K and V in pages; auto = that of the activations; fp8_e4m3 "
        "and int8 = 8 bits and a scale for each vector",
    )
    device: str = Field(
        "auto",
        description="torch device; auto = a GPU where one is usable, else the CPU; with tp, that "
        "of the first rank, which the others follow, or one a rank, separated by commas",
    )
    tp: int = engine_field(
        "tp",
        1,
        "ranks of the engine, processes that share the weights, the KV pool and the work of each "
        "step: tensor parallelism",
    )
    ep: int = engine_field(
        "ep",
        1,
        "ranks among which the experts of mixtures are divided whole, expert parallelism: 1, each "
        "rank has a part of every expert, or as many as tp",
    )
    rank_timeout_s: float = engine_field(
        "rank_timeout_s",
        10.0,
        "time that a rank waits for another one in a step before the worker ends, in seconds",
    )
    check_ranks: bool = Field(
        False,
        description="compare hashes of the ranks' sums, each at the next sum, on CPUs, and end the "
        "worker if they differ",
    )
    page_size: int = engine_field(
        "page_size",
        16,
        "tokens per KV page",
    )
    kv_memory_bytes: int | None = engine_field(
        "kv_memory_bytes",
        None,
        "size of the KV pool, in bytes; default 1 GiB, on a GPU all that remains",
    )
    device_memory_share: float = engine_field(
        "device_memory_share",
        1.0,
        "largest share of a GPU's memory that a KV pool of default size may leave this worker "
        "with, for several workers on one GPU",
    )
    num_pages: int | None = engine_field(
        "num_pages", None, "size of the KV pool in pages, instead of kv_memory_bytes"
    )
    window_pages: Literal["auto", "free", "keep"] = Field(
        "auto",
        description="KV pages of layers with a sliding window: auto frees them behind the window "
        "where this worker exchanges no pages; free does so where it exchanges pages with a KV "
        "store or workers that have the same setting; keep keeps all",
    )
    checkpoint_tokens: int = engine_field(
        "checkpoint_tokens",
        1024,
        "models with recurrent layers: tokens from one state that the prefix cache keeps of a "
        "prompt to the next",
    )
    max_context_tokens: int | None = engine_field(
        "max_context_tokens", None, "longest prompt plus output in tokens; default the model's"
    )
    max_running_requests: int | None = engine_field(
        "max_running_requests", None, "requests in one step; default 64, on a GPU 256"
    )
    max_waiting_requests: int = engine_field(
        "max_waiting_requests",
        1024,
        "requests queued in addition to those",
    )
    max_step_tokens: int | None = engine_field(
        "max_step_tokens",
        None,
        "new tokens in one step; default 512, on a GPU 8192 (plus the tokens of up to 64 running "
        "requests)",
    )
    prefill_chunk_tokens: int | None = engine_field(
        "prefill_chunk_tokens",
        None,
        "largest chunk of one prompt in a step, in tokens; default 256, on a GPU 4096",
    )
    shared_step_tokens: int | None = engine_field(
        "shared_step_tokens",
        None,
        "prompt tokens of a step up to which further prompts join the first one; default as many "
        "as fit, on a GPU prefill worker 2048: a prompt does not wait for those behind it",
    )
    last_piece_tokens: int | None = engine_field(
        "last_piece_tokens",
        None,
        "tokens that a prefill worker leaves for the last step of a long prompt while no other "
        "prompt waits, since that step's pages are shipped when all is computed; 0 = as few steps "
        "as possible; default 0, from a GPU through host memory 512",
    )
    max_tokens_in_flight: int | None = engine_field(
        "max_tokens_in_flight",
        None,
        "prompt tokens that a prefill worker admits at a time, until their pages have left; later "
        "prompts wait in the order of scheduling_policy; default as many as the pool holds",
    )
    max_queued_fill_tokens: int = engine_field(
        "max_queued_fill_tokens",
        262_144,
        "queued prompt tokens beyond which a prefill worker declines more: the decode worker asks "
        "another one or computes them itself",
    )
    inter_token_target_s: float = engine_field(
        "inter_token_target_s",
        0.1,
        "time that prompts may add to a step that also decodes, in seconds; prompt chunks are "
        "sized to it, unless first tokens that wait count for more",
    )
    first_token_weight: float = engine_field(
        "first_token_weight",
        1.0,
        "worth of a second of delay of a first token, in seconds of delay of next tokens; 0 = "
        "prompts always keep to inter_token_target_s, and ship while requests run",
    )
    step_lead_s: float = engine_field(
        "step_lead_s",
        0.002,
        "on a GPU worker that exchanges pages: time before the expected end of a step of running "
        "requests at which the next one begins, in seconds; what comes until then takes part in it",
    )
    scheduling_policy: PolicyName = Field(
        "fcfs",
        description="order of admission: first come first served, longest cached prefix, "
        "shortest_remaining (fewest prompt tokens to compute), most urgent priority, or fair (the "
        "tenant that was served the fewest tokens)",
    )
    ageing_s: float = engine_field(
        "ageing_s",
        30.0,
        "waiting time that counts as one level of priority or makes up for one full step of prompt "
        "tokens, and after which a longer prefix does not overtake, in seconds",
    )
    preemption_threshold: int | None = engine_field(
        "preemption_threshold",
        10,
        "with scheduling_policy = priority: levels by which a request must be more urgent to "
        "preempt a running one; none = never",
    )
    overlap: Literal["auto", "on", "off"] = Field(
        "auto",
        description="plan and start a step while the device still runs the previous one; auto = "
        "on for GPUs, since a CPU gains nothing",
    )
    cuda_graphs: bool = Field(
        True,
        description="capture steps on a GPU as CUDA graphs at start; off: less memory and a faster "
        "start, much slower steps",
    )
    num_threads: int | None = engine_field(
        "num_threads", None, "compute threads; default all cores"
    )
    kvstore: str = Field(
        "",
        max_length=4096,
        description="KV store, host:port; several replicas are separated by commas; empty = none",
    )
    lease_s: float = engine_field(
        "lease_s",
        10.0,
        "duration of a fill's lease, in seconds",
    )
    renew_interval_s: float = engine_field(
        "renew_interval_s",
        3.0,
        "interval between lease renewals, in seconds",
    )
    fill_progress_timeout_s: float = engine_field(
        "fill_progress_timeout_s",
        5.0,
        "time without progress after which a fill is given to another filler, in seconds",
    )
    max_quarantine_fraction: float = engine_field(
        "max_quarantine_fraction",
        0.1,
        "share of the KV pool that may be in quarantine; a worker that exceeds it for longer than "
        "a lease lasts drains and exits, to be restarted; 1 = never",
    )
    deterministic: bool = Field(
        False,
        description="give a request the same bits alone, in any batch and in any chunks, or "
        "refuse to start",
    )
    constraint_compile_s: float = engine_field(
        "constraint_compile_s",
        10.0,
        "time limit for compiling one output constraint, in seconds",
    )
    constraint_cache: int = engine_field(
        "constraint_cache",
        256,
        "most compiled output constraints that are kept",
    )
    adapter_root: Path | None = Field(
        None,
        description="folder in which gateways register LoRA adapters; this worker loads those of "
        "its model; none = no adapters",
    )
    max_lora_rank: int = engine_field("max_lora_rank", 64, "largest rank of an adapter")
    max_loras: int = engine_field(
        "max_loras",
        16,
        "adapters on the device at once, and so in one step",
    )
    lora_memory_bytes: int | None = engine_field(
        "lora_memory_bytes",
        None,
        "device memory of adapters, in bytes; default = enough for max_loras adapters of rank 16 "
        "that change every projection",
    )
    lora_projections: str = Field(
        "",
        description="projections that adapters may change, which share that memory, separated by "
        "commas: q, k, v, o, gate, up, down; embed_tokens, lm_head; router; experts, or "
        "shared_experts where all of them share A of gate and up and B of down; "
        "default = the first seven, as far as the model has them",
    )
    lora_host_bytes: int = engine_field(
        "lora_host_bytes",
        4 << 30,
        "host memory of adapters, in bytes; others are read from disk again",
    )
    lora_whole_matrices: int = engine_field(
        "lora_whole_matrices",
        0,
        "adapters on the device at once that bring a whole embedding or LM head (modules_to_save), "
        "where lora_projections names these; 0 = such adapters are refused",
    )
    lora_added_tokens: int = engine_field(
        "lora_added_tokens",
        0,
        "most tokens that an adapter may add to the model's vocabulary, where lora_projections "
        "names embed_tokens and lm_head; 0 = such adapters are refused",
    )
    prefix_cache: bool = Field(True, description="reuse KV of earlier prompts")
    kv_eviction_policy: EvictionName = Field(
        "lru",
        description="order of evicting cached KV pages: least recently, least frequently or most "
        "recently used, first in, last in (filo), of least urgent requests, or slru: "
        "those never found again before the others",
    )
    session_pool_share: float = engine_field(
        "session_pool_share",
        0.25,
        "share of the KV pool that chat sessions may pin, to be evicted last; 0 = sessions pin "
        "nothing",
    )
    session_tenant_share: float = engine_field(
        "session_tenant_share",
        1.0,
        "share of that for the sessions of one tenant",
    )
    session_ttl_s: float = engine_field(
        "session_ttl_s",
        600.0,
        "time without a finished request after which a session loses its pins, in seconds",
    )
    host_cache_bytes: int = engine_field(
        "host_cache_bytes",
        0,
        "host memory for KV pages evicted from the pool, in bytes; 0 = none",
    )
    disk_cache_dir: Path | None = Field(
        None,
        description="folder for KV pages on local disk, which survive restarts; each worker uses "
        "a subfolder named by its id; none = no disk cache",
    )
    disk_cache_bytes: int = engine_field(
        "disk_cache_bytes",
        10 << 30,
        "most KV pages on disk, in bytes",
    )
    write_through_threshold: int = engine_field(
        "write_through_threshold",
        0,
        "number of requests that must find a KV page before it is copied to host memory, disk and "
        "KV store; 0 = when it is computed; evicted pages go to host memory in any case",
    )
    load_back_threshold: int | None = engine_field(
        "load_back_threshold",
        None,
        "number of tokens from which pages are loaded from tiers or the KV store; none = where "
        "measured to be faster than computing them",
    )
    draft_dir: Path | None = Field(
        None,
        description="folder of an EAGLE head for the model, whose KV lies in the model's pages, "
        "so that all workers that exchange pages must have the same; with drafter = "
        "model, of a whole draft model, needed by decode workers only; none = neither",
    )
    mtp_head: bool = Field(
        False,
        description="load the MTP head that the model's checkpoint brings, whose KV lies in the "
        "model's pages, so that all workers that exchange pages must load it; drafter = mtp "
        "includes this",
    )
    poison_free_pages: bool = Field(
        False,
        description="fill free KV pages with NaN, so that wrong reads are noticed (slow)",
    )
    page_digests: bool = Field(
        True,
        description="check pages that arrive against digests of their sender; off: corruption in "
        "transit goes unnoticed",
    )
    staging_bytes: int | None = engine_field(
        "staging_bytes",
        None,
        "memory that pages pass through on their way from and to a KV pool on a GPU, in bytes; "
        "default 2 GiB in the host's memory, in the GPU's own a sixteenth of it and at most 4 GiB; "
        "no more than the pool if its size is given",
    )
    staging_memory: Literal["auto", "host", "device"] = Field(
        "auto",
        description="kind of that memory: `device` = the GPU's own, which workers on it and on "
        "other GPUs of the host reach; auto = device where NIXL works, another GPU of the host can "
        "reach it or device_memory_share is below 1, and no KV store is there",
    )
    force_staging: bool = Field(
        False, description="stage the pages of a KV pool on a CPU too (tests; slower)"
    )
    crash_dir: Path | None = Field(
        None, description="folder for dumps of an engine that stalls or dies; none = no dumps"
    )
    max_crash_dumps: int = Field(
        8,
        ge=1,
        le=1000,
        description="number of dumps kept in that folder, the newest ones",
    )
    crash_dump_tokens: bool = Field(
        False,
        description="include the tokens of open prompts in dumps, so that `weft replay` can send "
        "them again",
    )
    stall_dump_after_s: float | None = Field(
        None,
        gt=0,
        description="time for which an engine's loop must stall to be dumped, in seconds; none = "
        "when it counts as stale",
    )
    dummy_weights: bool = Field(False, description="random weights, for benchmarks")

    def engine_config(self, role: Role, worker_id: str) -> EngineConfig:
        """The engine's settings: the fields of the same names."""
        shared = EngineConfig.__dataclass_fields__.keys() & type(self).model_fields.keys()
        values = {name: getattr(self, name) for name in shared}
        values |= {"role": role, "worker_id": worker_id, "model_name": self.served_name}
        values |= {"has_store": bool(self.kvstore), "transport": self.page_transport}
        values |= {"enable_lora": self.adapter_root is not None}
        values |= {"lora_projections": _names(self.lora_projections)}
        values["device"] = resolve_device(self.device)
        sizes = _GPU_SIZES if values["device"].startswith("cuda") else _CPU_SIZES
        values |= {name: size for name, size in sizes.items() if values[name] is None}
        if role == "prefill" and sizes is _GPU_SIZES and values["shared_step_tokens"] is None:
            values["shared_step_tokens"] = _GPU_SHARED_TOKENS
        return EngineConfig(**values)

    @property
    def kvstores(self) -> list[str]:
        """Addresses of the KV store's replicas."""
        return list(_names(self.kvstore))

    @property
    def served_name(self) -> str:
        """Name of the served model."""
        return self.model_name or self.model_dir.resolve().name


def _names(text: str) -> tuple[str, ...]:
    """Splits a list at commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
