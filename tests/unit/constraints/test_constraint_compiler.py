"""What compiles strangers' constraints: bounds on time and memory, and nothing else is harmed."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from weft.engine.constraints.wire import (
    CompileOrder,
    CompilerConfig,
    CompileResult,
    PeerClosed,
    encode,
    receive,
)
from weft.engine.request import Constraint

# What the children do: harmful things, by the text of the constraint.
PROGRAM = """
import ctypes, socket, sys
from weft.engine.constraints.compiler import CompilerProcess
from weft.engine.constraints.wire import CompilerConfig, receive

def compile_one(constraint):
    kind = constraint.text
    if kind == "spin":
        while True:
            pass
    if kind == "eat":
        kept = [bytearray(1 << 20) for _ in range(4096)]
    if kind == "alloc":
        raise RuntimeError("[12:00:00] std::bad_alloc")
    if kind == "crash":
        ctypes.string_at(0)
    if kind == "bad":
        raise ValueError("at $.a: no")
    return kind * 100_000

sock = socket.socket(fileno=int(sys.argv[1]))
config = receive(sock, CompilerConfig)
CompilerProcess(sock, config, compile_one).run()
"""


@pytest.fixture
def compiler() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    config = CompilerConfig(
        model_dir="",
        vocab_size=1,
        eos_token_ids=(0,),
        timeout_s=1.0,
        max_memory_bytes=256 << 20,
        max_grammar_bytes=1 << 20,
    )
    ours.sendall(encode(config))
    yield ours
    ours.close()
    # It ends with its socket, whatever its children were doing.
    assert process.wait(timeout=60) == 0


def order(sock: socket.socket, number: int, text: str) -> None:
    constraint = Constraint(kind="regex", text=text)
    sock.sendall(encode(CompileOrder(number=number, constraint=constraint)))


def test_a_good_constraint_is_compiled_while_a_bad_one_spins(compiler: socket.socket) -> None:
    order(compiler, 1, "spin")
    order(compiler, 2, "fine")
    first, second = (receive(compiler, CompileResult) for _ in range(2))
    assert (first.number, first.grammar, first.problem) == (2, "fine" * 100_000, "")
    assert second.number == 1
    assert "longer than 1 s" in second.problem


@pytest.mark.parametrize(
    ("text", "told"),
    [("eat", "256 MiB"), ("alloc", "256 MiB"), ("crash", "256 MiB"), ("bad", "at $.a: no")],
)
def test_harm_stays_in_the_child(compiler: socket.socket, text: str, told: str) -> None:
    for number in (1, 2):
        order(compiler, number, text)
        result = receive(compiler, CompileResult)
        assert result.number == number
        assert told in result.problem
    order(compiler, 3, "fine")
    assert receive(compiler, CompileResult).problem == ""


def test_it_ends_in_the_middle_of_an_order(compiler: socket.socket) -> None:
    order(compiler, 1, "spin")


def test_a_closed_socket_is_told_apart_from_a_message() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"\x10\x00")
    theirs.close()
    with ours, pytest.raises(PeerClosed):
        receive(ours, CompileResult)
