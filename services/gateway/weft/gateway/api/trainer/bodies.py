"""Bodies of trainers' calls, as SGLang has them, and the answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field
from weft.contract.weights import MAX_GROUP_CHARS
from weft.gateway.api.dialect_bodies import DialectBody, StrictPart
from weft.gateway.api.unserved import left_out, refused

T = TypeVar("T")
MAX_TENSORS = 1 << 18
DEFAULT_PACKED_BYTES = 1 << 30
"""vLLM's."""
_NAMES_PAGES = "pages of other weights have other names, so none is found"


class PauseGenerationBody(DialectBody):
    """Body of POST /pause_generation."""

    mode: Literal["abort", "in_place", "retract"] | None = Field(
        None,
        description="requests end (the default), keep their pages, or are computed anew afterwards",
    )


class ContinueGenerationBody(DialectBody):
    """Body of POST /continue_generation."""

    torch_empty_cache: bool | None = left_out("nothing is kept for later use")


class AbortRequestsBody(DialectBody):
    """Body of POST /abort_request."""

    abort_all: Literal[True] = Field(description="all requests of all workers end")
    rid: Any = refused("a request ends when its client closes the connection", "")
    abort_message: Any = left_out("answers say that they were ended")


class UpdateFromDiskBody(DialectBody):
    """Body of POST /update_weights_from_disk."""

    model_path: str = Field(description="folder of safetensors files on each worker's host")
    load_format: str | None = left_out("safetensors files are read", "auto")
    abort_all_requests: bool | None = Field(None, description="end all requests before")
    weight_version: str | None = Field(None, description="name of the new version")
    flush_cache: Any = left_out(_NAMES_PAGES, True)
    is_async: Any = left_out("the files are always read in a thread")
    torch_empty_cache: Any = left_out("nothing is kept for later use")
    keep_pause: bool | None = Field(None, description="stay paused afterwards, if paused by this")
    recapture_cuda_graph: Any = left_out("weights keep their addresses")
    token_step: Any = left_out("give weight_version")


Name = Annotated[str, Field(min_length=1, max_length=MAX_GROUP_CHARS)]
Backend = Literal["nccl", "gloo"]
Tensors = Annotated[list[T], Field(fail_fast=True, max_length=MAX_TENSORS)]
Shape = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(max_length=8)]
Port = Annotated[int, Field(ge=1, lt=1 << 16)]


class InitGroupBody(DialectBody):
    """Body of POST /init_weights_update_group."""

    master_address: Name = Field(description="host of the group's store")
    master_port: Port
    rank_offset: int = Field(description="rank of the mesh's first process")
    world_size: int = Field(description="of the trainer and GET /get_world_size")
    group_name: Name = Field("weight_update_group")
    backend: Backend = Field("nccl", description="gloo for workers on CPUs")


class DestroyGroupBody(DialectBody):
    """Body of POST /destroy_weights_update_group."""

    group_name: Name = Field("weight_update_group")


class BeginUpdateBody(DialectBody):
    """Body of POST /begin_weight_update."""

    selector: Literal["target"] | None = Field(None, description="only the target model is served")


class UpdateFromDistributedBody(DialectBody):
    """Body of POST /update_weights_from_distributed."""

    names: Tensors[str]
    dtypes: Tensors[str]
    shapes: Tensors[Shape]
    group_name: Name = Field("weight_update_group")
    load_format: Literal["auto"] | None = Field(None, description="one broadcast for each tensor")
    abort_all_requests: bool | None = Field(None, description="end all requests before")
    weight_version: str | None = Field(None, description="name of the new version")
    flush_cache: Any = left_out(_NAMES_PAGES, True)
    torch_empty_cache: Any = left_out("nothing is kept for later use")


class EndUpdateBody(DialectBody):
    """Body of POST /end_weight_update."""

    selector: Literal["target"] | None = Field(None, description="as it began")
    weight_version: str | None = Field(None, description="name of the new version")
    flush_cache: Any = left_out(_NAMES_PAGES, True)


_PICKLED = "pickled tensors, since unpickling runs what their sender wants; give `handles`"


class LentHandle(StrictPart):
    """Where a tensor lies that a trainer on a worker's machine lends."""

    gpu: str = Field("", max_length=64, description="UUID of the GPU, as PyTorch tells it")
    handle: str = Field(
        "", max_length=96, description="base64 of the 64 bytes of cuIpcGetMemHandle"
    )
    shm: str = Field("", max_length=256, description="name of POSIX shared memory, for CPUs")
    offset: int = Field(0, ge=0, lt=1 << 63, description="of the tensor's first byte")


Handles = Annotated[list[LentHandle], Field(min_length=1, max_length=64)]


class UpdateFromTensorBody(DialectBody):
    """Body of POST /update_weights_from_tensor: tensors that lie on the workers' machine."""

    names: Tensors[str] = Field(default_factory=list)
    dtypes: Tensors[str] = Field(default_factory=list)
    shapes: Tensors[Shape] = Field(default_factory=list)
    handles: Tensors[Handles] = Field(
        default_factory=list, description="of each tensor one handle for each GPU"
    )
    serialized_named_tensors: Any = refused(_PICKLED)
    load_format: Literal["auto"] | None = Field(None, description="tensors are the checkpoint's")
    weight_version: str | None = Field(None, description="name of the new version")
    flush_cache: Any = left_out(_NAMES_PAGES, True)


