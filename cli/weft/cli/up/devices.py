"""Default devices and numbers of workers of `weft up`."""

from __future__ import annotations

from weft.cli.up.settings import UpSettings

GPUS_A_FILLER = 4
"""One GPU in this many prefills for the others; decode workers also prefill where that is
faster.
"""


def with_devices(settings: UpSettings, num_gpus: int) -> UpSettings:
    """Settings in which `auto` is resolved.

    Without GPUs workers run on the CPU. Otherwise they take the GPUs in turn. Without given numbers
    of workers each GPU gets one: a single GPU a worker for both, since two would only share it; of
    several GPUs one in `GPUS_A_FILLER`, and at least one, gets a prefill worker, and the rest
    decode workers.

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
