"""The processes of a mesh and their flags."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from weft.checkpoint.eagle_config import head_kind
from weft.checkpoint.tokenizer_files import read_json
from weft.cli.certs import files_of
from weft.cli.up.ports import free_ports
from weft.cli.up.process import ServiceSpec
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import is_loopback, list_text
from weft.common.worker.settings import OF_MESH
from weft.contract.tasks import Task
from weft.engine.base.config import NEVER_SHIP_TOKENS
from weft.gateway.media.load import PROCESSOR_FILES
from weft.gateway.settings import GatewaySettings, image_body_bytes
from weft.gateway.text.speech import MODEL_TYPE as SPEECH

WORKER_HOST = "127.0.0.1"
FRONT, BACK = 0, 1
"""Stop phases: services that take requests end before those that answer them."""
_DISCOVERY_S = 0.5
"""Time between two looks of a gateway at the workers that `weft up` lists."""
_STEMS = {"both": "worker"}
"""What the names of workers begin with, where it is not their role."""
_KEEPERS = frozenset(("draft-width", "tp", "pp", "cp", "window-pages", "config"))
"""Flags of workers with which they may keep all pages of layers with sliding windows."""


class Dial(Protocol):
    """Returns the address to dial to reach a service: its own, or that of a proxy in front
    of it.
    """

    def __call__(self, source: str, target: str, address: str) -> str:
        """`source` is the dialling side: gateway, decode, or worker (prefill and decode). `target`
        is the service to reach, such as `decode-0`; it listens at `address`, host:port.
        """
        ...


def directly(source: str, target: str, address: str) -> str:
    return address


FirstTask = Task | Literal["transcribe"]
"""What a first request to a model asks for."""


class Slot(NamedTuple):
    """Room for one worker."""

    address: str
    place: Sequence[str]
    """Flags that name its device and its share of that."""


class PlannedWorker(NamedTuple):
    role: str
    """prefill, decode or both."""
    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWorkers:
    """The workers of one model, and how further ones would start."""

    model: str
    started: Mapping[str, PlannedWorker]
    """By name."""
    spare: Sequence[Slot]
    make_spec: Callable[[str, str, Slot], ServiceSpec]
    """Takes role, name and slot of a worker."""
    dial: Callable[[str, str], str]
    """Takes the name and address of a worker; returns the address at which gateways reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """The services of one mesh."""

    services: tuple[ServiceSpec, ...]
    model_names: tuple[str, ...]
    first_task: FirstTask
    gateways: dict[str, str]
    """Addresses of the gateways for clients on this machine, by name."""
    rest_edges: dict[str, str]
    """Addresses of the REST edges for clients on this machine, by name; empty: REST is off."""
    rest_scheme: str
    """http or https."""
    tls_dir: Path | None
    """Folder with the files that clients need for TLS; None: TLS is off."""
    needs_key: bool
    worker_addresses: dict[str, str]
    """Addresses of prefill and decode workers by id. Any two of them may exchange pages."""
    workers: tuple[ModelWorkers, ...] = ()
    workers_file: Path | None = None
    """File in which gateways find the workers; None: the workers stay the same."""

    @property
    def grpc_address(self) -> str:
        """Address of the first gateway."""
        return next(iter(self.gateways.values()))

    @property
    def rest_address(self) -> str | None:
        """Address of the first REST edge; None: REST is off."""
        return next(iter(self.rest_edges.values()), None)


class ModelFolder(NamedTuple):
    """A model of the mesh."""

    name: str
    folder: Path
    task: FirstTask = "generate"
    no_8_bits: str = ""
    """Reason why its workers cannot keep K and V in 8 bits; empty: they can."""
    has_windows: bool = False
    """Whether workers that exchange pages can free those that sliding windows have left."""


