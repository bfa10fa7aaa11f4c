"""Settings of `weft up`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from weft.checkpoint.quantization import AskedFormat
from weft.common.settings import (
    LogLevel,
    ModelSettings,
    PageSettings,
    ServiceSettings,
    Settings,
    is_loopback,
    setting_of,
)
from weft.common.worker.settings import WorkerSettings, engine_setting
from weft.contract.settings import TransportName
from weft.engine.base.config import DrafterName, DtypeName, KvDtypeName, TaskName
from weft.gateway.settings import GatewaySettings
from weft.kvstore.settings import KvStoreSettings

MAX_GATEWAYS = 16
KEYS_VARIABLE = "WEFT_GATEWAY_API_KEYS_FILE"


class UpSettings(Settings):
    """Starts workers, a KV store if wanted, a gateway and the REST edge on this machine."""

    program: ClassVar[str] = "up"
    command: ClassVar[str] = "weft"
    folders: ClassVar[tuple[str, ...]] = ("adapter_root", "draft_dir")

    prefill: int = Field(
        1,
        ge=0,
        le=64,
        description="number of prefill workers of each model; default 1, on GPUs as many as they "
        "allow (none on one GPU) unless device or decode is given",
    )
    decode: int = Field(
        1,
        ge=0,
        le=64,
        description="number of decode workers of each model; default 1, on GPUs one for each that "
        "is left unless device or prefill is given",
    )
    both: int = Field(
        0,
        ge=0,
        le=64,
        description="number of workers of each model that prefill for others and decode, and whose "
        "role may change while they run (`weft role`); with them prefill and decode may be 0",
    )
    max_workers: int = Field(
        0,
        ge=0,
        le=64,
        description="most workers of each model, of all roles: up to so many are started and ended "
        "while the mesh runs, by `weft scale` and by a planner (`--act processes`); 0 = those of "
        "the start stay",
    )
    kvstore: int = Field(
        0,
        ge=0,
        le=64,
        description="number of KV stores of each model, which share its pages",
    )
    gateways: Annotated[int, Field(ge=1, le=MAX_GATEWAYS)] | Literal["auto"] = Field(
        1,
        description="number of gateways, each with a REST edge if there is REST; auto = one for "
        "each worker on GPUs that owns requests, as far as there are cores",
    )
    model: list[str] = Field(
        ["demo"],
        min_length=1,
        max_length=16,
        description="`demo`, a Hugging Face model directory (a comma in it is written \\,), a name "
        "on the hub, ORG/NAME[@REVISION], or the URL of a folder in an object store; several are "
        "served side by side",
    )
    model_name: list[str] = Field(
        [],
        description="names in requests, in the order of the models; default = the directory's "
        "name, the hub's ORG/NAME, or demo's own",
    )
    dtype: DtypeName = engine_setting("dtype")
    task: TaskName = engine_setting("task")
    quantization: AskedFormat = engine_setting("quantization")
    trust_remote_code: bool = engine_setting("trust_remote_code")
    kv_dtype: KvDtypeName = engine_setting("kv_dtype")
    device: list[str] = Field(
        [],
        max_length=64,
        description="devices of the workers, which take them in turn, prefill workers first: cpu, "
        "cuda or cuda:N; workers on one GPU share its memory; empty or auto = all GPUs that are "
        "there, else the CPU",
    )
    tp: int = engine_setting("tp")
    pp: int = engine_setting("pp")
    ep: int = engine_setting("ep")
    dcp: int = engine_setting("dcp")
    attention_dp: int = engine_setting("attention_dp")
    host: str = setting_of(ServiceSettings, "host")
    rest: bool = Field(True, description="serve REST")
    rest_port: int = Field(
        8000, ge=1, le=65520, description="port of the first REST edge; the next ones follow"
    )
    grpc_port: int = Field(
        50051, ge=1, le=65520, description="port of the first gateway; the next ones follow"
    )
    state_dir: Path | None = Field(
        None,
        description="folder for logs and state, one per mesh; none = by the gRPC port",
    )
    weights_from: str = setting_of(WorkerSettings, "weights_from")
    local_prefill_max_tokens: int | None = engine_setting("local_prefill_max_tokens")
    kv_memory_bytes: int | None = engine_setting("kv_memory_bytes", None)
    kvstore_memory_bytes: int | None = setting_of(KvStoreSettings, "memory_bytes", None)
    host_cache_bytes: int | None = engine_setting("host_cache_bytes", None)
    disk_cache_dir: Path | None = engine_setting("disk_cache_dir")
    disk_cache_bytes: int | None = engine_setting("disk_cache_bytes", None)
    transport: TransportName = setting_of(PageSettings, "transport")
    adapter_root: Path | None = setting_of(ModelSettings, "adapter_root")
    adapter: list[str] = Field(
        [],
        description="adapters to load at start, NAME=PATH each: PATH is the folder of a PEFT "
        "adapter in the adapter root; with several models MODEL:NAME=PATH",
    )
    draft_dir: Path | None = engine_setting("draft_dir")
    drafter: DrafterName | None = engine_setting("drafter", None)
    demo_draft_dir: Path | None = Field(
        None, description="the draft_dir of a mesh that serves the demo model alone"
    )
    enable_faults: bool = setting_of(ServiceSettings, "enable_faults")
    tls_dir: Path | None = Field(
        None, description="folder of `weft certs`: gRPC is mutual TLS and REST is HTTPS; none = off"
    )
    api_keys_file: Path | None = setting_of(GatewaySettings, "api_keys_file")
    insecure: bool = setting_of(ServiceSettings, "insecure")
    plain: bool = Field(
        False,
        description="write events as lines, as without a terminal, and show nothing live",
    )
    log_level: LogLevel = setting_of(ServiceSettings, "log_level")
    ready_grace_s: float = setting_of(GatewaySettings, "ready_grace_s")
    drain_grace_s: float = setting_of(ServiceSettings, "drain_grace_s", 3.0)
    stall_timeout_s: float | None = Field(
        30.0,
        gt=0,
        description="time for which a worker's engine may stall, or a service not answer, before "
        "it is killed and restarted, in seconds; none = never",
    )
    max_restart_delay_s: float = Field(
        30.0,
        ge=0.5,
        description="longest delay before a service that dies repeatedly is restarted, in seconds",
    )
    ready_timeout_s: float = Field(
        900.0,
        gt=0,
        description="time limit for a service to become ready after every start, and then for the "
        "mesh as a whole, in seconds",
    )
    prefill_args: str = Field("", description="further flags for prefill workers, in one string")
    decode_args: str = Field("", description="further flags for decode workers, in one string")
    kvstore_args: str = Field("", description="further flags for the KV store, in one string")
    gateway_args: str = Field("", description="further flags for the gateway, in one string")
    rest_args: str = Field("", description="further flags for the REST edge, in one string")

    @field_validator("model", "model_name", "device", mode="before")
    @classmethod
    def _take_one(cls, value: object) -> object:
        """A file may have a single text."""
        return [value] if isinstance(value, str) else value

    @field_validator("device")
    @classmethod
    def _check_device(cls, devices: list[str]) -> list[str]:
        if "auto" in devices and len(devices) > 1:
            raise ValueError("auto stands for all devices: give it alone")
        return devices

    @field_validator("prefill_args", "decode_args", "kvstore_args", "gateway_args", "rest_args")
    @classmethod
    def _check_args(cls, text: str) -> str:
        try:
            shlex.split(text)
        except ValueError as error:
            raise ValueError(f"{error}; quote it as a shell would") from error
        return text

    @model_validator(mode="after")
    def _check_owners(self) -> Self:
        if not self.decode + self.both:
            raise ValueError("--decode 0 and --both 0: no worker would own requests; give one")
        return self

    @model_validator(mode="after")
    def _check_max_workers(self) -> Self:
        started = self.prefill + self.decode + self.both
        if self.max_workers and self.max_workers < started:
            raise ValueError(
                f"--max-workers {self.max_workers}: {started} workers are started; give at least "
                "as many, or 0"
            )
        return self

    @property
    def num_spare(self) -> int:
        """Workers of each model that may start while the mesh runs."""
        return max(0, self.max_workers - self.prefill - self.decode - self.both)

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if self.rest and abs(self.rest_port - self.grpc_port) < self.num_gateways:
            raise ValueError(
                f"--rest-port {self.rest_port} and --grpc-port {self.grpc_port} overlap: REST and "
                f"gRPC take ports of their own, {self.num_gateways} each (--gateways)"
            )
        return self

    @property
    def num_gateways(self) -> int:
        """Number of gateways; 1 while `auto` is not resolved."""
        return 1 if self.gateways == "auto" else self.gateways

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        if self.adapter and self.adapter_root is None:
            raise ValueError("--adapter needs --adapter-root, the folder that its PATH is in")
        for text in self.adapter:
            self.parse_adapter(text)
        return self

    def parse_adapter(self, text: str) -> tuple[str, str, str]:
        """Splits one of `adapter` into model (empty: the only one), name and folder. Raises
        ValueError if the text has another form.
        """
        whole, _, path = text.partition("=")
        model, _, name = whole.rpartition(":")
        if not name or not path:
            raise ValueError(f"--adapter {text}: give NAME=PATH")
        folder = Path(path)
        if self.adapter_root is not None and folder.is_absolute():
            # A shell completes absolute paths, but adapters are named by their path in the root.
            try:
                folder = folder.relative_to(self.adapter_root.absolute())
            except ValueError:
                raise ValueError(
                    f"--adapter {text}: the folder is not in --adapter-root {self.adapter_root}"
                ) from None
        return model, name, str(folder)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = dict(values)
        if keys := os.environ.get(KEYS_VARIABLE):
            values.setdefault("api_keys_file", keys)
        if values.get("both"):
            values = {"prefill": 0, "decode": 0, **values}
        demo_draft_dir = values.get("demo_draft_dir")
        if demo_draft_dir is not None and values.get("model", ["demo"]) in ("demo", ["demo"]):
            values.setdefault("draft_dir", demo_draft_dir)
        return values

    @model_validator(mode="after")
    def _check_draft(self) -> Self:
        if self.draft_dir is not None and len(self.model) > 1:
            raise ValueError("--draft-dir is for one model, and there are several")
        if self.drafter == "mtp" and self.draft_dir is not None:
            raise ValueError("--drafter mtp takes the model's own head, and no --draft-dir")
        if self.drafter not in (None, "none", "ngram", "mtp") and self.draft_dir is None:
            raise ValueError(f"--drafter {self.drafter} needs --draft-dir")
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.ep not in (1, self.tp):
            raise ValueError(f"--ep {self.ep}: give 1, or as many as --tp, {self.tp}")
        size = self.attention_dp
        for name in ("prefill", "decode", "both"):
            if (count := getattr(self, name)) % size:
                raise ValueError(
                    f"--{name} {count}: --attention-dp {size} makes groups of {size} workers; give "
                    f"a multiple of {size}, or 0"
                )
        if size > 1 and self.max_workers:
            raise ValueError(
                "--max-workers: with --attention-dp no single worker may start; give 0"
            )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if len(self.model_name) > len(self.model):
            surplus = ", ".join(self.model_name[len(self.model) :])
            raise ValueError(
                f"--model-name {surplus}: there are {len(self.model_name)} names and "
                f"{len(self.model)} models; give a --model for each name"
            )
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        if self.insecure or is_loopback(self.host):
            return self
        if self.tls_dir is None or self.api_keys_file is None:
            raise ValueError(
                f"--host {self.host} is open to other machines: give --tls-dir and "
                "--api-keys-file (docs/security.md), or accept that with --insecure"
            )
        return self

    def state_folder(self) -> Path:
        """The state folder, given or default."""
        if self.state_dir is not None:
            return self.state_dir
        return default_state_folder(self.grpc_port)


def default_state_folder(grpc_port: int) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "weft" / f"mesh-{grpc_port}"
