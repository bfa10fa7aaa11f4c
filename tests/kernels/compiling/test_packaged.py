"""Native code that a wheel has compiled: the form of this CPU is loaded, and no other."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from weft.kernels.ops.sampling.cpu import SOURCE as SAMPLING
from weft.kernels.shared import build, cpu, packaged
from weft.kernels.shared.packaged import VARIANTS, Variant, find_packaged, packaged_path
from weft.pages.transfer import digest

ROOT = Path(__file__).resolve().parents[3]
X86 = VARIANTS["x86_64"]
SPELLED = {"bmi": "bmi1", "lzcnt": "abm", "sse3": "pni", "lahf_sahf": "lahf_lm"}
"""Words of /proc/cpuinfo for instructions that gcc calls otherwise."""
OF_EVERY_X86_64 = {"fxsr", "mmx", "mmx_with_sse", "sse", "sse2", "sse_math", "sse2_math"}
needs_gcc = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("gcc") is None, reason="cc: needs gcc on x86-64"
)


def write_packages(folder: Path) -> Path:
    source = folder / "answer.c"
    source.write_text("int answer(void) { return -1; }\n")
    for number, variant in enumerate(VARIANTS[platform.machine()]):
        code = folder / "code.c"
        code.write_text(f"int answer(void) {{ return {number}; }}\n")
        library = packaged_path(source, variant)
        subprocess.run(["cc", "-shared", "-fPIC", str(code), "-o", str(library)], check=True)
    return source


@pytest.mark.parametrize("variant", X86, ids=lambda variant: variant.name)
def test_a_cpu_gets_the_best_form_that_it_runs(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "code.c"
    for each in X86:
        packaged_path(source, each).touch()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(packaged, "instructions", lambda: {*variant.needs, "of", "others"})
    assert find_packaged(source) == packaged_path(source, variant)
    for missing in variant.needs:
        monkeypatch.setattr(packaged, "instructions", lambda m=missing: variant.needs - {m})
        assert find_packaged(source) != packaged_path(source, variant)


@needs_gcc
@pytest.mark.parametrize("variant", X86, ids=lambda variant: variant.name)
def test_a_form_asks_for_all_that_its_compiler_may_use(variant: Variant) -> None:
    command = ["gcc", *variant.flags, "-dM", "-E", "-x", "c", "/dev/null"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pattern = (
        r"#define __((?:AVX|AMX|SSE|SSSE|BMI|MMX|FXSR|F16C|FMA|LZCNT|MOVBE|POPCNT|XSAVE)\w*)__ 1"
    )
    used = {name.lower() for name in re.findall(pattern, text)} - OF_EVERY_X86_64
    words = {re.sub(r"^avx512(vnni|bf16)$", r"avx512_\1", SPELLED.get(w, w)) for w in used}
    assert words <= variant.needs


def test_a_wheel_has_all_native_code() -> None:
    """`hatch_build.py` compiles the C files in a root's `weft`; no other folder has one."""
    files = {path for root in ROOT.glob("*/weft") for path in root.rglob("*.c")}
    assert files == {cpu.SOURCE, SAMPLING, Path(digest.__file__).with_name("digest.c")}
    assert not list((ROOT / "services").rglob("*.c"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="cc: no C compiler on PATH")
def test_a_packaged_form_is_loaded_in_place_of_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_packages(tmp_path)
    monkeypatch.setenv("PATH", "")
    loaded = build.load_packaged(source)
    assert loaded.library is not None, loaded.reason
    assert loaded.path == find_packaged(source)
    assert loaded.library.answer() == [
        packaged_path(source, variant) for variant in VARIANTS[platform.machine()]
    ].index(loaded.path)


@pytest.mark.skipif(shutil.which("cc") is None, reason="cc: no C compiler on PATH")
def test_without_a_form_that_loads_the_source_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return -1; }\n")
    for damaged in (False, True):
        if damaged:
            for variant in VARIANTS[platform.machine()]:
                packaged_path(source, variant).write_bytes(b"no library")
        loaded = build.load_packaged(source)
        assert isinstance(loaded.library, ctypes.CDLL), loaded.reason
        assert loaded.library.answer() == -1
