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
    (["chat", "--temperature", "-1"], "--temperature"),
    (["chaos", "--faults", "0"], "--faults"),
    (["chaos", "--minutes", "-1"], "--minutes"),
    (["chaos", "--workers", "0"], "--workers"),
    (["chaos", "--clients", "0"], "--clients"),
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


@pytest.mark.parametrize(
    ("variable", "value", "argv"),
    [
        ("WEFT_API_KEY", "a\nb", ["chat", "--address", "127.0.0.1:1"]),
        ("WEFT_API_KEY", "cl\u00e9", ["adapter", "list", "--address", "127.0.0.1:1"]),
        ("WEFT_ADDRESS", "gateway.example.org", ["flush"]),
    ],
)
def test_variables_that_mean_nothing(
    variable: str,
    value: str,
    argv: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"weft {argv[0]}: ${variable} ")
    assert error.count("\n") == 1


def test_flush_without_an_answer_says_what_may_be_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    argv = ["--admin-address", "decode-0=127.0.0.1:1", "--token-file", str(token)]
    assert main(["flush", *argv]) == 1
    assert "decode-0: does not answer at 127.0.0.1:1; does the mesh want --tls-dir?" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("sabotage", ["all", "deliver"])
def test_attacks_on_ranks_exclude_a_sabotage(
    sabotage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["chaos", "--only", "ranks", "--tp", "2", "--sabotage", sabotage])
    assert caught.value.code == 2
    assert "--only ranks and --sabotage exclude each other" in capsys.readouterr().err
