"""A model's tensors as they lie in memory, packed for the device, so that they can be copied to
another process that has the same model.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from weft.contract.errors import ModelError
from weft.engine.base.packing import packing_version
from weft.engine.model.weights.refill import numbers_of

_DIGEST_BYTES = 32


class PackedModel(NamedTuple):
    """Two processes with equal values here may copy tensors from one another as bytes."""

    scheme: bytes
    """32 bytes over the configuration, the dtype and the number format, without the numbers."""
    share: str
    """Which part of the model this process has, in words."""
    packing: str
    """The code and the machine for which the tensors are packed."""
    constants: bytes
    """32 bytes over the numbers that lie beside the tensors, such as scales that became factors."""


class Origin(NamedTuple):
    """What a model was made from when its process began."""

    digest: bytes
    """The model's first."""
    files: bytes
    """A sketch of its files; empty: there were none."""


class PackedTensors:
    """The tensors that a model reaches when it was just loaded, by their places in it.

    Args:
        besides: Objects that the model uses and that have tensors of their own.
    """

    def __init__(
        self,
        parts: object,
        scheme: bytes,
        share: str,
        device: torch.device,
        origin: Origin,
        besides: Sequence[object] = (),
    ) -> None:
        tensors, floats = numbers_of(parts, besides)
        self._tensors = [(place, weakref.ref(one)) for place, one in tensors if not one.is_meta]
        self.origin = origin
        constants = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for place, number in floats:
            constants.update(f"{place} {number!r}\n".encode())
        self.model = PackedModel(scheme, share, packing_version(device), constants.digest())

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are still in use, each with its place, which names it."""
        known = ((place, one()) for place, one in self._tensors)
        return [(place, tensor) for place, tensor in known if tensor is not None]


class PackedSource(Protocol):
    """Another process that has the same model."""

    @property
    def model_digest(self) -> bytes:
        """32 bytes that name its weights, as `LoadedModel.digest`."""

    @property
    def start_digest(self) -> bytes:
        """32 bytes that name the weights with which it began."""

    @property
    def files(self) -> bytes:
        """The sketch of the files from which it began."""

    @property
    def num_bytes(self) -> int:
        """Memory of its large tensors on a GPU."""

    def check(self, packed: PackedTensors) -> None:
        """Raises WeftError unless it has tensors of the same forms, packed in the same way."""

    def reached(self, device: torch.device) -> AbstractContextManager[None]:
        """A context in which its numbers can be copied to a device. Connects in a thread, so that
        the caller lays out tensors meanwhile.
        """

    def fill(self, packed: PackedTensors) -> None:
        """Copies its numbers into a model's tensors, in `reached`, and compares the digest of each.
        Raises WeftError if it cannot, or if they differ; the tensors then have any values.
        """


def span_of(place: str, tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) of the memory that a tensor fills. Raises ModelError if it has gaps, or is
    in a form whose memory PyTorch does not show.
    """
    if tensor.is_mkldnn:
        raise ModelError(f"{place} lies in a form of oneDNN's, which has no address")
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    count = 1
    for stride, size in sorted((stride, size) for stride, size in axes if stride and size > 1):
        if stride != count:
            raise ModelError(f"{place} has gaps in its memory")
        count *= size
    num_bytes = count * tensor.element_size() if tensor.numel() else 0
    return tensor.data_ptr() if num_bytes else 0, num_bytes


def bytes_of(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8: the memory of a tensor with that span."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    at = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), at, (num_bytes,), (1,))
