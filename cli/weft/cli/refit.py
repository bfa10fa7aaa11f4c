"""`weft refit`: brings workers the weights of another worker."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

import grpc
from weft.cli.channel import explain_service
from weft.cli.operators import Operators, add_flags, find_operators, gateway_port
from weft.cli.up.settings import default_state_folder
from weft.cli.up.state import StateFolder
from weft.contract.errors import ConfigError
from weft.contract.weights import MAX_LIMIT_S
from weft.v1 import admin_pb2_grpc, weights_pb2


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    operators = find_operators(arguments, arguments.workers)
    source = _address_of(arguments)
    return asyncio.run(_refit(arguments, operators, source))


async def _refit(arguments: argparse.Namespace, operators: Operators, source: str) -> int:
    request = weights_pb2.RefitRequest(peer=source, version=arguments.version)
    failed = 0
    for name, address in operators.addresses.items():
        async with operators.open_channel(address) as channel:
            stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)
            try:
                answer = await stub.Refit(request, timeout=MAX_LIMIT_S, metadata=operators.metadata)
            except grpc.aio.AioRpcError as error:
                sys.stderr.write(f"weft refit: {name}: {explain_service(error, address)}\n")
                failed += 1
                continue
        status = answer.status
        sys.stdout.write(f"{name}: version {status.version}, {status.model_digest.hex()[:16]}\n")
    return int(failed > 0)


def _address_of(arguments: argparse.Namespace) -> str:
    source: str = arguments.source
    if ":" in source:
        return source
    folder = StateFolder(arguments.state_dir or default_state_folder(gateway_port()))
    try:
        address: str = json.loads((folder.run / f"{source}.json").read_text())["address"]
    except (OSError, ValueError, KeyError) as error:
        message = (
            f"--from {source}: no such worker in {folder.root}; give host:port, or --state-dir"
        )
        raise ConfigError(message) from error
    return address


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft refit",
        description="Copies the packed weights of a worker to others of the same model, one after "
        "another, over NIXL. Requests under way go on. Exit status 1: a worker has not got them; "
        "one whose copy failed in the middle refuses requests until an update ends.",
    )
    parser.add_argument("workers", nargs="+", metavar="WORKER", help="as `weft status` shows them")
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="WORKER",
        help="whose weights: a worker of the state folder, or host:port",
    )
    parser.add_argument(
        "--version", default="", metavar="NAME", help="of the weights; default: the source's"
    )
    add_flags(parser)
    return parser
