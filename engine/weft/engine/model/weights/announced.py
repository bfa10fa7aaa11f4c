"""What a trainer says of the tensors of a call, by columns. Models of experts have tens of
thousands of tensors; a GPU copies one in the time that Python takes for a few objects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from weft.contract.errors import ModelError
from weft.contract.weights import SentTensor

_ALIGNMENT_BYTES = 256

_Numbers: TypeAlias = npt.NDArray[np.int64]


class Announced(NamedTuple):
    names: Sequence[str]
    dtypes: Sequence[str]
    """Names of torch dtypes."""
    shapes: Sequence[Sequence[int]]

    def part(self, wanted: slice) -> Announced:
        return Announced(self.names[wanted], self.dtypes[wanted], self.shapes[wanted])

    def sizes(self) -> _Numbers:
        """Bytes of each tensor. Raises ModelError for a name that is no dtype."""
        pairs = zip(self.dtypes, self.shapes, strict=True)
        return np.array([_num_bytes(dtype, tuple(shape)) for dtype, shape in pairs], np.int64)


class Handles(NamedTuple):
    """Where the tensors of a call lie on one GPU, or in the host's memory."""

    memory: Sequence[str]
    """Each piece once: the CUDA driver's handle in hex, or the name of shared memory."""
    which: _Numbers
    """For each tensor the place of its piece in `memory`; -1: it has no handle here."""
    offsets: _Numbers


class Layout(NamedTuple):
    """Some consecutive tensors of a call, which lie in one piece of memory."""

    tensors: slice
    dtypes: Sequence[str]
    sizes: _Numbers
    begins: _Numbers
    """Offsets of the tensors, each aligned for any dtype."""
    num_bytes: int

    def split(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that lie in `memory`, [num_bytes] uint8: flat, in their dtypes."""
        found, at = list[torch.Tensor](), 0
        ends = [*self.begins[1:].tolist(), self.num_bytes]
        for name, run in groupby(self.dtypes):
            dtype, first = dtype_of(name), at
            at += len(list(run))
            begin, end = int(self.begins[first]), ends[at - 1]
            widths = np.diff(self.begins[first:at], append=end) // dtype.itemsize
            counts = self.sizes[first:at] // dtype.itemsize
            parts = torch.split(memory[begin:end].view(dtype), widths.tolist())
            wanted = zip(parts, widths.tolist(), counts.tolist(), strict=True)
            found += [part if width == count else part[:count] for part, width, count in wanted]
        return found


def layouts(tensors: Announced, sizes: _Numbers, most_bytes: int) -> Iterator[Layout]:
    """Groups that each end with the tensor that makes them larger than `most_bytes`; 0: each tensor
    by itself. Trainers that pack divide tensors in the same way.
    """
    ends, first = np.cumsum(sizes), 0
    while first < len(sizes):
        before = ends[first] - sizes[first]
        end = int(np.searchsorted(ends, before + most_bytes, side="right")) + 1
        end = min(end if most_bytes else first + 1, len(sizes))
        own = sizes[first:end]
        padded = -(-own // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        places = np.cumsum(padded)
        dtypes = tensors.dtypes[first:end]
        yield Layout(slice(first, end), dtypes, own, places - padded, int(places[-1]))
        first = end


def encode_tensors(tensors: Sequence[SentTensor]) -> str:
    columns = Announced(
        [one.name for one in tensors],
        [one.dtype for one in tensors],
        [one.shape for one in tensors],
    )
    places = dict[str, dict[str, int]]()
    lent = dict[str, tuple[list[int], list[int]]]()
    for at, tensor in enumerate(tensors):
        for one in tensor.handles:
            if one.gpu not in lent:
                places[one.gpu] = {}
                lent[one.gpu] = [-1] * len(tensors), [0] * len(tensors)
            known, (which, offsets) = places[one.gpu], lent[one.gpu]
            which[at] = known.setdefault(one.shm or one.handle.hex(), len(known))
            offsets[at] = one.offset
    return json.dumps([*columns, {gpu: [list(places[gpu]), *own] for gpu, own in lent.items()}])


def decode_tensors(text: str) -> tuple[Announced, Mapping[str, Handles]]:
    """The tensors of a call, and their handles by the GPU's UUID; empty: the host's memory."""
    names, dtypes, shapes, lent = json.loads(text)
    return Announced(names, dtypes, shapes), {gpu: _handles(*own) for gpu, own in lent.items()}


def _handles(memory: list[str], which: list[int], offsets: list[int]) -> Handles:
    return Handles(memory, np.array(which, np.int64), np.array(offsets, np.int64))


@cache
def dtype_of(name: str) -> torch.dtype:
    """Raises ModelError for a name that is no dtype."""
    found: Any = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"{name[:64]!r} is no dtype", param="dtypes")
    return found


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * dtype_of(dtype).itemsize
