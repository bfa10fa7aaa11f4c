"""`weft profile`: records the next steps of the workers' engines, with the spans of the requests of
that time, as one trace that Perfetto opens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from weft.cli.channel import explain_service
from weft.cli.numbers import number, whole_number
from weft.cli.operators import Operators, add_flags, find_gateway_port, find_operators
from weft.contract.codec.walk import duration
from weft.contract.profiles import (
    DEFAULT_LIMIT_S,
    DEFAULT_STEPS,
    MAX_DELAY_STEPS,
    MAX_LIMIT_S,
    MAX_STEPS,
)
from weft.v1 import mesh_pb2, mesh_pb2_grpc, profile_pb2

_ORDER_TIMEOUT_S = 30.0
_WRITING_S = 900.0
"""Longest time from a profile's limit to the end of its transfer."""
VIEWER = "https://ui.perfetto.dev"


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    operators = find_operators(arguments, ())
    return asyncio.run(_profile(arguments, operators, find_gateway_port(operators, arguments)))


async def _profile(arguments: argparse.Namespace, operators: Operators, address: str) -> int:
    async with operators.open_channel(address) as channel:
        stub: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(channel)
        try:
            started = await stub.StartMeshProfile(
                _request(arguments), timeout=_ORDER_TIMEOUT_S, metadata=operators.metadata
            )
            for note in started.notes:
                sys.stderr.write(f"not profiled: {note}\n")
            workers = ", ".join(started.member_ids)
            sys.stderr.write(
                f"profiling {workers}: {arguments.steps} steps, at most {arguments.limit:g} s\n"
            )
            path = arguments.output or Path(f"weft-profile-{started.profile_id}.json.gz")
            try:
                summary = await _fetch(arguments, stub, operators, started.profile_id, path)
            except asyncio.CancelledError:
                stop = mesh_pb2.StopMeshProfileRequest(profile_id=started.profile_id)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.StopMeshProfile(
                        stop, timeout=_ORDER_TIMEOUT_S, metadata=operators.metadata
                    )
                sys.stderr.write(f"ended; the trace will be {started.path} there\n")
                raise
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"weft profile: {explain_service(error, address)}\n")
            return 1
    _tell(summary, path)
    return 0


async def _fetch(
    arguments: argparse.Namespace,
    stub: mesh_pb2_grpc.MeshServiceAsyncStub,
    operators: Operators,
    profile_id: str,
    path: Path,
) -> profile_pb2.ProfileSummary:
    stream = stub.ReadMeshProfile(
        mesh_pb2.ReadMeshProfileRequest(profile_id=profile_id),
        timeout=arguments.limit + _WRITING_S,
        metadata=operators.metadata,
    )
    summary = profile_pb2.ProfileSummary()
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            async for message in stream:
                if message.HasField("summary"):
                    summary = message.summary
                file.write(message.data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return summary


def _tell(summary: profile_pb2.ProfileSummary, path: Path) -> None:
    for engine in summary.engines:
        pause_ms = engine.pause.ToNanoseconds() / 1e6
        early = "" if engine.reason == "steps" else f" ({engine.reason})"
        ranks = f" on {engine.ranks} ranks" if engine.ranks > 1 else ""
        sys.stdout.write(
            f"{engine.worker_id}: {engine.steps} steps{ranks}{early}; paused {pause_ms:,.0f} ms at "
            "the end\n"
        )
    for note in summary.notes:
        sys.stdout.write(f"note: {note}\n")
    sys.stdout.write(f"{path}: {path.stat().st_size:,} bytes; open it at {VIEWER}\n")


def _request(arguments: argparse.Namespace) -> mesh_pb2.StartMeshProfileRequest:
    options = profile_pb2.ProfileOptions(
        steps=arguments.steps,
        after_steps=arguments.after_steps,
        limit=duration(arguments.limit),
        host=arguments.record != "gpu",
        device=arguments.record != "cpu",
    )
    return mesh_pb2.StartMeshProfileRequest(member_ids=arguments.worker, options=options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft profile",
        description="Records the next steps of the workers' engines, with the spans of the "
        f"requests of that time, as one trace to be opened at {VIEWER}. At the end each engine "
        "pauses, for some 10 us for each recorded operation.",
    )
    parser.add_argument(
        "worker", nargs="*", help="as `weft status` shows it, such as decode-0; none = every one"
    )
    parser.add_argument(
        "--steps",
        type=whole_number(1, MAX_STEPS),
        default=DEFAULT_STEPS,
        metavar="N",
        help=f"steps of each engine (default {DEFAULT_STEPS}, at most {MAX_STEPS})",
    )
    parser.add_argument(
        "--after-steps",
        type=whole_number(0, MAX_DELAY_STEPS),
        default=0,
        metavar="N",
        help="let so many steps begin before (default 0)",
    )
    parser.add_argument(
        "--limit",
        type=number(0.1, MAX_LIMIT_S),
        default=DEFAULT_LIMIT_S,
        metavar="S",
        help="end after so many seconds, with the steps that there are; an idle engine makes none "
        f"(default {DEFAULT_LIMIT_S:g})",
    )
    parser.add_argument(
        "--record",
        choices=("all", "cpu", "gpu"),
        default="all",
        help="operations on the CPU, kernels and copies of the GPU, or both (default)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: weft-profile-ID.json.gz in this folder",
    )
    add_flags(parser)
    return parser
