"""`weft fault`: makes services, or links between them, fail on purpose, for tests of a mesh."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table
from weft.chaos import fault_proxy
from weft.cli.channel import explain_service
from weft.cli.operators import Operators, add_flags, find_operators
from weft.cli.tables import print_table
from weft.contract.codec.pairs import FAULT, FAULT_KINDS
from weft.contract.faults import BOARD, KINDS, FaultSpec
from weft.v1 import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.action == "points":
        _show_points(Console())
        return 0
    if arguments.action == "proxy":
        return fault_proxy.run(arguments)
    operators = find_operators(arguments, arguments.service)
    if arguments.action == "add":
        spec = _spec(arguments)
        BOARD.check(spec)
        request = admin_pb2.InjectFaultRequest(fault=FAULT.encode(spec))
        return asyncio.run(_tell("InjectFault", request, operators))
    if arguments.action == "clear":
        clear = admin_pb2.ClearFaultsRequest(point=arguments.point)
        return asyncio.run(_tell("ClearFaults", clear, operators))
    return asyncio.run(_list(operators, Console()))


async def call_operators(method: str, request: Any, address: str, operators: Operators) -> Any:
    async with operators.open_channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        return await getattr(stub, method)(request, metadata=operators.metadata, timeout=_TIMEOUT_S)


async def _tell(method: str, request: Any, operators: Operators) -> int:
    status = 0
    for name, address in operators.addresses.items():
        try:
            answer = await call_operators(method, request, address, operators)
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"{name}: {explain_service(error, address)}\n")
            status = 1
            continue
        if isinstance(answer, admin_pb2.ClearFaultsResponse):
            sys.stdout.write(f"{name}: {answer.cleared_faults} faults cleared\n")
        else:
            sys.stdout.write(f"{name}: armed\n")
    return status


async def _list(operators: Operators, console: Console) -> int:
    table = Table(box=None, pad_edge=False)
    for column in ("service", "point", "kind", "probability", "reached", "fired", "of"):
        table.add_column(column, no_wrap=True)
    status = 0
    for name, address in operators.addresses.items():
        try:
            request = admin_pb2.ListFaultsRequest()
            answer = await call_operators("ListFaults", request, address, operators)
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"{name}: {explain_service(error, address)}\n")
            status = 1
            continue
        for state in answer.faults:
            fault = state.fault
            table.add_row(
                name,
                fault.point,
                FAULT_KINDS[fault.kind],
                f"{fault.probability:g}",
                str(state.reached),
                str(state.fired),
                str(fault.count) if fault.count else "no bound",
            )
    if table.row_count:
        print_table(console, table)
    else:
        sys.stdout.write("no fault is armed\n")
    return status


def _show_points(console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("point", "kinds", "where"):
        table.add_column(column)
    for point in BOARD.points:
        table.add_row(point.name, ", ".join(point.kinds), point.where)
    print_table(console, table)


def _spec(arguments: argparse.Namespace) -> FaultSpec:
    return FaultSpec(
        point=arguments.point,
        kind=arguments.kind,
        probability=arguments.probability,
        count=arguments.count,
        skip=arguments.skip,
        seed=arguments.seed,
        delay_s=arguments.delay_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft fault",
        description="Makes services of a mesh fail at named points, for which they must have been "
        "started with --enable-faults (`weft up --enable-faults`); or a link between any two.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("points", help="show where faults can be armed, and which")
    add = actions.add_parser("add", help="arm a fault")
    add.add_argument("point", help="as `weft fault points` shows them")
    add.add_argument("kind", choices=sorted(KINDS), metavar="kind", help="what happens")
    default = FaultSpec(point="", kind="")
    for name, help_text in (
        ("probability", "that it happens when the point is reached"),
        ("count", "how often it happens at most; 0 = without bound"),
        ("skip", "times that the point is passed before"),
        ("seed", "of the draws"),
        ("delay_s", "how long a delay lasts, or a stall at most, in seconds"),
    ):
        value = getattr(default, name)
        add.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value),
            default=value,
            help=f"{help_text} (default {value:g})",
        )
    clear = actions.add_parser("clear", help="disarm faults; stalls end")
    clear.add_argument("point", nargs="?", default="", help="only those armed there")
    listing = actions.add_parser("list", help="show what is armed, and how often it happened")
    fault_proxy.add_arguments(actions.add_parser("proxy", help=fault_proxy.SUMMARY))
    for each in (add, listing, clear):
        each.add_argument(
            "--service",
            action="append",
            default=[],
            metavar="NAME",
            help="as decode-0, kvstore-0 or gateway; may be repeated; none = every one",
        )
        add_flags(each)
    return parser