def plan_mesh(
    settings: UpSettings,
    state: StateFolder,
    models: Sequence[ModelFolder],
    rest_binary: Path | None,
    dial: Dial = directly,
) -> MeshPlan:
    """Chooses ports for the workers and makes every command line. Each model has workers and stores
    of its own, numbered over all models.

    Args:
        state: Where logs and ready files go.
        models: At least one.
        rest_binary: The Go edge; None: no REST.
    """
    counts = {"kvstore": settings.kvstore, **_worker_counts(settings)}
    spare = settings.num_spare
    ports = free_ports(WORKER_HOST, len(models) * (sum(counts.values()) + spare))
    services: list[ServiceSpec] = []
    planned: list[ModelWorkers] = []
    workers: dict[str, str] = {}
    ways: dict[str, list[str]] = {"prefill": [], "decode": []}
    places = _places(settings, len(models))
    for number, model in enumerate(models):
        names = {
            role: [worker_name(role, number * count + index) for index in range(count)]
            for role, count in counts.items()
        }
        at = {name: f"{WORKER_HOST}:{ports.pop()}" for role in counts for name in names[role]}
        stores = {name: at[name] for name in names["kvstore"]}
        for role in _worker_counts(settings) if settings.attention_dp > 1 else ():
            for index, name in enumerate(names[role]):
                rank = index % settings.attention_dp
                places[name] += _shared_experts(settings, rank, at[names[role][index - rank]])
        make_spec = partial(_worker_spec, settings, state, model, stores, dial)
        started = {
            name: PlannedWorker(role, Slot(at[name], places[name]))
            for role in _worker_counts(settings)
            for name in names[role]
        }
        spares = [
            Slot(f"{WORKER_HOST}:{ports.pop()}", places[_spare(number * spare + index)])
            for index in range(spare)
        ]
        planned.append(
            ModelWorkers(
                model=model.name,
                started=started,
                spare=spares,
                make_spec=make_spec,
                dial=partial(dial, "gateway"),
            )
        )
        services += [
            _spec(state, name, _kvstore(settings, state, name, address), BACK)
            for name, address in stores.items()
        ]
        services += [make_spec(role, name, slot) for name, (role, slot) in started.items()]
        for role in _worker_counts(settings):
            reached = [dial("gateway", name, at[name]) for name in names[role]]
            for found in ways.values() if role == "both" else (ways[role],):
                found += reached
            workers |= {name: at[name] for name in names[role]}
    suffixes = (
        [""] if settings.num_gateways == 1 else [f"-{i}" for i in range(settings.num_gateways)]
    )
    gateways = {
        f"gateway{suffix}": _reachable(_join(settings.host, settings.grpc_port + index))
        for index, suffix in enumerate(suffixes)
    }
    rest_edges: dict[str, str] = {}
    workers_file = state.workers_file if settings.max_workers else None
    for index, suffix in enumerate(suffixes):
        port = settings.grpc_port + index
        command = _gateway(settings, state, port, models, ways, workers_file)
        services.append(_spec(state, f"gateway{suffix}", command, FRONT))
        if rest_binary is not None:
            rest_address = _join(settings.host, settings.rest_port + index)
            rest_edges[f"rest{suffix}"] = _reachable(rest_address)
            # Each edge gets all gateways, so that it survives one of them.
            command = [
                str(rest_binary),
                *_rest(settings, gateways.values(), rest_address, models),
            ]
            edge = _spec(state, f"rest{suffix}", command, FRONT)
            services.append(replace(edge, tells_health=False))
    return MeshPlan(
        services=tuple(services),
        model_names=tuple(model.name for model in models),
        first_task=models[0].task,
        gateways=gateways,
        rest_edges=rest_edges,
        rest_scheme=_rest_scheme(settings),
        tls_dir=settings.tls_dir,
        needs_key=settings.api_keys_file is not None,
        worker_addresses=workers,
        workers=tuple(planned),
        workers_file=workers_file,
    )


