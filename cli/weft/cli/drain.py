"""`weft drain`: takes a worker out of service; it stays up until `weft undrain` puts it back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence

from weft.cli.channel import Metadata, add_gateway_flags, call_gateway, open_blocking_channel
from weft.cli.numbers import number
from weft.common.rpc.tls import Identity
from weft.contract.codec.walk import duration
from weft.v1 import gateway_pb2, gateway_pb2_grpc

_MAX_TIMEOUT_S = 3600.0
_FLEET_TIMEOUT_S = 10.0
_GRACE_S = 15.0
"""Seconds by which the call outlasts the gateway's own time limit."""

Call = Callable[[gateway_pb2_grpc.GatewayServiceStub, argparse.Namespace, Metadata], int]
"""A call of the gateway; returns the exit status."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="weft drain",
        description="Takes a worker out of service: it gets no new requests, and waiting ones go "
        "to other workers. It stays up, and drains until it is restarted or `weft undrain` puts "
        "it back. Exit status 1: requests still run on it, or it was put back meanwhile.",
    )
    parser.add_argument("worker", help="as `weft status` shows it, such as decode-0")
    parser.add_argument(
        "--timeout",
        type=number(0, _MAX_TIMEOUT_S),
        default=60.0,
        metavar="S",
        help="wait so long for running requests (default 60); 0: do not wait",
    )
    parser.add_argument(
        "--hand-back",
        action="store_true",
        help="after the time-out other workers resume what still runs; without it that goes on",
    )
    return run("weft drain", parser, argv, _drain)


def run(program: str, parser: argparse.ArgumentParser, argv: Sequence[str], call: Call) -> int:
    """Makes one call of the gateway that the flags name; returns the exit status."""
    add_gateway_flags(parser)
    arguments = parser.parse_args(argv)

    def run_call(address: str, identity: Identity | None, metadata: Metadata) -> int:
        with open_blocking_channel(address, "gateway", identity) as channel:
            return call(gateway_pb2_grpc.GatewayServiceStub(channel), arguments, metadata)

    return call_gateway(program, arguments, run_call)


def _drain(
    stub: gateway_pb2_grpc.GatewayServiceStub, arguments: argparse.Namespace, metadata: Metadata
) -> int:
    fleet = stub.GetFleet(
        gateway_pb2.GetFleetRequest(), timeout=_FLEET_TIMEOUT_S, metadata=metadata
    )
    if warning := _last_of_its_kind(fleet.workers, arguments.worker):
        sys.stderr.write(f"weft drain: {warning}\n")
    request = gateway_pb2.DrainWorkerRequest(
        worker_id=arguments.worker,
        timeout=duration(arguments.timeout),
        hand_back=arguments.hand_back,
    )
    answer = stub.DrainWorker(request, timeout=arguments.timeout + _GRACE_S, metadata=metadata)
    if answer.idle:
        sys.stdout.write(f"{arguments.worker}: drained\n")
        return 0
    if not answer.draining:
        sys.stdout.write(f"{arguments.worker}: takes requests again; it was put back meanwhile\n")
        return 1
    running = answer.running_requests
    left = f"{running} request{'s' if running != 1 else ''}" if running else "leases of pages"
    sys.stdout.write(f"{arguments.worker}: takes no new requests; still there: {left}\n")
    return 1


def _last_of_its_kind(workers: Collection[gateway_pb2.FleetWorker], worker_id: str) -> str:
    drained = next((one for one in workers if one.worker_id == worker_id), None)
    if drained is None or any(
        one.healthy and (one.role, one.model) == (drained.role, drained.model)
        for one in workers
        if one.worker_id != worker_id
    ):
        return ""
    if drained.role == "decode":
        return f"no other worker serves {drained.model}: waiting requests will fail"
    return f"no other prefill worker serves {drained.model}"
