"""Where there is no compiler for Triton, the package ziglang's is taken, or a start is refused."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from weft.contract.errors import ConfigError
from weft.engine.base.triton_compiler import ensure_triton_compiles

ZIG = """#!/bin/sh
echo "$ZIG_GLOBAL_CACHE_DIR"
printf '%s\\n' "$@"
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with Python's headers and without compilers."""
    include = tmp_path / "include"
    include.mkdir()
    (include / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(include)})
    monkeypatch.setenv("CC", "to be restored")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "a cache"))
    return tmp_path


def test_a_compiler_that_is_there_is_left_to_triton(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "empty").mkdir()
    gcc = bare / "empty" / "gcc"
    gcc.write_text("#!/bin/sh\n")
    gcc.chmod(0o755)
    ensure_triton_compiles()
    assert "CC" not in os.environ
    gcc.unlink()
    monkeypatch.setenv("CC", "/opt/cc")
    ensure_triton_compiles()
    assert os.environ["CC"] == "/opt/cc"


def test_the_packages_compiler_is_called_as_cc(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zig = bare / "site" / "ziglang" / "zig"
    zig.parent.mkdir(parents=True)
    (zig.parent / "__init__.py").touch()
    zig.write_text(ZIG)
    zig.chmod(0o755)
    monkeypatch.syspath_prepend(str(bare / "site"))
    ensure_triton_compiles()
    command = [os.environ["CC"], "a file.c", "-O3", "-o", "out.so"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told == [
        str(bare / "a cache" / "zig"),
        *("cc", "-mcpu=baseline", "a file.c", "-O3", "-o", "out.so"),
    ]


def test_without_a_compiler_the_message_says_what_brings_one(bare: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither gcc nor clang .* extra `gpu`"):
        ensure_triton_compiles()
    assert "CC" not in os.environ


def test_without_headers_the_message_says_what_brings_them(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/opt/cc")
    (bare / "include" / "Python.h").unlink()
    with pytest.raises(ConfigError, match=r"Python\.h is missing: .*python3-dev.*uv venv"):
        ensure_triton_compiles()