def _worker_spec(
    settings: UpSettings,
    state: StateFolder,
    model: ModelFolder,
    stores: Mapping[str, str],
    dial: Dial,
    role: str,
    name: str,
    slot: Slot,
) -> ServiceSpec:
    command = _worker(settings, state, model, role, name, slot.address, slot.place)
    if stores:
        ways = [dial("worker", store, address) for store, address in stores.items()]
        command += _flags({"kvstore": ",".join(ways)})
    if role != "decode" and (way := dial("decode", name, slot.address)) != slot.address:
        command += _flags({"advertise": way})
    command += ["--model-dir", str(model.folder), "--model-name", model.name]
    return _spec(state, name, command, BACK)


def worker_name(role: str, index: int) -> str:
    return f"{_STEMS.get(role, role)}-{index}"


def _spare(index: int) -> str:
    """Name of a place in which no worker starts."""
    return f"spare-{index}"


def _spec(state: StateFolder, name: str, command: Sequence[str], phase: int) -> ServiceSpec:
    return ServiceSpec(
        name=name,
        command=tuple(command),
        ready_file=state.run / f"{name}.json",
        log_file=state.logs / f"{name}.log",
        stop_phase=phase,
    )


def _places(settings: UpSettings, num_models: int) -> dict[str, list[str]]:
    names = [
        worker_name(role, index)
        for role, count in _worker_counts(settings).items()
        for index in range(num_models * count)
    ]
    names += [_spare(index) for index in range(num_models * settings.num_spare)]
    devices = dict(zip(names, itertools.cycle(settings.device), strict=False))
    # `cuda` is the first GPU, as in torch.
    gpus = {
        name: device if ":" in device else f"{device}:0"
        for name, device in devices.items()
        if device != "cpu"
    }
    sharing = Counter(gpus.values())
    shares = {name: 1 / sharing[gpu] for name, gpu in gpus.items() if sharing[gpu] > 1}
    return {
        name: _flags({"device": devices.get(name), "device-memory-share": shares.get(name)})
        for name in names
    }


def _shared_experts(settings: UpSettings, rank: int, first: str) -> list[str]:
    """Flags of a worker that shares experts with others, by the address of the first of them."""
    return _flags(
        {
            "attention-dp": settings.attention_dp,
            "attention-dp-rank": rank,
            "attention-dp-group": first,
        }
    )


def _worker(
    settings: UpSettings,
    state: StateFolder,
    model: ModelFolder,
    role: str,
    name: str,
    address: str,
    place: Sequence[str],
) -> list[str]:
    has_kv_dtype = settings.kv_dtype != "auto" and not model.no_8_bits
    command = [
        *_serve("prefill" if role == "prefill" else "decode"),
        *_flags(
            {
                "role": "both" if role == "both" else None,
                "worker-id": name,
                "host": WORKER_HOST,
                "port": address.rpartition(":")[2],
                "dtype": settings.dtype,
                "tp": settings.tp if settings.tp > 1 else None,
                "pp": settings.pp if settings.pp > 1 else None,
                "ep": settings.ep if settings.ep > 1 else None,
                "dcp": settings.dcp if settings.dcp > 1 else None,
                "quantization": settings.quantization,
                "trust-remote-code": True if settings.trust_remote_code else None,
                "kv-dtype": settings.kv_dtype if has_kv_dtype else None,
                "task": settings.task,
                "transport": settings.transport,
                "weights-from": _weights_from(settings),
                "kv-memory-bytes": settings.kv_memory_bytes,
                "host-cache-bytes": settings.host_cache_bytes,
                **_disk(settings),
                **_adapters(settings),
                "expected-adapters": _expected_adapters(settings, model),
                "draft-dir": _draft_dir(settings, role),
                "mtp-head": True if settings.drafter == "mtp" else None,
                "window-pages": "free" if model.has_windows and _frees_windows(settings) else None,
                "crash-dir": state.crashes,
                "profile-dir": state.worker_profiles / name,
                **_common(settings, state),
                **_tls(settings, _STEMS.get(role, role)),
            }
        ),
        *place,
    ]
    if role != "prefill":
        drafter = settings.drafter or (
            head_kind(settings.draft_dir) if settings.draft_dir else None
        )
        local = settings.local_prefill_max_tokens
        if local is None and not (_num_fillers(settings) or settings.kvstore):
            local = NEVER_SHIP_TOKENS  # There is no prefill worker to ask.
        fillers = True if _num_fillers(settings) else None
        command += _flags(
            {"local-prefill-max-tokens": local, "drafter": drafter, "fillers-on-host": fillers}
        )
    return command + shlex.split(
        settings.prefill_args if role == "prefill" else settings.decode_args
    )


