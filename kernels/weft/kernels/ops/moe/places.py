"""The places of single experts in a layer's weights, so that one can be put where another was."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
from weft.kernels.ops.linear.spec import LinearWeight, NativeForm
from weft.kernels.ops.moe.spec import ExpertWeights
from weft.kernels.ops.plain_experts.spec import PlainExperts
from weft.kernels.shared.cpu import WeightStruct


def tensors_at(w: ExpertWeights | PlainExperts, place: int) -> list[torch.Tensor]:
    """All tensors of one expert; writing them changes the layer's weights."""
    if w.stacked is not None:
        biases = w.biases if isinstance(w, ExpertWeights) else None
        whole = [tensor for part in w.stacked for _, tensor in _tensors_of(part)]
        return [tensor[place] for tensor in (*whole, *(biases or ()))]
    found = list[torch.Tensor]()
    for weight in _products(w, place):
        found += [tensor for _, tensor in _tensors_of(weight.form)]
        found += [] if weight.bias is None else [weight.bias]
    return found


def form_at(w: ExpertWeights | PlainExperts, place: int) -> str:
    """What two experts must have in common for one to take the other's place, in words."""
    tensors = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors_at(w, place))
    if w.stacked is not None:
        return tensors
    structs = (w.form.struct for w in _products(w, place) if isinstance(w.form, NativeForm))
    return f"{tensors}; {[_numbers_of(struct) for struct in structs]}"


def can_move(w: ExpertWeights | PlainExperts) -> bool:
    """Whether the bytes of a layer's experts are known to PyTorch."""
    return not any(tensor.is_mkldnn for tensor in tensors_at(w, 0))


def _products(w: ExpertWeights | PlainExperts, place: int) -> Sequence[LinearWeight]:
    if isinstance(w, ExpertWeights):
        return w.w13[place], w.w2[place]
    return w.up[place], w.down[place]


def _tensors_of(part: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.Tensor):
        yield "", part
        return
    for field in fields(part):  # type: ignore[arg-type]
        if isinstance(found := getattr(part, field.name), torch.Tensor):
            yield field.name, found


def _numbers_of(struct: WeightStruct) -> list[tuple[str, float]]:
    """The fields of a native weight that are no addresses."""
    named = (field[:2] for field in WeightStruct._fields_)
    return [(name, getattr(struct, name)) for name, kind in named if kind is not ctypes.c_void_p]
