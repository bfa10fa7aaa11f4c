"""Members of a NCCL group on a machine with fewer GPUs than members."""

from __future__ import annotations

import torch


def sharing_a_gpu(name: str) -> dict[str, str]:
    """The environment of a member that shares its GPU with others.

    NCCL refuses a GPU twice on one host, and compares the hosts' names. It connects members of
    different hosts over sockets.
    """
    return {"NCCL_HOSTID": name, "NCCL_NET": "Socket"}


def one_of_two(name: str) -> dict[str, str]:
    """The environment of one of two members, each of which has a GPU of its own if it can."""
    return sharing_a_gpu(name) if torch.cuda.device_count() == 1 else {}