def _worker_counts(settings: UpSettings) -> dict[str, int]:
    return {"prefill": settings.prefill, "decode": settings.decode, "both": settings.both}


def _num_fillers(settings: UpSettings) -> int:
    """Workers that may fill the pages of some other one."""
    alone = settings.both == 1 and not settings.decode and not settings.max_workers
    return settings.prefill + (0 if alone else settings.both) + bool(settings.max_workers)


def _frees_windows(settings: UpSettings) -> bool:
    """Whether all workers free pages that sliding windows have left although they exchange pages:
    no flag or environment variable of a worker needs all pages. Without prefill workers and KV
    stores each worker decides by itself.
    """
    if settings.tp * settings.pp > 1 or not (_num_fillers(settings) or settings.kvstore):
        return False
    words = shlex.split(settings.decode_args) + shlex.split(settings.prefill_args)
    names = [keeper.upper().replace("-", "_") for keeper in _KEEPERS]
    if any(f"WEFT_{role}_{name}" in os.environ for role in ("DECODE", "PREFILL") for name in names):
        return False
    return _KEEPERS.isdisjoint(word.partition("=")[0].lstrip("-") for word in words)


def _weights_from(settings: UpSettings) -> str:
    """The workers' setting: for `auto` the first gateway's, which may not run yet."""
    if settings.weights_from != "auto":
        return settings.weights_from
    return OF_MESH + _reachable(_join(settings.host, settings.grpc_port))


def _draft_dir(settings: UpSettings, role: str) -> Path | None:
    """The flag for a draft head goes to all workers, since their pages have its KV; the flag for a
    draft model goes to decode workers.
    """
    if settings.draft_dir is None or (settings.drafter == "model" and role == "prefill"):
        return None
    return settings.draft_dir.resolve()


def _adapters(settings: UpSettings) -> dict[str, object]:
    return {"adapter-root": settings.adapter_root and settings.adapter_root.resolve()}


def _expected_adapters(settings: UpSettings, model: ModelFolder) -> str | None:
    given = (settings.parse_adapter(text) for text in settings.adapter)
    return list_text(path for name, _, path in given if name in ("", model.name)) or None


def _disk(settings: UpSettings) -> dict[str, object]:
    if settings.disk_cache_dir is None:
        return {}
    folder = settings.disk_cache_dir.resolve()
    return {"disk-cache-dir": folder, "disk-cache-bytes": settings.disk_cache_bytes}


def _kvstore(settings: UpSettings, state: StateFolder, name: str, address: str) -> list[str]:
    return [
        *_serve("kvstore"),
        *_flags(
            {
                "store-id": name,
                "host": WORKER_HOST,
                "port": address.rpartition(":")[2],
                "transport": settings.transport,
                "memory-bytes": settings.kvstore_memory_bytes,
                **_disk(settings),
                **_common(settings, state),
                **_tls(settings, "kvstore"),
            }
        ),
        *shlex.split(settings.kvstore_args),
    ]


