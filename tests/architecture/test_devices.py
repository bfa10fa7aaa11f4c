"""Operations choose their forms by device; above them only memory and streams differ by it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE = ROOT / "engine" / "weft" / "engine"

ASKS = re.compile(r"\bis_cuda\b|\bdevice\.type\b")

# Streams, and the size, pinning and registration of memory, differ by device, not by operation.
FOLDERS = ("base", "executor", "loop", "transfer")


def test_code_above_the_operations_asks_for_no_device() -> None:
    asking = {
        path.relative_to(ENGINE).as_posix()
        for path in ENGINE.rglob("*.py")
        if ASKS.search(path.read_text(encoding="utf-8"))
    }
    assert not {name for name in asking if name.partition("/")[0] not in FOLDERS}


def test_each_operation_has_a_folder() -> None:
    """What several need is in `shared`."""
    kernels = ROOT / "kernels" / "weft" / "kernels"
    assert {path.name for path in kernels.iterdir() if path.name != "__pycache__"} == {
        "__init__.py",
        "csrc",
        "ops",
        "py.typed",
        "shared",
    }
    assert all(path.is_dir() or path.name == "__init__.py" for path in (kernels / "ops").iterdir())
