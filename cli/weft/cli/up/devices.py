"""Default devices and numbers of workers of `weft up`."""

from __future__ import annotations

from collections.abc import Callable

from weft.cli.up.settings import MAX_GATEWAYS, UpSettings
from weft.contract.errors import ConfigError
from weft.engine.base.gpus import check_device

CORES_A_WORKER = 2
"""Cores that a worker on a GPU keeps busy: its engine and its service."""
CORES_A_GATEWAY = 2
"""Cores that a gateway and its REST edge keep busy at their limit."""


def with_devices(settings: UpSettings, num_gpus: int, notice: Callable[[str], None]) -> UpSettings:
    """Settings in which the device `auto` is resolved.

    Without GPUs workers run on the CPU. Otherwise they take the GPUs in turn. If no numbers of
    workers are given, each GPU gets one worker. A single GPU gets a decode worker that also
    prefills, since two workers would only share it. Each of several GPUs gets a worker of both
    roles, which prefills for the others where that is faster; with flags for prefill workers, the
    first one is such a worker and the others decode.

    Raises ConfigError if a given device is not there, a worker of `tp` ranks needs more GPUs, or
    the given ones cannot be divided among such workers. `notice` is called with what a user should
    know of the choice.
    """
    tp = settings.tp
    if settings.device not in ([], ["auto"]):
        for device in settings.device:
            check_device(device, num_gpus)
        if tp == 1 or "cpu" in settings.device:
            return settings
        devices = _grouped(settings.device, tp)
        if len(settings.device) % tp:
            raise ConfigError(
                f"--tp {tp}: a worker takes {tp} GPUs, and {len(settings.device)} are given; give "
                f"a multiple of {tp}",
                param="device",
            )
        return settings.model_copy(update={"device": devices})
    if not num_gpus:
        return settings.model_copy(update={"device": ["cpu"]})
    devices = _grouped([f"cuda:{index}" for index in range(num_gpus)], tp)
    if num_idle := num_gpus % tp:
        notice(f"--tp {tp}: a worker takes {tp} GPUs; {num_idle} of {num_gpus} stay idle")
    update: dict[str, object] = {"device": devices}
    if not settings.model_fields_set & {"prefill", "decode", "both"}:
        each = max(1, len(devices) // len(settings.model))
        has_filler = bool(settings.prefill_args) and each > 1
        update["prefill"], update["decode"], update["both"] = 0, each, 0
        if has_filler:
            update["prefill"], update["decode"] = 1, each - 1
        elif each > 1:
            update["decode"], update["both"] = 0, each
    return settings.model_copy(update=update)


def with_gateways(settings: UpSettings, num_cores: int) -> UpSettings:
    """Settings, whose devices are resolved, in which the number of gateways `auto` is too.

    A worker on a GPU makes at most about as many tokens a second as one gateway streams, and a
    worker on the CPU far fewer, so each that owns requests on GPUs gets a gateway, as far as cores
    are left beside all workers. The number stays while the mesh runs.
    """
    if settings.gateways != "auto":
        return settings
    num_models, are_gpus = len(settings.model), [device != "cpu" for device in settings.device]
    num_owners = num_models * (settings.decode + settings.both)
    num_workers = num_owners + num_models * settings.prefill
    num_left = num_cores - CORES_A_WORKER * num_workers
    wanted = min(num_owners if all(are_gpus) else 1, num_left // CORES_A_GATEWAY, MAX_GATEWAYS)
    if settings.rest:
        wanted = min(wanted, abs(settings.rest_port - settings.grpc_port))
    return settings.model_copy(update={"gateways": max(1, wanted)})


def _grouped(devices: list[str], tp: int) -> list[str]:
    groups = [",".join(devices[at : at + tp]) for at in range(0, len(devices) - tp + 1, tp)]
    if not groups:
        raise ConfigError(
            f"--tp {tp}: a worker takes {tp} GPUs, and there are {len(devices)}; lower --tp",
            param="tp",
        )
    return groups
