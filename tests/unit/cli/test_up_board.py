"""What `weft up` shows live on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from weft.cli.up.board import Board
from weft.cli.up.console import ConsoleReporter


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def lines(board: Board, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(board)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 40, 80, 200])
def test_each_service_has_a_line_however_narrow(width: int) -> None:
    clock = Clock()
    board = Board(clock)
    for name in ("decode-0", "prefill-0", "gateway"):
        board.starting(name)
    clock.now_s = 12.34
    board.loading("decode-0", 3, 4, "loading [the] model")
    board.loading("prefill-0", 0, 0, "measuring memory")
    board.ready("gateway")
    clock.now_s = 99.0
    decode, prefill, gateway = lines(board, width)
    assert all(cell_len(line) <= width for line in (decode, prefill, gateway))
    assert "decode-0" in decode
    assert decode.rstrip().endswith("75 %   99.0 s")
    assert "%" not in prefill
    assert gateway.startswith("✓ gateway")
    assert gateway.rstrip().endswith("12.3 s")
    if width >= 80:
        assert "loading [the] model" in decode
        assert "measuring memory" in prefill


def test_a_mesh_that_serves_shows_what_starts_again_and_its_summary() -> None:
    board = Board(Clock())
    for name in ("decode-0", "gateway"):
        board.starting(name)
    board.ready("gateway")
    board.forget_ended()
    board.summary = Text("2 running")
    decode, summary = lines(board, 80)
    assert "decode-0 starting" in decode
    assert summary == "2 running"
    board.failed("decode-0", "ended with status 1")
    assert lines(board, 80)[0].startswith("✗ decode-0 ended with status 1")
    board.forget("decode-0")
    assert lines(board, 80) == ["2 running"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_plain_output_has_nothing_live(is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, color_system=None, width=80)
    reporter = ConsoleReporter(console, is_plain=is_terminal)
    with reporter.live():
        assert not reporter.is_live
        reporter.starting("decode-0")
        reporter.loading("decode-0", 1, 2, "loading the model")
        reporter.ready("decode-0", 1.5)
        reporter.stopping(3.0)
        reporter.failed("prefill-0", "ended with status 1")
    assert out.getvalue().splitlines()[0].endswith("decode-0 is ready after 1.5 s")
    assert len(out.getvalue().splitlines()) == 1
    assert "\x1b" not in out.getvalue().replace("\x1b[2m", "").replace("\x1b[0m", "")
