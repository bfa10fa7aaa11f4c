"""`weft scale`: how many workers `weft up` runs, while it runs."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table
from weft.cli.channel import add_tls_flag, cli_identity, explain_service, open_channel
from weft.cli.numbers import whole_number
from weft.cli.operators import gateway_port
from weft.cli.tables import print_table
from weft.cli.up.settings import default_state_folder
from weft.cli.up.state import StateFolder
from weft.common.admin import read_token
from weft.contract.errors import ConfigError
from weft.v1 import supervisor_pb2, supervisor_pb2_grpc

_TIMEOUT_S = 15.0
_ROLES = ("prefill", "decode", "both")


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    folder = StateFolder(arguments.state_dir or default_state_folder(gateway_port()))
    address = read_address(folder.supervisor_file)
    return asyncio.run(_scale(arguments, address, read_token(folder.admin_token)))


def read_address(file: Path) -> str:
    """Raises ConfigError if no mesh there takes orders."""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["address"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{file} names no mesh that takes orders; is one up with --max-workers, and is this "
            "its --state-dir?"
        ) from None


async def _scale(arguments: argparse.Namespace, address: str, token: str) -> int:
    metadata = (("authorization", f"Bearer {token}"),)
    async with open_channel(address, "cli", cli_identity(arguments.tls_dir)) as channel:
        stub: supervisor_pb2_grpc.SupervisorServiceAsyncStub = (
            supervisor_pb2_grpc.SupervisorServiceStub(channel)
        )
        try:
            known = await stub.ShowWorkers(
                supervisor_pb2.ShowWorkersRequest(), timeout=_TIMEOUT_S, metadata=metadata
            )
            given = {role: getattr(arguments, role) for role in _ROLES}
            if any(count is not None for count in given.values()):
                model = _find(known.models, arguments.model)
                counts = supervisor_pb2.WorkerCounts()
                counts.CopyFrom(model.ordered)
                for role, count in given.items():
                    if count is not None:
                        setattr(counts, role, count)
                order = supervisor_pb2.SetWorkersRequest(
                    model=model.model, counts=counts, caller="weft scale"
                )
                await stub.SetWorkers(order, timeout=_TIMEOUT_S, metadata=metadata)
                known = await stub.ShowWorkers(
                    supervisor_pb2.ShowWorkersRequest(), timeout=_TIMEOUT_S, metadata=metadata
                )
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"weft scale: {explain_service(error, address)}\n")
            return 1
    _show(known.models)
    return 0


def _find(
    models: Sequence[supervisor_pb2.SupervisedModel], name: str
) -> supervisor_pb2.SupervisedModel:
    found = [model for model in models if name in ("", model.model)]
    if len(found) != 1:
        names = ", ".join(model.model for model in models)
        raise ConfigError(f"give --model, one of {names}")
    return found[0]


def _show(models: Sequence[supervisor_pb2.SupervisedModel]) -> None:
    for model in models:
        ordered = ", ".join(
            f"{count} {role}" for role in _ROLES if (count := getattr(model.ordered, role))
        )
        by = f", by {model.ordered_by}" if model.ordered_by else ""
        sys.stdout.write(f"{model.model}: {ordered} of at most {model.most} ordered{by}\n")
        table = Table("worker", "role", "state", "deaths", box=None)
        for worker in model.workers:
            table.add_row(worker.worker_id, worker.role, worker.state, str(worker.deaths))
        print_table(Console(), table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft scale",
        description="Shows the workers of `weft up --max-workers N`, and starts and ends some of "
        "them. Those that are too many hand over what runs on them. A number that is not given "
        "stays.",
    )
    for role in _ROLES:
        parser.add_argument(
            f"--{role}", type=whole_number(0, 64), metavar="N", help=f"workers of the role {role}"
        )
    parser.add_argument("--model", default="", help="needed if there are several")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="of `weft up`; default as there"
    )
    add_tls_flag(parser)
    return parser
