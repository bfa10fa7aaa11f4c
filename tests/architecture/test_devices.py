"""Operations choose their forms by device; above them only memory and streams differ by it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE = ROOT / "engine" / "weft" / "engine"

ASKS = re.compile(r"\bis_cuda\b|\bdevice\.type\b")

# Streams, and the size, pinning and registration of memory, differ by device, not by operation, and
# so does whether deterministic mode changes bits.
ASK = {
    "base": "device_copies device_memory device_threads packing",
    "executor": "adapter_rows alignment device device_pool draw_graphs embeddings expert_counts "
    "expert_moves kv_format layer_pools local media_warm_up peer_weights routes shared_tensors "
    "weight_groups",
    "executor/drafts": "build",
    "executor/ranks": "follow host_memory share",
    "loop": "build pools",
    "model": "model_spec",
    "transfer": "build mover staging_memory",
}

ROOMS_OF_A_CPU = ("__init__", "spec", "reference", "cpu", "pack")
FOR_A_GPU = re.compile(r"^triton\b|\bops\.\w+\.(triton_\w+|library_\w+|gpu\w*)(\.|$)")


def test_code_above_the_operations_asks_for_no_device() -> None:
    asking = {
        path.relative_to(ENGINE).as_posix()
        for path in ENGINE.rglob("*.py")
        if ASKS.search(path.read_text(encoding="utf-8"))
    }
    known = {f"{folder}/{name}.py" for folder, names in ASK.items() for name in names.split()}
    assert asking <= known, f"ask for a device: {asking - known}"
    assert known <= asking, f"ask no more, and leave the list: {known - asking}"


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


def test_what_a_cpu_needs_of_an_operation_loads_no_form_for_a_gpu() -> None:
    """Such forms need Triton or a library: a front loads them at their first use."""
    for path in (ROOT / "kernels" / "weft" / "kernels" / "ops").glob("*/*.py"):
        if path.stem not in ROOMS_OF_A_CPU:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = [
            f"{node.module}.{name.name}" if isinstance(node, ast.ImportFrom) else name.name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        ]
        assert not [module for module in modules if FOR_A_GPU.search(module)], path
