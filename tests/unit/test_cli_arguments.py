"""Arguments that mean nothing end a command with a line that says so, before it does anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from weft.cli.main import main

BAD_NUMBERS = [
    (["chat", "--max-tokens", "-1"], "--max-tokens"),
    (["chat", "--max-tokens", "99999999999"], "--max-tokens"),
    (["certs", "DIR", "--days", "-5"], "--days"),
    (["certs", "DIR", "--days", "99999999"], "--days"),
    (["keys", "add", "acme", "--file", "DIR/keys", "--days", "0"], "--days"),
    (["keys", "add", "acme", "--file", "DIR/keys", "--days", "999999999"], "--days"),
    (["replay", "DIR/log", "--concurrency", "0"], "--concurrency"),
    (["replay", "DIR/log", "--limit", "-1"], "--limit"),
    (["replay", "DIR/log", "--timeout", "nan"], "--timeout"),
    (["adapter", "load", "x", "x", "--timeout", "-1"], "--timeout"),
]


@pytest.mark.parametrize(("argv", "flag"), BAD_NUMBERS, ids=[" ".join(a) for a, _ in BAD_NUMBERS])
def test_numbers_out_of_range(
    argv: list[str], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([word.replace("DIR", str(tmp_path)) for word in argv])
    assert caught.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {flag}: must be a " in error
    assert repr(argv[-1]) in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argv",
    [["trace", "\udcff"], ["adapter", "load", "\udcff", "x"], ["chat", "--system", "\udcff"]],
)
def test_arguments_that_are_no_text(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "is not valid UTF-8" in capsys.readouterr().err


def test_a_log_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\n\xff\xfe\n")
    assert main(["replay", str(log)]) == 1
    assert "line 2 is not of a request log" in capsys.readouterr().err