class UpdateFromPeerBody(DialectBody):
    """Body of POST /update_weights_from_peer."""

    worker: Name = Field(description="id of the worker that has the weights")
    weight_version: str | None = Field(None, description="name of the version; default the peer's")


class PickledBody(DialectBody):
    """Body of calls whose tensors are pickled."""

    zmq_handles: Any = None
    load_format: Any = None
    flush_cache: Any = None
    weight_version: Any = None


class TransferInit(StrictPart):
    """How vLLM's trainers describe their group."""

    master_address: Name | None = None
    master_port: Port | None = None
    nccl_unique_id_b64: str | None = Field(None, max_length=256)
    rank_offset: int
    world_size: int
    packed: bool = False
    packed_buffer_size_bytes: int = Field(DEFAULT_PACKED_BYTES, ge=1)
    packed_num_buffers: Any = left_out("one broadcast is received at a time")
    backend: Backend = Field("nccl", description="gloo, for workers on CPUs: a PyTorch group")


class InitTransferBody(DialectBody):
    """Body of POST /init_weight_transfer_engine."""

    init_info: TransferInit


class StartUpdateBody(DialectBody):
    """Body of POST /start_weight_update."""

    is_checkpoint_format: Literal[True] | None = Field(
        None, description="names and shapes are always the checkpoint's"
    )


class UpdateInfo(StrictPart):
    """What vLLM's trainers send."""

    names: Tensors[str]
    dtype_names: Tensors[str]
    shapes: Tensors[Shape]
    handles: Tensors[Handles] | None = Field(
        None, description="in place of a group: of each tensor one handle for each GPU"
    )
    ipc_handles: Any = refused(_PICKLED)
    ipc_handles_pickled: Any = refused(_PICKLED)
    packed: bool | None = Field(None, description="None: as the group was made")
    packed_buffer_size_bytes: int = Field(DEFAULT_PACKED_BYTES, ge=1)
    packed_num_buffers: Any = left_out("one broadcast is received at a time")


class UpdateBody(DialectBody):
    """Body of POST /update_weights."""

    update_info: UpdateInfo


class FinishUpdateBody(DialectBody):
    """Body of POST /finish_weight_update."""

    weight_version: str | None = Field(None, description="name of the new version")


class NoBody(DialectBody):
    """Body of calls that ask for nothing more."""


class MemoryBody(DialectBody):
    """Body of POST /release_memory_occupation and /resume_memory_occupation."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = Field(
        None, description="default: all. Graphs take no memory of their own, and never sleep"
    )


class CheckWeightsBody(DialectBody):
    """Body of POST /weights_checker."""

    action: Literal["checksum", "snapshot", "compare"] = Field(
        description="checksum: digests of what lies in memory; snapshot: and this gateway notes "
        "them; compare: whether they are as noted"
    )
    allow_quant_error: bool | None = left_out("bytes are compared")


class WorkerWeights(BaseModel):
    """The weights of one worker."""

    state: Literal["ready", "updating", "failed"]
    version: str
    model_digest: str = Field(description="names the weights; empty while they are a mixture")
    pause: str
    asleep: list[str] = Field(description="weights, kv_cache")
    updates: int
    ranks: int
    groups: list[str] = Field(description="trainers' groups that are joined")
    problem: str
    packed_digest: str | None = Field(None, description="of the parameters as they lie in memory")


class TrainerAnswer(BaseModel):
    """Answer to a trainer's call."""

    success: Literal[True]
    message: str
    weight_version: str = Field(description="empty while the workers' differ")
    workers: dict[str, WorkerWeights]


class ServerInfoAnswer(BaseModel):
    """Answer to GET /server_info."""

    model_path: str
    served_model_name: str
    version: str
    weight_version: str
    workers: dict[str, WorkerWeights]
    vllm_config: dict[str, Any] = Field(
        description="model_config.dtype, lora_config, parallel_config, as vLLM's trainers read them"
    )


class WorkerLoad(BaseModel):
    """Requests of one worker, or of the gateway."""

    worker: str = Field(description="empty: the requests that no worker has yet")
    num_running_reqs: int
    num_waiting_reqs: int = Field(description="also those whose pages another worker computes")


class LoadsAnswer(BaseModel):
    """Answer to GET /v1/loads."""

    loads: list[WorkerLoad]


class WorldSizeAnswer(BaseModel):
    """Answer to GET /get_world_size."""

    world_size: int = Field(description="ranks of all workers")


class VersionAnswer(BaseModel):
    """Answer to GET /get_weight_version."""

    weight_version: str = Field(description="empty while the workers' differ")


class PausedAnswer(BaseModel):
    """Answer to GET /is_paused."""

    is_paused: bool


class SleepingAnswer(BaseModel):
    """Answer to GET /is_sleeping."""

    is_sleeping: bool


class FlushedAnswer(BaseModel):
    """Answer to /flush_cache and /reset_prefix_cache."""

    success: Literal[True]
    message: str
