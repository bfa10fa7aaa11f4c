"""`weft flush`: drops cached KV that nobody uses, in a mesh that `weft up` started here."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import grpc
from weft.cli.channel import explain_service
from weft.cli.operators import Operators, add_flags, find_operators
from weft.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    return asyncio.run(_flush_all(find_operators(arguments, arguments.service)))


async def _flush_all(operators: Operators) -> int:
    flushing = (_flush(address, operators) for address in operators.addresses.values())
    results = await asyncio.gather(*flushing)
    for name, (flushed, problem) in zip(operators.addresses, results, strict=True):
        if problem:
            sys.stderr.write(f"{name}: {problem}\n")
        else:
            sys.stdout.write(f"{name}: {flushed:,} pages flushed\n")
    return int(any(problem for _, problem in results))


async def _flush(address: str, operators: Operators) -> tuple[int, str]:
    async with operators.open_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        try:
            answer = await stub.FlushCache(
                admin_pb2.FlushCacheRequest(), metadata=operators.metadata, timeout=_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            return 0, explain_service(error, address)
    return int(answer.flushed_pages), ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft flush",
        description="Drops cached KV that nobody uses; what runs is not disturbed. The gateway "
        "forgets what it believes its workers hold.",
    )
    parser.add_argument(
        "service", nargs="*", help="as decode-0, kvstore-0 or gateway; none = every one"
    )
    add_flags(parser)
    return parser
