"""`weft undrain`: puts a worker back into service that `weft drain` has taken out of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from weft.cli.channel import Metadata
from weft.cli.drain import run
from weft.v1 import gateway_pb2, gateway_pb2_grpc

_TIMEOUT_S = 15.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="weft undrain", description="Puts a drained worker back into service."
    )
    parser.add_argument("worker", help="as `weft status` shows it, such as decode-0")
    return run("weft undrain", parser, argv, _undrain)


def _undrain(
    stub: gateway_pb2_grpc.GatewayServiceStub, arguments: argparse.Namespace, metadata: Metadata
) -> int:
    request = gateway_pb2.UndrainWorkerRequest(worker_id=arguments.worker)
    answer = stub.UndrainWorker(request, timeout=_TIMEOUT_S, metadata=metadata)
    found = "takes requests again" if answer.was_draining else "was not draining"
    sys.stdout.write(f"{arguments.worker}: {found}\n")
    return 0
