"""Pauses and changes of a worker's weights: what is asked, and the state that they are in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from weft.contract.errors import InvalidRequest
from weft.contract.submits import Failure
from weft.contract.wire import wire

PauseMode = Literal["abort", "wait", "keep", "retract"]
"""What becomes of requests: they end as cancelled, or end by themselves, or keep their pages, or
are computed anew when the pause is over. In the first two modes new requests are refused, in the
others they wait.
"""
WeightState = Literal["ready", "updating", "failed"]
"""failed: an update has not ended, so the weights are a mixture, and requests are refused until an
update ends.
"""
WeightAction = Literal[
    "show",
    "pause",
    "resume",
    "refit",
    "digest",
    "join",
    "leave",
    "begin",
    "receive",
    "end",
    "sleep",
    "wake",
    "offer",
    "copy",
]
"""join, leave: a trainer's process group. begin, receive, end: an update that the group brings;
without begin it ends by itself when all of the model's tensors are there. offer, copy: of the
packed weights, to another worker or from one.
"""
GroupBackend = Literal["gloo", "nccl"]
Rendezvous = Literal["torch", "vllm"]
"""torch: a process group of PyTorch's whose store has the group's name before its keys, as SGLang
makes it. vllm: a bare NCCL communicator, whose id comes with the group or from a store.
"""
SleepTag = Literal["weights", "kv_cache"]
SLEEP_TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache")
DEFAULT_LIMIT_S, MAX_LIMIT_S = 1800.0, 86_400.0
"""Seconds after which a pause ends by itself, unless a further command renews it."""
MAX_VERSION_CHARS = 128
MAX_FOLDER_CHARS = 4096
MAX_GROUP_CHARS = 256
MAX_GROUP_SIZE = 65_536
GROUP_WAIT_S = 300.0
"""Longest wait for a group to form, and for each broadcast in it."""
NCCL_ID_BYTES = 128
CUDA_HANDLE_BYTES = 64
MAX_OFFSET = 1 << 62
MODEL_DIGEST_BYTES = PACKED_DIGEST_BYTES = 32
MAX_PACKED_TENSORS = 1_000_000
MAX_RANKS = 1024


@dataclass(slots=True, kw_only=True)
class WeightGroup:
    """A process group of a trainer and workers. The trainer is rank 0.

    Raises InvalidRequest for a value out of its range.
    """

    name: str
    address: str = ""
    port: int = 0
    rank: int
    """Of the worker's first rank; its others follow."""
    size: int
    backend: GroupBackend = field(metadata=wire(is_required=True))
    rendezvous: Rendezvous = "torch"
    nccl_id: bytes = b""
    packed_bytes: int = 0
    """Several tensors come in one broadcast, which ends with the tensor that makes it larger than
    this; 0: each comes by itself.
    """
    wait_s: float = GROUP_WAIT_S

    def __post_init__(self) -> None:
        self.rendezvous = self.rendezvous or "torch"  # Messages may leave it out.
        checks = (
            (
                "group_name",
                0 < len(self.name) <= MAX_GROUP_CHARS,
                "1 to 256 letters",
            ),
            ("master_port", 0 <= self.port < 65_536, "0 to 65,535"),
            ("world_size", 1 < self.size <= MAX_GROUP_SIZE, f"2 to {MAX_GROUP_SIZE:,}"),
            ("rank_offset", 0 < self.rank < self.size, "from 1, below world_size"),
            ("nccl_unique_id_b64", len(self.nccl_id) in (0, NCCL_ID_BYTES), "128 bytes"),
            ("packed_buffer_size_bytes", self.packed_bytes >= 0, "from 0"),
            ("timeout", 0 < self.wait_s <= MAX_LIMIT_S, "above 0 s"),
        )
        for param, is_right, right in checks:
            if not is_right:
                raise InvalidRequest(f"{param}: must be {right}", stage="validate", param=param)
        if not self.nccl_id and not (0 < len(self.address) <= MAX_GROUP_CHARS and self.port):
            message = "master_address, master_port: give both"
            raise InvalidRequest(message, stage="validate", param="master_address")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHandle:
    """Where a tensor lies that a trainer on the same machine lends. Raises InvalidRequest unless it
    names memory of a GPU or of the host.
    """

    gpu: str = ""
    """UUID of the GPU; empty: the host's memory."""
    handle: bytes = b""
    """The CUDA driver's handle of the allocation, 64 bytes."""
    shm: str = ""
    """Name of a piece of POSIX shared memory, without the slash."""
    offset: int = 0
    """Of the tensor's first byte."""

    def __post_init__(self) -> None:
        is_of_gpu = bool(self.gpu) and len(self.handle) == CUDA_HANDLE_BYTES and not self.shm
        is_of_host = bool(self.shm) and not self.gpu and not self.handle
        if not (is_of_gpu or is_of_host) or not 0 <= self.offset < MAX_OFFSET:
            raise InvalidRequest(
                f"handles: give `gpu` and a `handle` of {CUDA_HANDLE_BYTES} bytes, or `shm`; and "
                "an offset from 0, below 2**62",
                stage="validate",
                param="handles",
            )


