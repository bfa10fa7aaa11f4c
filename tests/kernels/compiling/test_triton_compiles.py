"""The GPU's kernels compile for compute capability 9.0, as their operations launch them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from weft.testing.kernels import sm90_kernels

pytestmark = [pytest.mark.needs("triton-interpreter"), pytest.mark.full]

KERNELS = {
    "layers": "_small_linear _sliced_linear _tiled_linear _streamed _decode _merge _extend "
    "_rms_norm _rope_and_cache",
    "experts": "_direct_inner _direct_out _listed_out _sorted _route _route_and_sort _combine",
    "fp8": "_fp8_spread _fp8_rows _fp8_tiles _streamed _fp8_inner _fp8_out _direct_inner "
    "_listed_out _sorted _rounded",
    "encoders": "_encoder _add_layer_norm _rotate",
    "groups": "_few _tensor_cores _groups _in_floats",
    "8 bits": "_decode _extend _rope_and_cache",
    "fixed": "_fixed _fixed_linear _sorted",
    "both ways": "_extend _fixed",
    "latents": "_latent _merge_latents",
    "recurrences": "_recurrence _conv _tails _norm _gates _states _outputs _plan _shares _heads "
    "_prepare",
    "adapters": "_shrink _expand _expand_silu _small_linear _sliced_linear _product _embedding",
    "adapters of experts": "_direct_inner _sorted _shrink _expand _weigh",
    "drafts": "_join _keep _largest _sliced_linear",
    "drawing": "_scan _bound _collect _decide _search _draw _finish _count _top_of_row _largest "
    "_largest_of_row",
    "steps": "_resolve _accept _move _digest _copy_rows _copy_part _take _put",
    "ranks": "_gather _share _sum _await _copy _signal _push",
}
"""Some that each group must have launched; it prints all."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def compiled(cache: Path, pytestconfig: pytest.Config) -> dict[str, set[str]]:
    """Names of the kernels that each group launched; all are compiled in one process, and what
    groups have in common is compiled once.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    # That it is set decides what a kernel is when its module is imported.
    del environment["TRITON_INTERPRET"]
    variants = ["--all"] if pytestconfig.getoption("--full") else []
    done = subprocess.run(
        [sys.executable, sm90_kernels.__file__, *variants],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    lines = (line.split("\t") for line in done.stdout.splitlines())
    return {group: set(names) for group, *names in lines}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", sm90_kernels.groups(is_full=False))
def test_kernels_compile(group: str, compiled: dict[str, set[str]], cache: Path) -> None:
    names = compiled[group]
    print(names)
    assert {f"{name}_kernel" for name in KERNELS[group].split()} <= names
    # Machine code of each was made, not only Triton's own forms of it.
    assert {f"{name}.cubin" for name in names} <= {path.name for path in cache.rglob("*.cubin")}


def test_pages_in_host_memory_are_read_16_bytes_at_once(
    compiled: dict[str, set[str]], cache: Path
) -> None:
    """Reads of 4 bytes by threads that are 16 bytes apart would ask the bus for bytes again."""
    assert "_copy_part_kernel" in compiled["steps"]
    for path in cache.rglob("_copy_part_kernel.ptx"):
        reads = re.findall(r"ld\.global[.\w]*32", path.read_text())
        assert reads, path
        assert all(".v4." in read for read in reads), reads


COUNTED = """
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weft.contract.start_work import START_WORK
from weft.kernels.shared.kernel_cache import time_compiling

@triton.jit
def store(place):
    tl.store(place, 1)

time_compiling()
for _ in range(2):
    source = ASTSource(store, {"place": "*i32"}, {})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(START_WORK.seconds()["compiling kernels"])
"""


def test_seconds_of_compiling_are_told(tmp_path: Path) -> None:
    """Of kernels that are found compiled as well, which takes little."""
    script = tmp_path / "counted.py"
    script.write_text(COUNTED)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    del environment["TRITON_INTERPRET"]
    done = subprocess.run(
        [sys.executable, script],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    first, both = map(float, done.stdout.split())
    assert 0.0 < first < both
