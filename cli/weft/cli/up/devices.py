"""Devices and numbers of workers of `weft up` where the user has not said them."""

from __future__ import annotations

from weft.cli.up.settings import UpSettings

GPUS_A_FILLER = 4
"""GPUs of which one prefills for the others: decode workers prefill too where that is faster."""


def with_devices(settings: UpSettings, num_gpus: int) -> UpSettings:
    """Settings in which `auto` is resolved.

    Without GPUs workers run on the CPU. Otherwise they take the GPUs in turn, and where no numbers
    of workers are given each GPU gets one: of one model on one GPU a whole worker, since two would
    only share it; on several GPUs one prefill worker for each `GPUS_A_FILLER`, at least one, and
    decode workers on the rest.

    Args:
        settings: As given.
        num_gpus: That workers can use.
    """
    if settings.device not in ([], ["auto"]):
        return settings
    if not num_gpus:
        return settings.model_copy(update={"device": ["cpu"]})
    update: dict[str, object] = {"device": [f"cuda:{index}" for index in range(num_gpus)]}
    if not settings.model_fields_set & {"prefill", "decode"}:
        each = max(1, num_gpus // len(settings.model))
        update["prefill"] = 0 if each == 1 else max(1, each // GPUS_A_FILLER)
        update["decode"] = max(1, each - max(1, each // GPUS_A_FILLER))
    return settings.model_copy(update=update)
