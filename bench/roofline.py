"""The machine's present limits: memory reads, and multiply-adds in registers."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import torch
from weft.kernels import cpu
from weft.kernels.build import load_native, loaded_openmp_library
from weft.kernels.memory import huge_zeros


class Roofline:
    """Measures what the machine gives at the moment."""

    def __init__(self, dtype: torch.dtype) -> None:
        built = load_native(
            Path(__file__).with_name("roofline.c"),
            openmp_library=loaded_openmp_library(),
            flags=("-ffp-contract=fast",),
        )
        if built.library is None:
            raise SystemExit(f"no roofline: {built.reason}")
        self._library = built.library
        wide = dtype == torch.bfloat16 and cpu_has_bfloat16()
        self._multiply = built.library["roofline_bfloat16" if wide else "roofline_float32"]
        self._multiply.argtypes = (ctypes.c_int64, ctypes.c_float)
        self._per_step = (
            built.library["roofline_lanes"]()
            * built.library["roofline_chains"]()
            * (4 if wide else 2)
        )
        self._read = built.library["roofline_read"]
        self._read.argtypes, self._read.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
        self._data = huge_zeros((24 << 20,), torch.int64).fill_(1)

    def read_bytes_per_s(self) -> float:
        """Bytes per second read from memory beyond all caches."""
        seconds = timed(lambda: self._read(self._data.data_ptr(), self._data.numel()))
        return self._data.nbytes / seconds

    def flops_per_s(self) -> float:
        """FLOP/s of all threads together."""
        steps = 400_000
        seconds = timed(lambda: self._multiply(steps, 0.5))
        return steps * self._per_step * torch.get_num_threads() / seconds


def cpu_has_bfloat16() -> bool:
    """Whether the native operations use bfloat16 products of the CPU."""
    native = cpu.native_cpu()
    return native is not None and native.native_bf16


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
