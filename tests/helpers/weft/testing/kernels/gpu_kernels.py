"""Private copies of GPU kernel modules, with a change in them if a test wants one.

What their operations allocate is poisoned: a result that a kernel leaves out shows.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from weft.kernels import ops

SOURCES = Path(ops.__path__[0])


class PoisonedTorch:
    """`torch`, as a module of kernels uses it, whose new memory holds NaN, or 0 of whole numbers
    (which may be places to read from)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, **options: Any) -> torch.Tensor:
        """See `torch.empty`."""
        return _poison(torch.empty(*size, **options))

    @staticmethod
    def empty_like(other: torch.Tensor, **options: Any) -> torch.Tensor:
        """See `torch.empty_like`."""
        return _poison(torch.empty_like(other, **options))


def _poison(made: torch.Tensor) -> torch.Tensor:
    return made.fill_(float("nan") if made.is_floating_point() else 0)


@contextmanager
def kernel_module(
    name: str, folder: Path, change: tuple[str, str] | None = None
) -> Iterator[ModuleType]:
    """A copy of one module of `weft.kernels.ops`, under a name of its own.

    Args:
        name: Of the module below `weft.kernels.ops`, such as `rope.triton_rope`.
        folder: Where the copy is written: Triton reads kernels from their file.
        change: Text that occurs once in the module, and what to put there.
    """
    text = SOURCES.joinpath(*name.split(".")).with_suffix(".py").read_text()
    if change is not None:
        assert text.count(change[0]) == 1, f"{change[0]!r} occurs {text.count(change[0])} times"
        text = text.replace(*change)
    path = folder / f"{name}_copy.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"gpu_kernel_copy_{name.replace('.', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.__dict__["torch"] = PoisonedTorch()
    yield module
    del sys.modules[spec.name]


def change_kernels(
    patch: pytest.MonkeyPatch, module: ModuleType, folder: Path, change: tuple[str, str]
) -> None:
    """Puts the kernels of a changed copy of a module of `weft.kernels.ops` in place of its own.

    Also where other modules call them.
    """
    with kernel_module(module.__name__.removeprefix(f"{ops.__name__}."), folder, change) as copy:
        kernels_of = {
            name: value
            for name, value in vars(copy).items()
            if isinstance(value, InterpretedFunction)
        }
    for name, value in kernels_of.items():
        own = getattr(module, name)
        for user in list(sys.modules.values()):
            if getattr(user, "__name__", "").startswith("weft.") and vars(user).get(name) is own:
                patch.setattr(user, name, value)


def notices(check: Callable[[], None], turns: int = 200) -> bool:
    """Whether a check fails: its random cases may not show a fault, some of them most times."""
    for _ in range(turns):
        try:
            check()
        except AssertionError:
            return True
    return False
