"""What adapters add, described to native operations on a CPU (csrc/lora.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from weft.kernels.ops.lora.spec import LoraSegments, LoraWeights
from weft.kernels.shared import cpu


class NativeLora(NamedTuple):
    """Additions described to native operations; valid as long as this object and the tensors
    live.
    """

    described: cpu.LoraStruct
    address: int
    num_layers: int
    buffers: tuple[torch.Tensor, torch.Tensor]
    """Scratch memory of native operations."""


def describe_lora(
    native: cpu.NativeCpu, groups: Sequence[tuple[LoraWeights, ...]], segments: LoraSegments
) -> NativeLora:
    """Checks what adapters add to the products of a step, and describes it to native operations.

    Raises:
        ValueError: The parts have different numbers of layers.
        IndexError: A segment or table has an index out of range.
    """
    tokens, num_segments = segments.token_slots.shape[0], segments.slots.shape[0]
    layers = {part.table.shape[0] for group in groups for part in group}
    if len(layers) > 1:
        raise ValueError(f"LoRA rows for different numbers of layers: {layers}")
    num_layers = max(layers, default=0)
    width = max(sum(part.max_rank for part in group) for group in groups)
    blocks = torch.empty(num_segments + 1, dtype=torch.int64)
    # AMX always reads the ranks of 16 tokens at a time.
    shrunk = torch.empty((tokens + 15) * width, dtype=torch.float32)
    described = cpu.LoraStruct(
        (cpu.LoraGroupStruct * 4)(*(describe_group(group) for group in groups)),
        segments.token_slots.data_ptr(),
        segments.order.data_ptr(),
        segments.starts.data_ptr(),
        segments.slots.data_ptr(),
        blocks.data_ptr(),
        shrunk.data_ptr(),
        *(tokens, num_segments, width),
    )
    address = ctypes.addressof(described)
    status = native.prepare_lora(address, 0, num_layers)
    if status:
        cpu.check_status(status, "describe_lora")
    return NativeLora(described, address, num_layers, (blocks, shrunk))


def describe_group(parts: tuple[LoraWeights, ...]) -> cpu.LoraGroupStruct:
    """Describes the parts of one product to native operations.

    Raises:
        ValueError: B is not packed.
    """
    described, offset = [], 0
    for part in parts:
        if part.packed_width is None:
            raise ValueError("LoRA rows of B are not packed for the native operations")
        described.append(
            cpu.LoraPartStruct(
                *(t.data_ptr() for t in (part.a, part.b, part.table, part.rows_of_b, part.counts)),
                part.a.shape[0],
                part.b.shape[0],
                *part.table.shape,
                part.in_features,
                part.out_features,
                part.column,
                offset,
            )
        )
        offset += part.max_rank
    return cpu.LoraGroupStruct((cpu.LoraPartStruct * 3)(*described), len(described))
