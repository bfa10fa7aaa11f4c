"""The tensors of a checkpoint as a trainer sends them, one after another, in place of files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from weft.contract.errors import ModelError
from weft.engine.base.content_digest import ContentDigests
from weft.engine.model.weights.announced import Announced, dtype_of
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice
from weft.engine.model.weights.tensor_reads import are_finite
from weft.kernels.shared.many_tensors import copy_each, finite_if_all

_NAMES_SHOWN = 8
MAX_AHEAD_BYTES = 1 << 30
"""Bytes of tensors that may be kept while the model reads others, beside the rest of the memory
that the first of them shares: a GPU with weights and KV has room for little more.
"""
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
    tensor is kept until it was read for the last time. Those that are sent in the order of reading
    take at most `MAX_AHEAD_BYTES` and what one `put` brings; out of order, those between as well.
    Nothing waits for a GPU before `finish` and `digest`.
    """

    def __init__(self, known: Mapping[str, KnownTensor]) -> None:
        self._known = known
        self._changed = threading.Condition()
        self._here: dict[str, torch.Tensor] = {}
        self._reads_left: dict[str, int] = {}
        self._num_bytes = 0
        """Of the tensors that are here."""
        self._awaited: str | None = None
        """The tensor for which the reader waits."""
        self._names = set[str]()
        """Of the tensors that were sent."""
        self._digests: list[tuple[Sequence[str], Sequence[torch.dtype], ContentDigests]] = []
        """Names and dtypes of tensors that came together, and the digests of their numbers."""
        self._unchecked: list[tuple[list[str], torch.Tensor]] = []
        """[names] each: as `finite_if_all`, or of FP8 whether all numbers are finite."""
        self._is_complete = False
        self._problem = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors that the model's files have."""
        return tuple(self._known)

    # -- what is sent ------------------------------------------------------------------------------

    def check(self, tensors: Announced) -> None:
        """Raises ModelError unless the model has these tensors, in these shapes, and none of them
        was sent before.
        """
        seen = set[str]()
        for name, dtype, shape in zip(*tensors, strict=True):
            known = self._known.get(name)
            if known is None:
                raise ModelError(f"the model has no tensor {name}", param="names")
            if name in self._names or name in seen:
                raise ModelError(f"{name} is sent twice in one update", param="names")
            seen.add(name)
            if tuple(shape) != known.shape:
                raise ModelError(
                    f"{name} is sent as {tuple(shape)}, the model has {known.shape}",
                    param="shapes",
                )
            sent = dtype_of(dtype)
            both_floats = sent in _FLOATS and known.dtype in _FLOATS
            if sent != known.dtype and not both_floats:
                raise ModelError(
                    f"{name} is sent as {dtype}, the checkpoint has {known.dtype}", param="dtypes"
                )

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The tensors, at least one and on one device, belong to this object from now on. Each may
        be flat. If many are here already, waits until the reader has read them, wants another one
        or has ended.
        """
        flat = [one if one.dim() == 1 else one.reshape(-1) for one in tensors.values()]
        digests = ContentDigests(flat)
        with self._changed:
            self._names.update(tensors)
            self._digests.append((list(tensors), [one.dtype for one in flat], digests))
            for name, tensor in zip(tensors, flat, strict=True):
                if reads := self._known[name].num_reads:
                    self._here[name] = tensor
                    self._reads_left[name] = reads
                    self._num_bytes += tensor.nbytes
            self._changed.notify_all()
            self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        if self._num_bytes <= MAX_AHEAD_BYTES or self._is_complete:
            return True
        return self._awaited is not None and self._awaited not in self._here

    def complete(self) -> None:
        """No further tensor comes, or none is read: reading one that is not there raises
        ModelError.
        """
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def close(self, problem: str = "") -> None:
        """As `complete`, and forgets those that came."""
        with self._changed:
            self._is_complete = True
            self._problem = self._problem or problem
            self._here.clear()
            self._num_bytes = 0
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
        contents = self._contents(self._names)
        names = sorted(contents)
        whole = [json.dumps(names).encode(), *(contents[name] for name in names)]
        return hashlib.blake2b(b"".join(whole), digest_size=32).digest()

    def _contents(self, names: Set[str]) -> dict[str, bytes]:
        """Their dtypes, shapes and sums, from which their lengths follow."""
        with self._changed:
            digests = [one for one in self._digests if not names.isdisjoint(one[0])]
        return {
            name: _head(dtype, self._known[name].shape) + sums
            for own, dtypes, one in digests
            for name, dtype, sums in zip(own, dtypes, one.sums(), strict=True)
            if name in names
        }

    def await_end(self) -> None:
        """Waits for `complete`, so that `digest` has all tensors. Raises ModelError if the update
        is given up.
        """
        with self._changed:
            self._awaited = ""  # No tensor.
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_complete)
            if self._problem:
                raise ModelError(self._problem)

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
        self.read_each([part], [out.view(-1)])

    def read_each(self, parts: Sequence[TensorSlice], outs: Sequence[torch.Tensor]) -> None:
        """Copies tensors that are there already together."""
        end = 0
        while end < len(parts):
            begin, found = end, self._take(parts[end:], outs[end:])
            end += len(found)
            if outs[begin].is_meta:  # Another stage has the parameter.
                continue
            places = outs[begin:end]
            pairs = zip(found, places, strict=True)
            copy_each(found, [out if one.dim() == 1 else out.view(one.shape) for one, out in pairs])
            self._check_finite([part.name for part in parts[begin:end]], places)

    def _take(
        self, parts: Sequence[TensorSlice], outs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The first of the parts, for which this waits, and those after it that are there: flat,
        unless they are parts of tensors.
        """
        first, found = parts[0].name, list[torch.Tensor]()
        with self._changed:
            self._awaited = first
            self._changed.notify_all()
            self._changed.wait_for(lambda: first in self._here or self._is_complete)
            self._awaited = None
            if first not in self._here:
                raise ModelError(self._problem or self._why_not(first))
            for (name, shape, slices), out in zip(parts, outs, strict=True):
                tensor = self._here.get(name)
                if tensor is None:
                    break
                self._reads_left[name] -= 1
                if not self._reads_left[name]:
                    del self._here[name]
                    self._num_bytes -= tensor.nbytes
                is_whole = tensor.numel() == out.numel()
                found.append(tensor if is_whole else tensor.view(shape)[slices])
            self._changed.notify_all()
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
        self._unchecked.append(([name for name, _ in filled], torch.stack(list(found))))

    def skip(self, prefix: str) -> None: ...

    def finish(self) -> None:
        """Raises ModelError if a number that was read is not finite."""
        alike = dict[tuple[torch.dtype, torch.device], list[tuple[list[str], torch.Tensor]]]()
        for names, values in self._unchecked:  # Some are read by way of the host.
            alike.setdefault((values.dtype, values.device), []).append((names, values))
        self._unchecked = []
        for (dtype, _), found in alike.items():
            values = torch.cat([one for _, one in found])
            answers = (values if dtype == torch.bool else values.isfinite()).tolist()
            read = chain.from_iterable(names for names, _ in found)
            for name, is_finite in zip(read, answers, strict=True):
                if not is_finite:
                    raise _not_finite(name)


@lru_cache(maxsize=1024)
def _head(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{dtype} {shape} ".encode()


def _not_finite(name: str) -> ModelError:
    return ModelError(f"{name} has a number that is not finite in the dtype it is read as")


def listed(names: Sequence[str]) -> str:
    """The first of some names, and how many there are."""
    more = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
