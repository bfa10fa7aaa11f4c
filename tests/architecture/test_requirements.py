"""A run that requires what is missing must fail, not skip."""

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent


def run_pytest(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs one test that needs a C compiler, under the conftest of all tests."""
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (folder / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.needs('cc')\ndef test_it() -> None:\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "WEFT_REQUIRE": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_is_missing_is_skipped_visibly(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, PATH="/nonexistent")
    assert done.returncode == 0, done.stdout
    assert "skipped 1: cc: " in done.stdout


def test_what_is_required_must_be_there(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, PATH="/nonexistent", WEFT_REQUIRE="cc")
    assert done.returncode != 0
    assert "required by WEFT_REQUIRE, but missing: cc" in done.stderr


def test_a_skip_for_the_sake_of_something_required_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import pytest\n\ndef test_other() -> None:\n    pytest.skip('cc: it cannot compile')\n"
    )
    assert run_pytest(tmp_path).returncode == 0
    done = run_pytest(tmp_path, WEFT_REQUIRE="cc")
    assert done.returncode == 1
    assert "it cannot compile" in done.stdout


def test_unknown_requirements_are_refused(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, WEFT_REQUIRE="nonsense")
    assert done.returncode != 0
    assert "nonsense" in done.stderr


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    folders = {folder for file in TESTS.rglob("test_*.py") for folder in file.parents}
    names = {folder.name for folder in folders if folder.is_relative_to(TESTS)}
    left_out = [
        p for p in pytestconfig.getini("norecursedirs") if any(fnmatch(n, p) for n in names)
    ]
    assert not left_out
