"""The number formats in which the weights of a model's layers are kept and multiplied."""

from __future__ import annotations

from collections import Counter

import torch
from weft.kernels.ops.linear.spec import LinearWeight, NativeForm, OneDnnForm, PlainForm
from weft.kernels.ops.moe.spec import ExpertWeights, StackedWeight
from weft.kernels.shared.formats.fp8 import FP8
from weft.kernels.shared.formats.int_groups import IntGroups
from weft.kernels.shared.formats.packed_groups import PackedExperts, PackedGroups
from weft.kernels.shared.formats.quantised import Fp8Experts


class ComputedFormat:
    """Counts the weights of products as they are packed, without routers and LM heads."""

    def __init__(self) -> None:
        self._weights = Counter[str]()
        self._num_bytes = 0

    @property
    def names(self) -> list[str]:
        """Number formats such as int4 or bfloat16, the largest share of the weights first."""
        return [name for name, _ in self._weights.most_common()]

    @property
    def bytes_per_weight(self) -> float:
        """Mean bytes of a weight, scales included; 0 without weights."""
        return self._num_bytes / max(1, self._weights.total())

    def add_linear(self, weight: LinearWeight) -> None:
        name = _format_of(weight)
        self._weights[name] += weight.out_features * weight.in_features
        self._num_bytes += _bytes_of(weight.form)

    def add_experts(self, experts: ExpertWeights) -> None:
        for weight in (*experts.w13, *experts.w2):
            self.add_linear(weight)
        for stack in experts.stacked or ():
            self._weights[_format_of_stack(stack)] += torch.Size(stack.shape).numel()
            self._num_bytes += _bytes_of(stack)


def _format_of(weight: LinearWeight) -> str:
    match weight.form:
        case NativeForm(_, struct, _, _, factors) if struct.group:
            return _format_of_groups(
                struct.bits, is_e2m1=bool(struct.is_e2m1), has_factors=factors is not None
            )
        case NativeForm(_, _, torch.Tensor()):
            return "int8"
        case IntGroups() as groups:
            return _format_of_groups(
                groups.bits, is_e2m1=groups.is_e2m1, has_factors=groups.is_nvfp4
            )
        case PackedGroups() as groups:
            return _format_of_packed(groups)
        case PlainForm() | OneDnnForm() | NativeForm():
            return dtype_name(weight.dtype)
        case quantised:
            return "fp8" if quantised.data.dtype == FP8 else "int8"


def _format_of_stack(stack: StackedWeight) -> str:
    match stack:
        case PackedExperts():
            return _format_of_packed(stack.first)
        case Fp8Experts():
            return "fp8"
        case _:
            return dtype_name(stack.dtype)


def _format_of_packed(groups: PackedGroups) -> str:
    return _format_of_groups(4, is_e2m1=groups.is_e2m1, has_factors=groups.factors is not None)


def _format_of_groups(bits: int, *, is_e2m1: bool, has_factors: bool) -> str:
    if has_factors:
        return "nvfp4"
    return "mxfp4" if is_e2m1 else f"int{bits}"


def dtype_name(dtype: torch.dtype) -> str:
    """Such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def _bytes_of(form: object) -> int:
    parts = [getattr(form, name, None) for name in ("data", "scales", "offsets", "factors")]
    if isinstance(form, torch.Tensor):
        parts = [form]
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
