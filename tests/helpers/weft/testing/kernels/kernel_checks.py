"""Shared code of the kernel tests: float64 comparison, fresh random inputs, a mutated build."""

from __future__ import annotations

import platform
import random
import shutil
from pathlib import Path

import torch
from weft.kernels.shared import cpu
from weft.kernels.shared.build import load_native, loaded_openmp_library

DTYPES = (torch.float32, torch.bfloat16)


def fresh_seed() -> None:
    """Seeds torch and `random` with a number that is printed when the test fails."""
    seed = random.SystemRandom().randrange(1 << 31)
    random.seed(seed)
    torch.manual_seed(seed)
    print(f"seed {seed}")


def assert_as_exact(
    out: torch.Tensor,
    peer: torch.Tensor,
    exact: torch.Tensor,
    factor: float = 2.0,
    slack: float = 0.0,
) -> None:
    """Fails unless the error of `out` is at most `factor` times that of torch's own result.

    Judged are the largest error and, where there are enough values for it to be steady, the root
    mean square. A few rounding steps of the largest value (of the mean two in float32, else half a
    one) are allowed on top, and `slack` for what the inputs make of rounding: where torch happens
    to be exact, a result that was rounded is right too.
    """
    assert out.shape == exact.shape
    assert torch.isfinite(out).all()
    if out.numel() == 0:
        return
    eps = torch.finfo(out.dtype).eps
    errors, peer_errors = out.double() - exact, peer.double() - exact
    error, peer_error = errors.abs().max().item(), peer_errors.abs().max().item()
    steps = 8 if out.dtype == torch.float32 else 2
    # Below the smallest normal number steps get no smaller.
    largest = max(exact.abs().max().item(), torch.finfo(out.dtype).smallest_normal)
    allowed = factor * peer_error + steps * eps * largest + slack
    assert error <= allowed, f"largest error {error}, torch's {peer_error}"
    if out.numel() >= 64:
        error, peer_error, scale = (_rms(x) for x in (errors, peer_errors, exact))
        share = 2.0 if out.dtype == torch.float32 else 0.5
        allowed = factor * peer_error + share * eps * scale + slack
        assert error <= allowed, f"mean error {error}, torch's {peer_error}"


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def mutated_native_cpu(folder: Path, header: str, original: str, replacement: str) -> cpu.NativeCpu:
    """The native operations built with one change in their source.

    Vectors are short, unless the change is to what AMX does: half as much is compiled.
    """
    source = folder / "csrc"
    shutil.copytree(cpu.SOURCE.parent, source)
    text = (source / header).read_text()
    assert text.count(original) == 1, f"{original!r} occurs {text.count(original)} times"
    (source / header).write_text(text.replace(original, replacement))
    has_short = platform.machine() == "x86_64" and "amx" not in header
    built = load_native(
        source / cpu.SOURCE.name,
        openmp_library=loaded_openmp_library(),
        flags=("-O0", "-march=x86-64") if has_short else ("-O0",),
        folder=folder / "built",
    )
    assert built.library is not None, built.reason
    return cpu.NativeCpu(built.library)
