"""A trainer's side of lent tensors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from weft.contract.weights import SentTensor, TensorHandle
from weft.pages.transfer.device_memory import exported
from weft.testing.models.senders import described

_ALIGNMENT = 64


@contextmanager
def lent_by_host(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[SentTensor]]:
    """Puts tensors into one piece of POSIX shared memory."""
    name = f"weft-test-{secrets.token_hex(8)}"
    path, found, at = os.path.join("/dev/shm", name), list[SentTensor](), 0
    try:
        with open(path, "xb") as file:
            for one, tensor in zip(described(tensors), tensors.values(), strict=True):
                file.seek(at)
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                found.append(replace(one, handles=[TensorHandle(shm=name, offset=at)]))
                at += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        yield found
    finally:
        os.unlink(path)


def lent_by_gpu(tensors: Mapping[str, torch.Tensor]) -> list[SentTensor]:
    """Handles of contiguous tensors on GPUs, for other processes. Work on them has ended when this
    returns; the tensors must live until they were taken.
    """
    torch.cuda.synchronize()
    found = []
    for one, tensor in zip(described(tensors), tensors.values(), strict=True):
        handle, offset = exported(tensor.data_ptr(), tensor.device.index)
        gpu = str(torch.cuda.get_device_properties(tensor.device).uuid)
        own = TensorHandle(gpu=gpu, handle=handle, offset=offset)
        found.append(replace(one, handles=[own]))
    return found
