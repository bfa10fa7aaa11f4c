"""The machine's present limits: memory reads, and multiply-adds in registers."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from harness import timed
from weft.kernels.shared import cpu
from weft.kernels.shared.build import load_native, loaded_openmp_library
from weft.kernels.shared.memory import huge_zeros


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
        lanes = built.library["roofline_lanes"]() * built.library["roofline_chains"]()
        name, self._per_step = "roofline_float32", 2 * lanes
        native = cpu.native_cpu()
        if dtype == torch.bfloat16 and native is not None:
            if native.has_amx:
                name, self._per_step = "roofline_amx", 2 * 4 * 16 * 16 * 32
            elif native.native_bf16:
                name, self._per_step = "roofline_bfloat16", 4 * lanes
        self._multiply = built.library[name]
        self._multiply.argtypes = (ctypes.c_int64, ctypes.c_float)
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
