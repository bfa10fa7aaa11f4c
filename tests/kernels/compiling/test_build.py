"""The C builder: cached, atomic, one OpenMP runtime in a process, reasons instead of raises."""

import ctypes
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from weft.contract.start_work import COMPILING, START_WORK
from weft.kernels.shared import build
from weft.kernels.shared.build import load_native

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="cc: no C compiler on PATH")


def write_source(folder: Path, constant: int) -> Path:
    source = folder / "answer.c"
    source.write_text(f"long answer(long x) {{ return x * {constant}L; }}\n")
    return source


def call_answer(library: ctypes.CDLL | None, argument: int) -> int:
    assert library is not None
    library.answer.argtypes, library.answer.restype = [ctypes.c_long], ctypes.c_long
    return int(library.answer(argument))


def test_compiled_code_runs_and_is_reused(tmp_path: Path) -> None:
    constant, argument = random.randrange(2, 1 << 20), random.randrange(1 << 20)
    source = write_source(tmp_path, constant)
    before = START_WORK.seconds().get(COMPILING, 0.0)
    first = load_native(source, folder=tmp_path / "cache")
    assert first.reason is None
    told = START_WORK.seconds()
    assert told[COMPILING] > before
    assert call_answer(first.library, argument) == constant * argument
    assert first.path is not None
    written_ns = first.path.stat().st_mtime_ns
    second = load_native(source, folder=tmp_path / "cache")
    assert START_WORK.seconds() == told
    assert second.path == first.path
    assert first.path.stat().st_mtime_ns == written_ns
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".so"]


def test_changed_source_or_flags_build_anew(tmp_path: Path) -> None:
    source = write_source(tmp_path, 3)
    first = load_native(source, folder=tmp_path)
    with_flags = load_native(source, folder=tmp_path, flags=["-DX=1"])
    write_source(tmp_path, 5)
    changed = load_native(source, folder=tmp_path)
    assert len({first.path, with_flags.path, changed.path}) == 3
    assert call_answer(changed.library, 7) == 35


@pytest.mark.parametrize("damage", ["half", "zeros", "no digest"])
def test_what_a_power_cut_leaves_is_not_loaded(tmp_path: Path, damage: str) -> None:
    """Loading it would end the process with a signal."""
    constant, argument = random.randrange(2, 1 << 20), random.randrange(1 << 20)
    source, cache = write_source(tmp_path, constant), tmp_path / "cache"
    command = [sys.executable, "-c", BUILD_SCRIPT, str(source), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    path = Path(done.stdout.split()[0])
    whole = path.read_bytes()
    cut = {"half": whole[: len(whole) // 2], "no digest": whole[:-16]}
    path.write_bytes(cut.get(damage, whole[:4096] + bytes(len(whole) - 4096)))
    subprocess.run(command, capture_output=True, check=True)
    again = load_native(source, folder=cache)
    assert call_answer(again.library, argument) == constant * argument


def test_what_killed_builds_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".build-old", tmp_path / ".build-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "code.o").touch()
    long_ago = time.time() - 3 * build.COMPILE_TIMEOUT_S
    os.utime(old, (long_ago, long_ago))
    load_native(write_source(tmp_path, 3), folder=tmp_path)
    assert not old.exists()
    assert new.exists()  # of a build that may run


def test_damaged_cache_entry_is_built_again(tmp_path: Path) -> None:
    source = write_source(tmp_path, 11)
    command = [sys.executable, "-c", BUILD_SCRIPT, str(source), str(tmp_path / "cache")]
    path = Path(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    )
    path.write_bytes(path.read_bytes()[:100])
    again = load_native(source, folder=tmp_path / "cache")
    assert again.path == path
    assert call_answer(again.library, 2) == 22


BUILD_SCRIPT = """
import sys
from pathlib import Path
from weft.kernels.shared.build import load_native
compiler = (sys.argv[3:] or ["cc"])[0]
built = load_native(Path(sys.argv[1]), folder=Path(sys.argv[2]), compiler=compiler)
print(built.path, built.library.answer(6))
"""


def test_processes_building_at_once_compile_once_and_load_a_whole_file(tmp_path: Path) -> None:
    source, compiler, calls = write_source(tmp_path, 7), tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec cc "$@"\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-c", BUILD_SCRIPT, str(source), str(tmp_path / "cache")]
    command.append(str(compiler))
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {child.communicate(timeout=60)[0] for child in children}
    assert [child.returncode for child in children] == [0] * 4
    assert len(outputs) == 1
    assert outputs.pop().split()[1] == "42"
    assert sum(" -c " in call for call in calls.read_text().splitlines()) == 1


def test_failures_are_reasons(tmp_path: Path) -> None:
    source = write_source(tmp_path, 2)
    missing = load_native(source, compiler="no-such-compiler", folder=tmp_path)
    assert missing.library is None
    assert "no-such-compiler" in (missing.reason or "")

    source.write_text("int f( {")
    broken = load_native(source, folder=tmp_path)
    assert broken.library is None
    assert "error" in (broken.reason or "")

    blocked = tmp_path / "file"
    blocked.write_text("")
    source = write_source(tmp_path, 2)
    unwritable = load_native(source, folder=blocked / "cache")
    assert unwritable.library is None
    assert unwritable.reason

    with pytest.raises(FileNotFoundError, match=r"absent\.c"):
        load_native(tmp_path / "absent.c", folder=tmp_path)


def test_cache_folder_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("WEFT_CACHE_DIR", raising=False)
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "weft"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_folder() == tmp_path / "xdg" / "weft"
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "own"))
    assert build.cache_folder() == tmp_path / "own"


OPENMP_SOURCE = """
#include <omp.h>
int team(void) {
  int size = 0;
  #pragma omp parallel num_threads(2)
  {
    #pragma omp single
    size = omp_get_num_threads();
  }
  return size;
}
"""

OPENMP_SCRIPT = """
import sys
from pathlib import Path
import torch
from weft.kernels.shared.build import load_native, loaded_openmp_library
runtime = loaded_openmp_library()
assert runtime is not None and runtime.parent == Path(torch.__file__).parent / "lib", runtime
built = load_native(Path(sys.argv[1]), openmp_library=runtime, folder=Path(sys.argv[2]))
assert built.library is not None, built.reason
assert built.library.team() == 2
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}
assert runtimes == {str(runtime)}, runtimes
print("one runtime")
"""


def test_openmp_code_shares_the_runtime_of_torch(tmp_path: Path) -> None:
    source = tmp_path / "team.c"
    source.write_text(OPENMP_SOURCE)
    command = [sys.executable, "-c", OPENMP_SCRIPT, str(source), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "one runtime", done.stderr


def test_no_openmp_runtime_is_reported_as_none() -> None:
    code = "from weft.kernels.shared.build import loaded_openmp_library as f; print(f())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
