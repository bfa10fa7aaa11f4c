"""The tensors of a checkpoint as a trainer sends them, one after another, in place of files."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from weft.checkpoint.digest import combine
from weft.contract.errors import ModelError
from weft.contract.weights import SentTensor
from weft.engine.base.content_digest import content_digest
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.tensor_reads import are_finite

_NAMES_SHOWN = 8
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class KnownTensor(NamedTuple):
    """A tensor as it was when the model was loaded."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: of no dtype that is read."""
    num_reads: int
    """Times that the constructors read it on this rank; the same each time they run."""
    is_used: bool
    """Whether the model has a use for it, on whatever rank."""


class SentTensors:
    """A `CheckpointReader` whose tensors come while they are read, in any order. One thread reads,
    another one puts. A tensor is kept until it was read for the last time, so those that are sent
    in the order of reading take no memory.
    """

    def __init__(self, known: Mapping[str, KnownTensor]) -> None:
        self._known = known
        self._changed = threading.Condition()
        self._here: dict[str, torch.Tensor] = {}
        self._reads_left: dict[str, int] = {}
        self._contents: dict[str, bytes] = {}
        """32 bytes of each tensor that was sent, without its name."""
        self._is_closed = False
        self._problem = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors that the model's files have."""
        return tuple(self._known)

    # -- what is sent ------------------------------------------------------------------------------

    def check(self, tensors: Sequence[SentTensor]) -> None:
        """Raises ModelError unless the model has these tensors, in these shapes, and none of them
        was sent before.
        """
        seen = set[str]()
        for one in tensors:
            known = self._known.get(one.name)
            if known is None:
                raise ModelError(f"the model has no tensor {one.name}", param="names")
            if one.name in self._contents or one.name in seen:
                raise ModelError(f"{one.name} is sent twice in one update", param="names")
            seen.add(one.name)
            if tuple(one.shape) != known.shape:
                raise ModelError(
                    f"{one.name} is sent as {tuple(one.shape)}, the model has {known.shape}",
                    param="shapes",
                )
            sent = dtype_of(one.dtype)
            both_floats = sent in _FLOATS and known.dtype in _FLOATS
            if sent != known.dtype and not both_floats:
                raise ModelError(
                    f"{one.name} is sent as {one.dtype}, the checkpoint has {known.dtype}",
                    param="dtypes",
                )

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """The tensor belongs to this object from now on."""
        content = content_digest(tensor)
        with self._changed:
            self._contents[name] = content
            if reads := self._known[name].num_reads:
                self._here[name] = tensor
                self._reads_left[name] = reads
            self._changed.notify_all()

    def close(self, problem: str = "") -> None:
        """No further tensor comes: reading one raises ModelError."""
        with self._changed:
            self._is_closed = True
            self._problem = self._problem or problem
            self._here.clear()
            self._changed.notify_all()

    @property
    def lacking(self) -> list[str]:
        """Names of the model's tensors that were not sent yet; the same on all ranks."""
        with self._changed:
            return [
                name
                for name, one in self._known.items()
                if one.is_used and name not in self._contents
            ]

    def check_alike(self, name: str, copy: str) -> None:
        """Raises ModelError if two tensors, where both were sent, differ."""
        with self._changed:
            first, second = (self._contents.get(one) for one in (name, copy))
        if first and second and first != second:
            raise ModelError(f"{copy} is not {name}, though config.json has tie_word_embeddings")

    def digest(self) -> bytes:
        """32 bytes over the names and contents of all tensors, in whatever order they came."""
        with self._changed:
            named = [combine(name.encode(), one) for name, one in self._contents.items()]
            total = sum(int.from_bytes(one, "little") for one in named)
        return (total % (1 << 256)).to_bytes(32, "little")

    # -- what is read ------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        return name in self._known

    def has_below(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._known)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._known[name].shape if name in self._known else None

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self._known[name].dtype if name in self._known else None

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        """Waits for the tensor. Raises ModelError also if it does not come any more."""
        tensor = self._take(part.name)
        out.copy_(tensor[part.slices] if part.slices else tensor)
        if out.is_floating_point() and out.numel() and not bool(are_finite(out)):
            raise ModelError(
                f"{part.name} has a number that is not finite in the dtype it is read as"
            )

    def _take(self, name: str) -> torch.Tensor:
        with self._changed:
            self._changed.wait_for(lambda: name in self._here or self._is_closed)
            if name not in self._here:
                raise ModelError(self._problem or f"the update lacks tensors: {name}")
            tensor = self._here[name]
            self._reads_left[name] -= 1
            if not self._reads_left[name]:
                del self._here[name]
            return tensor

    def skip(self, prefix: str) -> None: ...

    def finish(self) -> None: ...


def dtype_of(name: str) -> torch.dtype:
    """Raises ModelError for a name that is no dtype."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"{name[:64]!r} is no dtype", param="dtypes")
    return found


def num_bytes(tensor: SentTensor) -> int:
    return math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many there are."""
    more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
