"""The tensors of a checkpoint as a trainer sends them, one after another, in place of files."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence, Set
from functools import cache
from typing import NamedTuple

import torch
from weft.checkpoint.digest import combine
from weft.contract.errors import ModelError
from weft.contract.weights import SentTensor
from weft.engine.base.content_digest import ContentDigests
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice
from weft.engine.model.weights.tensor_reads import are_finite
from weft.kernels.shared.many_tensors import copy_each, finite_if_all

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


class SentTensors(CheckpointReader):
    """Tensors that come while they are read, in any order. One thread reads, another one puts. A
    tensor is kept until it was read for the last time, so those that are sent in the order of
    reading take no memory. Nothing waits for a GPU before `finish` and `digest`.
    """

    def __init__(self, known: Mapping[str, KnownTensor]) -> None:
        self._known = known
        self._changed = threading.Condition()
        self._here: dict[str, torch.Tensor] = {}
        self._reads_left: dict[str, int] = {}
        self._names = set[str]()
        """Of the tensors that were sent."""
        self._digests: list[tuple[Sequence[str], ContentDigests]] = []
        """Names of tensors that came together, and the digests of their numbers."""
        self._unchecked: list[tuple[str, torch.Tensor]] = []
        """[] each: as `finite_if_all`, or of FP8 whether all numbers are finite."""
        self._is_complete = False
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
            if one.name in self._names or one.name in seen:
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

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The tensors, at least one and on one device, belong to this object from now on."""
        digests = ContentDigests(list(tensors.values()))
        with self._changed:
            self._names.update(tensors)
            self._digests.append((list(tensors), digests))
            for name, tensor in tensors.items():
                if reads := self._known[name].num_reads:
                    self._here[name] = tensor
                    self._reads_left[name] = reads
            self._changed.notify_all()

    def complete(self) -> None:
        """No further tensor comes: reading one that is not there raises ModelError."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def close(self, problem: str = "") -> None:
        """As `complete`, and forgets those that came."""
        with self._changed:
            self._is_complete = True
            self._problem = self._problem or problem
            self._here.clear()
            self._changed.notify_all()

    @property
    def lacking(self) -> list[str]:
        """Names of the model's tensors that were not sent yet; the same on all ranks."""
        with self._changed:
            return [
                name for name, one in self._known.items() if one.is_used and name not in self._names
            ]

    def check_alike(self, name: str, copy: str) -> None:
        """Raises ModelError if two tensors, where both were sent, differ."""
        contents = self._contents({name, copy})
        if len(contents) == 2 and contents[name] != contents[copy]:
            raise ModelError(f"{copy} is not {name}, though config.json has tie_word_embeddings")

    def digest(self) -> bytes:
        """32 bytes over the names and contents of all tensors, in whatever order they came."""
        named = [combine(name.encode(), one) for name, one in self._contents(self._names).items()]
        total = sum(int.from_bytes(one, "little") for one in named)
        return (total % (1 << 256)).to_bytes(32, "little")

    def _contents(self, names: Set[str]) -> dict[str, bytes]:
        with self._changed:
            digests = [(own, one) for own, one in self._digests if not names.isdisjoint(own)]
        found = (pair for own, one in digests for pair in zip(own, one.take(), strict=True))
        return {name: one for name, one in found if name in names}

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
        self.read_each([part], [out])

    def read_each(self, parts: Sequence[TensorSlice], outs: Sequence[torch.Tensor]) -> None:
        """Copies tensors that are there already together."""
        end = 0
        while end < len(parts):
            begin, found = end, self._take(parts[end:], outs[end:])
            end += len(found)
            names = [part.name for part in parts[begin:end]]
            if not outs[begin].is_meta:  # Another stage has the parameter.
                copy_each(found, outs[begin:end])
                self._check_finite(names, outs[begin:end])

    def _take(
        self, parts: Sequence[TensorSlice], outs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The first of the parts, for which this waits, and those after it that are there."""
        first, found = parts[0].name, list[torch.Tensor]()
        with self._changed:
            self._changed.wait_for(lambda: first in self._here or self._is_complete)
            if first not in self._here:
                raise ModelError(self._problem or self._why_not(first))
            for part, out in zip(parts, outs, strict=True):
                tensor = self._here.get(part.name)
                if tensor is None:
                    break
                self._reads_left[part.name] -= 1
                if not self._reads_left[part.name]:
                    del self._here[part.name]
                found.append(tensor if tensor.shape == out.shape else tensor[part.slices])
        return found

    def _why_not(self, name: str) -> str:
        if name in self._names:
            return f"{name} is read more often than when the model was loaded"
        return f"the update lacks tensors: {name}"

    def _check_finite(self, names: Sequence[str], outs: Sequence[torch.Tensor]) -> None:
        """Begins only: `finish` has the answer."""
        filled = [pair for pair in zip(names, outs, strict=True) if pair[1].numel()]
        if not filled or not outs[0].is_floating_point():
            return
        values = [out for _, out in filled]
        is_wide = outs[0].dtype in _FLOATS
        found = finite_if_all(values) if is_wide else [are_finite(one) for one in values]
        self._unchecked += zip([name for name, _ in filled], found, strict=True)

    def skip(self, prefix: str) -> None: ...

    def finish(self) -> None:
        """Raises ModelError if a number that was read is not finite."""
        alike = dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]]()
        for name, one in self._unchecked:  # Some are read by way of the host.
            alike.setdefault((one.dtype, one.device), []).append((name, one))
        self._unchecked = []
        for (dtype, _), pairs in alike.items():
            values = torch.stack([one for _, one in pairs])
            answers = values if dtype == torch.bool else values.isfinite()
            for (name, _), is_finite in zip(pairs, answers.tolist(), strict=True):
                if not is_finite:
                    raise _not_finite(name)


def _not_finite(name: str) -> ModelError:
    return ModelError(f"{name} has a number that is not finite in the dtype it is read as")


@cache
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
