"""Choice of a model's dtype. Pure Python, so that settings can be resolved without torch."""

from __future__ import annotations

import re
from pathlib import Path

from weft.checkpoint.quantization import Quantization
from weft.contract.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")

_CPU_INFO = Path("/proc/cpuinfo")
_FAST_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_dtype(dtype: str, device: str = "cpu", quantization: Quantization | None = None) -> str:
    """Resolves `auto`: bfloat16 on CUDA and on CPUs that multiply it fast, else float32. With int8
    weights it is bfloat16 on every CPU, since their products are of integers there. Raises
    ConfigError for an unknown dtype, or one that this device has no kernels for.
    """
    on_cpu = device.partition(":")[0] == "cpu"
    if dtype == "auto":
        is_int8 = quantization is not None and quantization.format == "int8"
        is_fast = not on_cpu or is_int8 or cpu_has_fast_bfloat16()
        return "bfloat16" if is_fast else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is none of auto, {', '.join(DTYPES)}", param="dtype")
    if dtype == "float16" and on_cpu:
        raise ConfigError(
            "dtype: float16 is not supported on a CPU; use bfloat16 or float32", param="dtype"
        )
    return dtype


def cpu_has_fast_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Counts AVX512-BF16, AMX, Arm's BF16, and AVX2 without AVX-512, where answers in bfloat16 are
    faster than in float32 though nothing computes in it. AVX-512 alone was not measured.
    """
    try:
        text = cpu_info.read_text()
    except OSError:
        return False
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    flags = set(lines[0].split()) if lines else set[str]()
    is_avx2_best = "avx2" in flags and "avx512f" not in flags
    return is_avx2_best or not flags.isdisjoint(_FAST_BF16_FLAGS)
