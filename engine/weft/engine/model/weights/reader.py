"""The port to a checkpoint, through which loading reads tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch


class TensorSlice(NamedTuple):
    """A part of a checkpoint's tensor, or the whole tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor that the configuration calls for."""
    slices: tuple[int | slice, ...] = ()
    """Part of each axis, from the first on. An int drops its axis, later axes are whole, and slices
    have no steps.
    """

    @property
    def size(self) -> tuple[int, ...]:
        axes = zip(self.shape, self.slices, strict=False)
        found = [len(range(size)[one]) for size, one in axes if isinstance(one, slice)]
        return (*found, *self.shape[len(self.slices) :])


class CheckpointReader(Protocol):
    """Reads parameters by their full names, in any order, each part as often as needed."""

    def has(self, name: str) -> bool: ...

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """None: no tensor has this name, or it may have any shape."""

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Dtype in the file; None: no tensor has this name, or its format is no dtype."""

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        """Copies a part of a tensor, converted to the dtype of `out`, whose shape is `part.size`.

        Floats are read into floats, whole numbers and truth values into whole numbers. A reader may
        note a missing tensor for `finish`, so that one message names several; `out` then becomes
        zeros. For an `out` on the meta device the tensor is checked and not read. Raises ModelError
        if the tensor is not of `part.shape`, has a dtype of another kind, or has a number that is
        not finite, which `finish` may report instead.
        """

    def read_each(self, parts: Sequence[TensorSlice], outs: Sequence[torch.Tensor]) -> None:
        """Reads each part into its tensor, as `read_into` does. The tensors are flat, of one dtype
        and on one device.
        """
        for part, out in zip(parts, outs, strict=True):
            self.read_into(part, out.view(part.size))

    def skip(self, prefix: str) -> None:
        """Another rank reads the tensors whose names begin with `prefix`, which ends in a dot."""

    def finish(self) -> None:
        """Ends reading. Raises ModelError if tensors are missing, no part of some tensor was read,
        or one has a number that is not finite.
        """


class Wrapped(CheckpointReader):
    """A reader that passes every call to another one."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader

    def has(self, name: str) -> bool:
        return self._reader.has(name)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._reader.shape_of(name)

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self._reader.dtype_of(name)

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        self._reader.read_into(part, out)

    def skip(self, prefix: str) -> None:
        self._reader.skip(prefix)

    def finish(self) -> None:
        self._reader.finish()


class Renamed(Wrapped):
    """A reader of a checkpoint whose names differ from the models'. `name_of` returns the
    checkpoint's name of a tensor.
    """

    def __init__(self, reader: CheckpointReader, name_of: Callable[[str], str]) -> None:
        super().__init__(reader)
        self._name_of = name_of

    def has(self, name: str) -> bool:
        return self._reader.has(self._name_of(name))

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._reader.shape_of(self._name_of(name))

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self._reader.dtype_of(self._name_of(name))

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        self._reader.read_into(part._replace(name=self._name_of(part.name)), out)

    def read_each(self, parts: Sequence[TensorSlice], outs: Sequence[torch.Tensor]) -> None:
        named = [part._replace(name=self._name_of(part.name)) for part in parts]
        self._reader.read_each(named, outs)

    def skip(self, prefix: str) -> None:
        self._reader.skip(self._name_of(prefix))


class Transposed(Wrapped):
    """A reader of a checkpoint that stores the matrices for which `is_transposed` is true as
    [columns, rows].
    """

    def __init__(self, reader: CheckpointReader, is_transposed: Callable[[str], bool]) -> None:
        super().__init__(reader)
        self._is_transposed = is_transposed

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        found = self._reader.shape_of(name)
        return found[::-1] if found is not None and self._turns(name, found) else found

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        if not self._turns(part.name, part.shape):
            self._reader.read_into(part, out)
            return
        slices = (*part.slices, *[slice(None)] * (2 - len(part.slices)))
        turned = torch.empty(
            out.shape[::-1], dtype=out.dtype, device="meta" if out.is_meta else "cpu"
        )
        self._reader.read_into(TensorSlice(part.name, part.shape[::-1], slices[::-1]), turned)
        out.copy_(turned.t())

    def _turns(self, name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and self._is_transposed(name)


class ChangedWeights(Wrapped):
    """A reader that adds `changes` to the parameters that it reads, in float32. They are by full
    name, of the parameter's shape.
    """

    def __init__(self, reader: CheckpointReader, changes: Mapping[str, torch.Tensor]) -> None:
        super().__init__(reader)
        self._changes = changes

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        """Raises ValueError if a change has another shape than its parameter."""
        self._reader.read_into(part, out)
        change = self._changes.get(part.name)
        if change is None:
            return
        if change.shape != part.shape:
            raise ValueError(f"{part.name}: {tuple(change.shape)} cannot change {part.shape}")
        out.copy_(out.float() + change[part.slices].to(out.device))
