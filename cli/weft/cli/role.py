"""`weft role`: what gateways use a worker for, changed while it runs."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import grpc
from google.protobuf.duration_pb2 import Duration
from weft.cli.channel import explain_service
from weft.cli.numbers import number
from weft.cli.operators import Operators, add_flags, find_gateway_port, find_operators
from weft.contract.codec.pairs import MEMBER_ROLES
from weft.contract.codec.walk import duration
from weft.v1 import mesh_pb2, mesh_pb2_grpc

_ORDER_TIMEOUT_S = 15.0
_ROUTED_S = 5.0
"""Time in which a gateway must route by the new role: reports come several times a second."""
_MAX_LEASE_S, _MAX_PROOF_S = 86400.0, 3600.0


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    operators = find_operators(arguments, ())
    address = find_gateway_port(operators, arguments)
    return asyncio.run(_set_role(arguments, operators, address))


async def _set_role(arguments: argparse.Namespace, operators: Operators, address: str) -> int:
    worker, role = arguments.worker, arguments.role
    request = mesh_pb2.SetMemberRoleRequest(member_id=worker, role=role, force=arguments.force)
    if arguments.lease is not None:
        request.lease.CopyFrom(duration(arguments.lease))
    async with operators.open_channel(address) as channel:
        stub: mesh_pb2_grpc.MeshServiceAsyncStub = mesh_pb2_grpc.MeshServiceStub(channel)
        try:
            answer = await stub.SetMemberRole(
                request, timeout=_ORDER_TIMEOUT_S, metadata=operators.metadata
            )
            state = await _follow(arguments, stub, operators, answer.changes)
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"weft role: {explain_service(error, address)}\n")
            return 1
    if state is None:
        sys.stderr.write(f"{worker}: the gateway does not route by the new role; see `weft top`\n")
        return 1
    was = "" if answer.previous_role == role else f" (was {answer.previous_role})"
    left = state.lease.ToNanoseconds() / 1e9
    until = f", for {left:.0f} s unless it is set again" if state.HasField("lease") else ""
    proof = "shown by its work" if state.proved else "no request has shown it yet"
    sys.stdout.write(f"{worker}: {role}{was}{until}; {proof}\n")
    return int(bool(arguments.prove) and not state.proved)


async def _follow(
    arguments: argparse.Namespace,
    stub: mesh_pb2_grpc.MeshServiceAsyncStub,
    operators: Operators,
    changes: int,
) -> mesh_pb2.MemberRoleState | None:
    """Waits until the gateway knows the change, and for its proof if that is wanted. None: the
    gateway does not know it.
    """
    wanted = MEMBER_ROLES.numbers[arguments.role]
    known: mesh_pb2.MemberRoleState | None = None
    watch = mesh_pb2.WatchMeshRequest(interval=Duration(nanos=500_000_000))
    stream = stub.WatchMesh(watch, metadata=operators.metadata)
    try:
        async with asyncio.timeout(max(_ROUTED_S, arguments.prove)):
            async for message in stream:
                for member in message.members:
                    state = member.role_state
                    is_it = member.member_id == arguments.worker and member.role == wanted
                    if is_it and state.changes >= changes:
                        known = state
                if known is not None and (known.proved or not arguments.prove):
                    break
    except TimeoutError:
        pass
    finally:
        stream.cancel()
    return known


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft role",
        description="Sets what gateways use a worker for, which was started with `--role both`. "
        "What runs on it goes on, and its prefix cache and adapters stay. Exit status 1: it was "
        "refused, or not proved in the time of --prove.",
    )
    parser.add_argument("worker", help="as `weft status` shows it, such as worker-0")
    parser.add_argument("role", choices=("prefill", "decode", "both"))
    parser.add_argument(
        "--lease",
        type=number(1, _MAX_LEASE_S),
        metavar="S",
        help="after so long the role is both again, unless it is set anew; default: it stays",
    )
    parser.add_argument(
        "--prove",
        type=number(0, _MAX_PROOF_S),
        default=0.0,
        metavar="S",
        help="wait so long for a token or a fill in the new role (default 0)",
    )
    parser.add_argument(
        "--force", action="store_true", help="although no other worker of its model decodes"
    )
    add_flags(parser)
    return parser
