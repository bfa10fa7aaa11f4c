"""Parameters that are made up, for benchmarks."""

from __future__ import annotations

import torch
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice

_MXFP4_SCALE = 121
"""2^-6. Numbers of MXFP4 have a deviation of about 3 before they are scaled."""


_NVFP4_DIVISOR = 128.0


class RandomWeights(CheckpointReader):
    """Random numbers, the same for the same seed and order of reads."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        """Reports experts as separate tensors."""
        return not name.endswith(("experts.gate_up_proj", "experts.down_proj"))

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """None: it makes any shape."""
        return None

    def dtype_of(self, name: str) -> torch.dtype | None:
        """None: it makes any dtype."""
        return None

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        """Fills norm weights and scales of activations with 1, biases with 0, and other floats from
        a normal distribution with deviation 0.02, cutting parts from the whole tensor. Integers are
        uniform and FP8 is normal, with scales that give about the same deviation.
        """
        if out.is_meta:
            return  # Another stage has the parameter.
        if out.dtype == torch.uint8 and part.name.endswith("_scales"):
            out.fill_(_MXFP4_SCALE)
        elif out.dtype == torch.float8_e4m3fn and part.name.endswith("weight_scale"):
            out.fill_(1.0)
        elif part.name.endswith("weight_global_scale"):
            out.fill_(_NVFP4_DIVISOR)
        elif part.name.endswith("weight_scale_2"):
            out.fill_(1 / _NVFP4_DIVISOR)
        elif out.dtype == torch.uint8:
            out.random_(0, 256, generator=self._generator)
        elif part.name.endswith("weight_shape"):
            out.zero_()
        elif out.dtype == torch.int32:
            # Words that hold numbers of few bits.
            out.random_(-(2**31), 2**31 - 1, generator=self._generator)
        elif not out.dtype.is_floating_point:
            out.random_(-127, 128, generator=self._generator)
        elif part.name.endswith("norm.weight"):
            out.fill_(1.0)
        elif part.name.endswith(("weight_scale", "weight_scale_inv", "input_scale")):
            out.fill_(0.02 / 64)
        elif part.name.endswith("_scale"):
            out.fill_(1.0)
        elif out.dtype == torch.float8_e4m3fn:
            wide = torch.empty(part.size, device=out.device)
            out.copy_(wide.normal_(0.0, 64.0, generator=self._generator))
        elif part.name.endswith(".bias"):
            out.zero_()
        elif part.size == part.shape:
            out.normal_(0.0, 0.02, generator=self._generator)
        else:
            whole = out.new_empty(part.shape).normal_(0.0, 0.02, generator=self._generator)
            out.copy_(whole[part.slices])

    def skip(self, prefix: str) -> None:
        """Does nothing: no tensor is ever left over."""

    def finish(self) -> None:
        """Does nothing: no tensor is ever missing or left over."""
