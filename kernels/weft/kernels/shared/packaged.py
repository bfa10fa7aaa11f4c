"""The forms of native code that a wheel has compiled, and the one that this CPU runs.

A wheel has each C file once for each variant, beside its source. It imports nothing but the
standard library, since the build of a wheel reads it too.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Variant:
    """A form of native code for the CPUs that have certain instructions."""

    name: str
    flags: tuple[str, ...]
    """Of the compiler: they take the place of `-march=native`."""
    needs: Set[str]
    """Words of /proc/cpuinfo's `flags` that a CPU must have."""


_V3_NEEDS = {
    *("pni", "ssse3", "cx16", "sse4_1", "sse4_2", "popcnt", "lahf_lm", "xsave", "avx"),
    *("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"),
}
_V4_NEEDS = _V3_NEEDS | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4 = "-march=x86-64-v4"
_BF16 = (_V4, "-mavx512vnni", "-mavx512bf16")
_BF16_NEEDS = _V4_NEEDS | {"avx512_vnni", "avx512_bf16"}

VARIANTS: Mapping[str, tuple[Variant, ...]] = {
    "x86_64": (
        Variant(
            "amx",
            (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
            _BF16_NEEDS | {"amx_tile", "amx_bf16", "amx_int8"},
        ),
        Variant("avx512-bf16", _BF16, _BF16_NEEDS),
        Variant("avx512-vnni", (_V4, "-mavx512vnni"), _V4_NEEDS | {"avx512_vnni"}),
        Variant("avx512", (_V4,), _V4_NEEDS),
        Variant("avx2", ("-march=x86-64-v3",), _V3_NEEDS),
        Variant("sse2", ("-march=x86-64",), frozenset()),
    ),
    "aarch64": (Variant("neon", ("-march=armv8-a",), frozenset()),),
}
"""By `platform.machine()`, the fastest first. The C sources ask for no instructions but these."""


def packaged_path(source: Path, variant: Variant) -> Path:
    """Where a wheel has a C file's compiled form."""
    return source.with_name(f"{source.stem}-{variant.name}.so")


def find_packaged(source: Path) -> Path | None:
    """The form of a C file that a wheel has for this CPU; None in a checkout."""
    cpu = instructions()
    for variant in VARIANTS.get(platform.machine(), ()):
        if variant.needs <= cpu and (path := packaged_path(source, variant)).is_file():
            return path
    return None


def instructions() -> Set[str]:
    """Words of this CPU's `flags` in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    words = (
        value.split()
        for name, _, value in (line.partition(":") for line in lines)
        if name.strip() == "flags"
    )
    return frozenset(next(words, ()))