@dataclass(slots=True, kw_only=True)
class SentTensor:
    """A tensor that a trainer sends."""

    name: str
    dtype: str
    """Name of a torch dtype, such as bfloat16."""
    shape: list[int]
    handles: list[TensorHandle] = field(default_factory=list)
    """Where it lies, one for each GPU; empty: a group brings it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor:
    """A tensor of a model as it lies in the memory of one of a worker's ranks."""

    place: str
    """In the model, such as `.model.layers.0.mlp.down.form.data`; the same in all processes that
    have the same part of it.
    """
    dtype: str
    """Name of a torch dtype, such as bfloat16."""
    shape: list[int]
    address: int
    num_bytes: int
    memory_type: str
    """DRAM or VRAM."""
    device_id: int = 0
    digest: bytes = field(metadata=wire(least=PACKED_DIGEST_BYTES, most=PACKED_DIGEST_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAllocation:
    """Memory of a GPU that other processes of its host can open."""

    address: int
    """In the process that has allocated it."""
    device_id: int
    handle: bytes = field(metadata=wire(least=CUDA_HANDLE_BYTES, most=CUDA_HANDLE_BYTES))
    """The CUDA driver's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """The packed weights of one rank, which others may read: on the same host by the driver's
    handles of `allocations`, anywhere over NIXL.
    """

    scheme: bytes
    """32 bytes over the configuration, the dtype and the number format."""
    share: str
    """Which part of the model the rank has."""
    packing: str
    """The code and the machine for which the weights are packed."""
    constants: bytes
    """32 bytes over the numbers that lie beside the tensors."""
    nixl_version: str
    agent_name: str
    agent_metadata: bytes = field(repr=False)
    tensors: list[PackedTensor] = field(metadata=wire(most=MAX_PACKED_TENSORS))
    host: str = ""
    """Names the running system of the host; empty: `allocations` is."""
    allocations: list[GpuAllocation] = field(
        default_factory=list, metadata=wire(most=MAX_PACKED_TENSORS)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOffer:
    """The packed weights of a worker, until they change or sleep."""

    model_digest: bytes = field(metadata=wire(least=MODEL_DIGEST_BYTES, most=MODEL_DIGEST_BYTES))
    """Names them."""
    start_digest: bytes
    """Names those with which the worker began."""
    files: bytes
    """A sketch of the files from which it began."""
    version: str
    ranks: list[RankWeights] = field(metadata=wire(least=1, most=MAX_RANKS))

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=bytes.hex)

    @classmethod
    def of_json(cls, text: str) -> WeightOffer:
        found = json.loads(text)
        ranks = [rank_of_json(one) for one in found.pop("ranks")]
        names = ("model_digest", "start_digest", "files")
        return cls(ranks=ranks, **(found | {name: bytes.fromhex(found[name]) for name in names}))


def rank_of_json(found: dict[str, Any]) -> RankWeights:
    """A `RankWeights` from what `json` made of it."""
    tensors = [
        PackedTensor(**(one | {"digest": bytes.fromhex(one["digest"])})) for one in found["tensors"]
    ]
    allocations = [
        GpuAllocation(**(one | {"handle": bytes.fromhex(one["handle"])}))
        for one in found["allocations"]
    ]
    names = ("scheme", "constants", "agent_metadata")
    data = {name: bytes.fromhex(found[name]) for name in names}
    return RankWeights(**(found | data | {"tensors": tensors, "allocations": allocations}))


@dataclass(slots=True, kw_only=True)
class WeightCommand:
    """Raises InvalidRequest for a value out of its range."""

    query: int
    action: WeightAction
    mode: PauseMode = "keep"
    limit_s: float = DEFAULT_LIMIT_S
    level: int = 1
    """Of sleep. 1: weights are put away; 2: they are dropped, and an update must bring others."""
    tags: list[SleepTag] = field(default_factory=lambda: list(SLEEP_TAGS))
    """What sleeps or wakes."""
    folder: str = ""
    """Folder of safetensors files on the worker's host."""
    version: str = ""
    """Name of the new version; empty: the first 16 digits of its digest."""
    group: WeightGroup | None = None
    """To join."""
    group_name: str = ""
    """To leave, or to receive from."""
    tensors: list[SentTensor] = field(default_factory=list)
    """To receive, in this order."""
    packed_bytes: int | None = None
    """As in `WeightGroup`; None: the group's."""
    offer: WeightOffer | None = None
    """To copy."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.limit_s <= MAX_LIMIT_S:
            message = f"limit: must be from 1 s to {MAX_LIMIT_S:,.0f} s"
            raise InvalidRequest(message, stage="validate", param="limit")
        if len(self.version) > MAX_VERSION_CHARS:
            message = f"weight_version: at most {MAX_VERSION_CHARS} characters"
            raise InvalidRequest(message, stage="validate", param="weight_version")
        if self.level not in (1, 2):
            raise InvalidRequest("level: must be 1 or 2", stage="validate", param="level")
        if not self.tags or not set(self.tags) <= set(SLEEP_TAGS):
            message = f"tags: give {' or '.join(SLEEP_TAGS)}, or both"
            raise InvalidRequest(message, stage="validate", param="tags")
        if self.action == "refit" and not 0 < len(self.folder) <= MAX_FOLDER_CHARS:
            message = f"model_path: give a folder, at most {MAX_FOLDER_CHARS} characters"
            raise InvalidRequest(message, stage="validate", param="model_path")


@dataclass(slots=True, kw_only=True)
class WeightStatus:
    state: WeightState
    version: str
    """Name of the version that is served; of a failed one, the last that was."""
    model_digest: bytes
    """32 bytes that name the weights; empty while they are a mixture."""
    pause: str = ""
    """Mode of the present pause; empty: there is none."""
    is_drained: bool = True
    """Whether a pause has come to the point at which no step runs and no request will."""
    problem: str = ""
    """Why the last update failed."""
    num_updates: int = 0
    """Updates that have ended well since the worker's start."""
    num_ranks: int = 1
    """Processes that hold the weights, each of which is a rank of a trainer's group."""
    groups: list[str] = field(default_factory=list)
    """Trainers' groups that are joined."""
    asleep: list[SleepTag] = field(default_factory=list)
    """What sleeps."""
    packed_digest: bytes = b""
    """32 bytes over the parameters as they lie in memory, if they were asked for."""


@dataclass(slots=True, kw_only=True)
class WeightReply:
    query: int
    status: WeightStatus
    failure: Failure | None = None
    offer: WeightOffer | None = None
    """What was asked for by `offer`."""
