"""Fills the memory of a model that is in use with other numbers.

A model's constructor asks `Weights` for its parameters in an order that only the configuration
decides. To change them, the constructor runs again over other numbers: each parameter that it gets
is copied to where the first run's lies, and what it computes from parameters is copied afterwards.
So addresses stay as native operations and captured graphs know them, and beyond the model this
needs memory for one parameter.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from weft.contract.errors import ModelError

_Made = TypeVar("_Made")
_LEAVES = (str, bytes, int, float, complex, type, torch.dtype, torch.device, ctypes.Structure)


Constant: TypeAlias = Callable[[Hashable, Callable[[], torch.Tensor]], torch.Tensor]
"""`Parameters.constant`."""


class Parameters:
    """The tensors that a model's constructor got, in the order in which it asked for them."""

    def __init__(self) -> None:
        self._made: list[list[weakref.ref[torch.Tensor]]] = []
        self._constants: dict[Hashable, weakref.ref[torch.Tensor]] = {}
        self._at: int | None = None
        """Place of the next parameter; None: the first run, which is recorded."""
        self.has_written = False
        """Whether the last run has written to the first one's memory."""

    def again(self) -> None:
        """Begins a run that fills the memory of the first one."""
        self._at, self.has_written = 0, False

    def keep(self, made: _Made) -> _Made:
        """Records a parameter, or in a later run moves it to the first one's memory. Raises
        ModelError if it is of another shape.
        """
        found = list[torch.Tensor]()
        if isinstance(made, torch.Tensor):
            found.append(made)
        else:
            found += tensors_of(made)
        if self._at is None:
            self._made.append([weakref.ref(tensor) for tensor in found])
            return made
        if self._at == len(self._made) or len(self._made[self._at]) != len(found):
            raise ModelError("the weights are read in another order than those before")
        for known, new in zip(self._made[self._at], found, strict=True):
            if (old := known()) is not None and not new.is_mkldnn:
                self.has_written = True
                _move(old, new)
        self._at += 1
        return made

    def constant(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor that the configuration alone decides, such as a table of rotations: it is made
        once, and later runs get the same while it is in use.
        """
        known = self._constants.get(key)
        found = None if known is None else known()
        if found is None:
            found = make()
            self._constants[key] = weakref.ref(found)
        return found

    def tensors(self) -> list[torch.Tensor]:
        """The recorded tensors that are still in use."""
        known = (one() for made in self._made for one in made)
        return [tensor for tensor in known if tensor is not None]

    def digest(self) -> bytes:
        """32 bytes over all parameters in the form in which they lie in memory, in their order."""
        digest = hashlib.blake2b(digest_size=32)
        for made in self._made:
            for known in made:
                if (tensor := known()) is not None:
                    digest.update(_bytes_of(tensor))
        return digest.digest()


def _move(old: torch.Tensor, new: torch.Tensor) -> None:
    if is_same_memory(old, new):
        return
    check_alike(old, new, "a parameter")
    old.copy_(new)
    place = old.storage_offset(), old.size(), old.stride()
    new.set_(old.untyped_storage(), *place)


def check_alike(old: torch.Tensor, new: torch.Tensor, what: str) -> None:
    """Raises ModelError if two tensors differ in shape, dtype or device."""
    if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        raise ModelError(
            f"{what} is {tuple(old.shape)} {old.dtype}, the new one {tuple(new.shape)} {new.dtype}"
        )


def is_same_memory(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old is new or not old.numel():
        return True
    return not old.is_mkldnn and old.data_ptr() == new.data_ptr() and old.shape == new.shape


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    dense = tensor.to_dense() if tensor.is_mkldnn else tensor
    flat = dense.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    numbers: Any = flat.numpy()
    return memoryview(numbers)


class Numbers(NamedTuple):
    """What an object reaches, with places in words."""

    tensors: list[tuple[str, torch.Tensor]]
    """Each once."""
    floats: list[tuple[str, float]]
    """Those beside tensors."""


def numbers_of(root: object, besides: Sequence[object] = ()) -> Numbers:
    """The numbers that an object reaches, but not through any of `besides`."""
    found = Numbers([], [])
    seen = {id(one) for one in besides}
    left: list[tuple[str, object]] = [("", root)]
    while left:
        path, value = left.pop()
        if isinstance(value, float):
            found.floats.append((path, value))
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.tensors.append((path, value))
            continue
        parts = _parts_of(value)
        left += [(f"{path}.{name}", parts[name]) for name in reversed(parts)]
    return found


def tensors_of(root: object) -> list[torch.Tensor]:
    """The tensors that an object reaches, each once."""
    return [tensor for _, tensor in numbers_of(root).tensors]


def parts_of_kind(root: object, kinds: tuple[type, ...]) -> list[Any]:
    """The objects of some types that an object holds, each once. Functions hold nothing."""
    seen, found = set[int](), list[Any]()
    leaves = (torch.Tensor, FunctionType, MethodType, *_LEAVES)
    left: list[object] = [root]
    while left:
        value = left.pop()
        if value is None or id(value) in seen or isinstance(value, leaves):
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            found.append(value)
        else:
            left += _parts_of(value).values()
    return found


def pairs_of(old: object, new: object) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The tensors at the same places of two objects of equal structure, with these places. What
    only one of them has yet, such as tables made on first use, is left out, and so is what both
    share.

    Raises:
        ModelError: Two floats at the same place differ, or two objects are of different types.
    """
    seen = set[int]()
    left: list[tuple[str, object, object]] = [("", old, new)]
    while left:
        path, first, second = left.pop()
        if first is None or second is None or first is second or id(first) in seen:
            continue
        if type(first) is not type(second):
            raise ModelError(f"{path} was {type(first).__name__}, it is {type(second).__name__}")
        if isinstance(first, torch.Tensor):
            assert isinstance(second, torch.Tensor)
            seen.add(id(first))
            yield path, first, second
        elif isinstance(first, _LEAVES):
            if isinstance(first, float) and first != second:
                raise ModelError(f"{path} was {first}, it is {second}: a restart is needed")
        else:
            seen.add(id(first))
            parts, others = _parts_of(first), _parts_of(second)
            left += [
                (f"{path}.{name}", parts[name], others[name])
                for name in reversed(parts)
                if name in others
            ]


def _parts_of(value: object) -> Mapping[object, object]:
    """What an object holds, by names or places."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return dict(enumerate(value))
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"self": value.__self__}
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        return {number: cell.cell_contents for number, cell in enumerate(cells)}
    if is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    found = dict[object, object](getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found