def _gateway(
    settings: UpSettings,
    state: StateFolder,
    port: int,
    models: Sequence[ModelFolder],
    ways: Mapping[str, Sequence[str]],
    workers_file: Path | None,
) -> list[str]:
    further = [f"{model.name}={model.folder}" for model in models[1:]]
    return [
        *_serve("gateway"),
        *_flags(
            {
                "model-dir": models[0].folder,
                "model-name": models[0].name,
                "models": list_text(further) or None,
                "replicas": settings.num_gateways if settings.num_gateways > 1 else None,
                "host": settings.host,
                "port": port,
                **_found_workers(ways, workers_file),
                "api-keys-file": settings.api_keys_file,
                **_adapters(settings),
                "expected-adapters": list_text(text.partition("=")[0] for text in settings.adapter)
                or None,
                "insecure": settings.insecure or None,
                "ready-grace-s": settings.ready_grace_s,
                # On other addresses the operators' token must not be sent without encryption.
                "console": "operate" if is_loopback(settings.host) else None,
                "profile-dir": state.profiles,
                **_common(settings, state),
                **_tls(settings, "gateway"),
            }
        ),
        *shlex.split(settings.gateway_args),
    ]


def _found_workers(
    ways: Mapping[str, Sequence[str]], workers_file: Path | None
) -> dict[str, object]:
    if workers_file is None:
        return {name: ",".join(addresses) or None for name, addresses in ways.items()}
    return {
        "discovery": "file",
        "discovery-file": workers_file,
        "discovery-interval-s": _DISCOVERY_S,
    }


def _common(settings: UpSettings, state: StateFolder) -> dict[str, object]:
    """Flags of every service but the REST edge. Operators' ports are any free ones on loopback."""
    return {
        "admin-port": 0,
        "admin-token-file": state.admin_token,
        "log-level": settings.log_level,
        "drain-grace-s": settings.drain_grace_s,
        "enable-faults": settings.enable_faults or None,
    }


def _tls(settings: UpSettings, service: str) -> dict[str, object]:
    if settings.tls_dir is None:
        return {}
    files = files_of(settings.tls_dir, service)
    return {"tls-cert": files.cert, "tls-key": files.key, "tls-ca": files.ca}


def _rest(
    settings: UpSettings,
    gateways: Iterable[str],
    rest_address: str,
    models: Sequence[ModelFolder],
) -> list[str]:
    return [
        *_flags(
            {
                "listen": rest_address,
                "backend": ",".join(gateways),
                "metrics-listen": f"{WORKER_HOST}:0",
                "max-body-bytes": _media_body_bytes(models),
                "ready-grace-s": settings.ready_grace_s,
                "drain-timeout": f"{settings.drain_grace_s}s",
                "insecure": settings.insecure or None,
                **_tls(settings, "rest"),
                **_https(settings),
            }
        ),
        *shlex.split(settings.rest_args),
    ]


def _media_body_bytes(models: Sequence[ModelFolder]) -> int | None:
    """Largest request body where a model takes images or audio; None: no model does."""
    folders = [model.folder for model in models]
    most: int = GatewaySettings.model_fields["max_body_bytes"].default
    if any((folder / name).is_file() for folder in folders for name in PROCESSOR_FILES):
        images: int = GatewaySettings.model_fields["max_request_image_bytes"].default
        return image_body_bytes(most, images)
    if any(read_json(folder / "config.json").get("model_type") == SPEECH for folder in folders):
        audio: int = GatewaySettings.model_fields["max_audio_bytes"].default
        return most + audio
    return None


def _rest_scheme(settings: UpSettings) -> str:
    own = {word.partition("=")[0].lstrip("-") for word in shlex.split(settings.rest_args)}
    return "http" if settings.tls_dir is None and "https-cert" not in own else "https"


def _https(settings: UpSettings) -> dict[str, object]:
    """Flags for HTTPS. REST clients have no certificates and check the edge's."""
    if settings.tls_dir is None:
        return {}
    files = files_of(settings.tls_dir, "rest")
    return {"https-cert": files.cert, "https-key": files.key}


def _serve(service: str) -> list[str]:
    return [sys.executable, "-m", "weft.cli", "serve", service]


def _flags(values: dict[str, object]) -> list[str]:
    given = {name: value for name, value in values.items() if value is not None}
    return [
        part
        for name, value in given.items()
        for part in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
    ]


def _reachable(address: str) -> str:
    return address.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
