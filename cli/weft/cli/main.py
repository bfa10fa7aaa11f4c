"""The `weft` command: finds the subcommand and loads only what it needs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NamedTuple

from weft.cli.output import CANNOT_WRITE, finish_output, open_closed_output
from weft.contract.errors import WeftError
from weft.contract.startup import no_collections


class Command(NamedTuple):
    module: str
    """Module with `main(argv) -> int`, whose result is the exit status. It may raise WeftError."""
    summary: str


COMMANDS: dict[str, Command] = {
    "up": Command("weft.cli.up.command", "start a mesh on this machine and watch over it"),
    "serve": Command("weft.cli.serve", "run one service: gateway, prefill, decode, kvstore, ..."),
    "chat": Command("weft.cli.chat", "talk to a model in the terminal"),
    "status": Command("weft.cli.status", "show workers, load, pages and transports"),
    "doctor": Command("weft.cli.doctor.command", "what of this host is used, and what holds back"),
    "top": Command("weft.cli.top.command", "members, flows and requests of a mesh, live"),
    "drain": Command("weft.cli.drain", "take a worker out of service; what runs on it goes on"),
    "undrain": Command("weft.cli.undrain", "put a drained worker back into service"),
    "role": Command("weft.cli.role", "let a worker prefill, decode or do both, while it runs"),
    "refit": Command("weft.cli.refit", "bring workers the weights of another one"),
    "scale": Command("weft.cli.scale", "start and end workers of a mesh that is up"),
    "plan": Command("weft.cli.plan", "how many workers a day of traffic would need"),
    "trace": Command("weft.cli.trace", "show what happened to one request, as a tree"),
    "profile": Command("weft.cli.profile", "record the workers' next steps, as one trace"),
    "replay": Command("weft.cli.replay", "send the requests of a log again, and compare"),
    "flush": Command("weft.cli.flush", "drop cached KV that nobody uses"),
    "fault": Command("weft.chaos.fault", "make services and links fail on purpose, for tests"),
    "certs": Command("weft.cli.certs", "make certificates for the services of a mesh"),
    "keys": Command("weft.cli.keys", "add, list and revoke the API keys of tenants"),
    "chaos": Command("weft.chaos.command", "fault runs against a mesh of its own, with checks"),
    "adapter": Command("weft.cli.adapter", "load, unload and list LoRA adapters"),
    "model": Command("weft.cli.model", "list, download, verify, remove and convert models"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `weft`; returns the exit status."""
    open_closed_output()
    # Else gRPC writes lines of its own to terminals and logs, such as one for each closed server.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    arguments = list(sys.argv[1:] if argv is None else argv)
    for argument in arguments:
        if not _is_text(argument):
            sys.stderr.write(f"weft: {argument!r} is not valid UTF-8\n")
            return 2
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0
    if name == "--version":
        sys.stdout.write(f"weft {version('weft')}\n")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        sys.stderr.write(f"weft: no command {name!r}\n\n{_help()}")
        return 2
    try:
        with no_collections():
            run: Callable[[Sequence[str]], int] = importlib.import_module(command.module).main
        status = run(arguments[1:])
        sys.stdout.flush()
        return status
    except WeftError as error:
        finish_output()
        sys.stderr.write(f"weft {name}: {error}\n")
        return 1
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        finish_output()
        sys.stderr.write(f"weft {name}: cannot write: {error.strerror}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _is_text(argument: str) -> bool:
    """Bytes that are no valid text reach Python as lone surrogates, which no message can carry."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _help() -> str:
    lines = [f"  {name:<8} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: weft COMMAND [flags]", "", *lines, "", "`weft COMMAND --help` shows its flags.\n"]
    )
