"""Settings shared by prefill and decode workers.

A setting of the engine is declared in `weft.engine.base.config`; services have it by its name.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from weft.common.settings import (
    ModelSettings,
    PageSettings,
    declared_setting,
    is_loopback,
    with_settings_of,
)
from weft.engine.base.config import SETTINGS, EngineConfig, Role
from weft.engine.base.gpus import resolve_device

FROM_DISK, OF_MESH = "disk", "mesh:"
"""A value of `weights_from`, and how one begins that has a gateway's address."""
_CPU_SIZES = {"max_running_requests": 64, "max_step_tokens": 512, "prefill_chunk_tokens": 256}
_GPU_SIZES = {"max_running_requests": 256, "max_step_tokens": 8192, "prefill_chunk_tokens": 4096}
"""Default step sizes on a GPU, which keep the device busy."""
_GPU_SHARED_TOKENS = 2048
"""Default of `shared_step_tokens` on a GPU: enough prompt tokens to keep it busy."""
OF_DECODE = (
    *("drafter", "max_draft_tokens", "draft_width", "draft_gate"),
    *("local_prefill_max_tokens", "max_fill_fraction", "stream_interval_s"),
)
"""Settings that only an owner of requests has."""
_NOT_OF_ALL = frozenset((*OF_DECODE, "worker_id", "max_context_tokens", "lora_projections"))
"""Settings of the engine that not all workers have, or have in another form."""


engine_setting = partial(declared_setting, EngineConfig)
"""A field for a setting that the engine declares, with its default or another one."""

if TYPE_CHECKING:
    _EngineSettings = PageSettings
else:
    _EngineSettings = with_settings_of(
        PageSettings, EngineConfig, [name for name in SETTINGS if name not in _NOT_OF_ALL]
    )


class WorkerSettings(ModelSettings, _EngineSettings):
    """A worker: a gRPC server and its engine process."""

    folders: ClassVar[tuple[str, ...]] = (*ModelSettings.folders, "draft_dir", "sleep_dir")

    worker_id: str = Field("", max_length=64, description=SETTINGS["worker_id"].help)
    advertise: str = Field(
        "",
        max_length=256,
        description="host:port at which other workers reach this one; empty = the same as for "
        "gateways",
    )
    device: str = engine_setting("device", "auto")
    hosts: int = engine_setting("hosts")
    host_rank: int = engine_setting("host_rank")
    rendezvous: str = engine_setting("rendezvous")
    max_running_requests: int | None = engine_setting("max_running_requests", None)
    max_step_tokens: int | None = engine_setting("max_step_tokens", None)
    prefill_chunk_tokens: int | None = engine_setting("prefill_chunk_tokens", None)
    kvstore: str = Field(
        "",
        max_length=4096,
        description="KV store, host:port; several replicas are separated by commas; empty = none",
    )
    weights_from: str = Field(
        FROM_DISK,
        min_length=1,
        max_length=4096,
        description="where the weights come from at the start: disk, the model's files; host:port "
        "of a worker of the same model, or several separated by commas; mesh:host:port, workers "
        "that the gateway there knows; in `weft up` also auto, workers of its own mesh that run "
        "already. If no worker has them in this form, the files are read, and the log says why",
    )
    kernels_from_peers: bool = Field(
        False,
        description="take compiled kernels from the workers that weights_from names, before the "
        "engine loads; they are code that runs here, so it needs tls_cert, and any worker of the "
        "mesh is trusted with it",
    )
    lora_projections: str = Field("", description=SETTINGS["lora_projections"].help)
    expected_adapters: list[str] = Field(
        [],
        max_length=1000,
        description="adapters that will be loaded, as folders of the adapter root, so that the "
        "worker can hold them (lora_projections)",
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
    def exposure(self) -> str:
        host = self.rendezvous.rpartition(":")[0]
        if host and self.hosts > 1 and not self.has_tls and not is_loopback(host):
            return (
                f"--rendezvous {self.rendezvous} is open to other machines, and hosts know one "
                "another by --tls-cert alone"
            )
        return super().exposure

    @property
    def kvstores(self) -> list[str]:
        """Addresses of the KV store's replicas."""
        return list(_names(self.kvstore))

    @property
    def served_name(self) -> str:
        """Name of the served model."""
        return self.model_name or self.model_dir.resolve().name


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
