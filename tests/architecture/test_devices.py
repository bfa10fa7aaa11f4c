"""Operations choose their forms by device; what else asks for a device is listed here."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE = ROOT / "engine" / "weft" / "engine"

ASKS = re.compile(r"\bis_cuda\b|\bdevice\.type\b")

# Streams, pinned memory and registration of memory differ by device, not by operation.
FOLDERS = ("base", "executor", "loop", "transfer")

# Places of which each could move into the choice of an operation, or into the executor.
FILES = {
    "model/heads/drafted.py",
    "model/layers/attention.py",
    "model/layers/encoder.py",
    "model/layers/plain_moe.py",
    "model/weights/schemes/gguf.py",
    "model/weights/schemes/mxfp4.py",
    "model/weights/tensor_reads.py",
    "sampling/sampler.py",
    "sampling/slot_table.py",
}


def test_code_above_the_operations_asks_for_no_device() -> None:
    """A file that no longer asks leaves the list."""
    asking = {
        path.relative_to(ENGINE).as_posix()
        for path in ENGINE.rglob("*.py")
        if ASKS.search(path.read_text(encoding="utf-8"))
    }
    assert {name for name in asking if not name.startswith(FOLDERS)} == FILES


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
