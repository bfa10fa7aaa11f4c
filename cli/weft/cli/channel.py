"""gRPC channels of the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import grpc
from weft.common.rpc import channel
from weft.common.rpc.tls import Identity
from weft.contract.errors import ConfigError

Metadata = tuple[tuple[str, str], ...]

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
)
DEFAULT_ADDRESS = "127.0.0.1:50051"


def service_of(name: str) -> str:
    """The service that answers as a member of a mesh, such as decode-0: TLS checks it. Workers of
    both roles (worker-0) have the names of both services.
    """
    stem = name.rpartition("-")[0] or name
    return "decode" if stem == "worker" else stem


def open_channel(
    address: str, service: str = "gateway", identity: Identity | None = None
) -> grpc.aio.Channel:
    """Opens a channel to `host:port`, whatever proxy the environment names."""
    return channel.open_channel(address, service, identity, OPTIONS)


def open_blocking_channel(
    address: str, service: str = "gateway", identity: Identity | None = None
) -> grpc.Channel:
    """Like `open_channel`, without an event loop."""
    return channel.open_blocking_channel(address, service, identity, OPTIONS)


def add_address_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--address`, the gateway's, and `--tls-dir`."""
    parser.add_argument(
        "--address",
        default=os.environ.get("WEFT_ADDRESS", DEFAULT_ADDRESS),
        metavar="HOST:PORT",
        help=f"gRPC address of the gateway; default $WEFT_ADDRESS, else {DEFAULT_ADDRESS}",
    )
    add_tls_flag(parser)


def add_gateway_flags(parser: argparse.ArgumentParser) -> None:
    """Like `add_address_flag`, with the gateway's admin port as an alternative."""
    add_address_flag(parser)
    parser.add_argument(
        "--admin-address",
        metavar="HOST:PORT",
        help="the gateway's operators' port, asked instead of --address; needed where it runs with "
        "--no-client-certificates",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="with the token of the operators' port"
    )


def find_gateway(arguments: argparse.Namespace) -> tuple[str, Metadata]:
    """Returns the gateway's address, by the flags of `add_gateway_flags`, and the metadata that
    calls must carry. Raises ConfigError if the token is missing or cannot be read.
    """
    if arguments.admin_address is None:
        return arguments.address, ()
    if arguments.token_file is None:
        raise ConfigError("--admin-address needs --token-file")
    # Imported here, since most commands do not need it.
    from weft.common.admin import read_token

    token = read_token(arguments.token_file)
    return arguments.admin_address, (("authorization", f"Bearer {token}"),)


def call_gateway(
    program: str,
    arguments: argparse.Namespace,
    call: Callable[[str, Identity | None, Metadata], int],
) -> int:
    """Runs a command that calls the gateway, and explains failed calls on standard error. Returns
    the exit status.

    `arguments` has the flags of `add_gateway_flags`. `call` takes the gateway's address, the
    command's identity and the calls' metadata, and returns the exit status.
    """
    address = arguments.address
    try:
        address, metadata = find_gateway(arguments)
        return call(address, cli_identity(arguments.tls_dir), metadata)
    except grpc.RpcError as error:
        sys.stderr.write(f"{program}: {explain(error, address)}\n")
        return 1


def add_tls_flag(parser: argparse.ArgumentParser) -> None:
    given = os.environ.get("WEFT_TLS_DIR")
    parser.add_argument(
        "--tls-dir",
        type=Path,
        default=Path(given) if given else None,
        metavar="DIR",
        help="folder of `weft certs`, if the mesh uses TLS; default $WEFT_TLS_DIR",
    )


def cli_identity(tls_dir: Path | None) -> Identity | None:
    """The command line's own identity in a folder of `weft certs`; None without a folder. Raises
    ConfigError if the identity cannot be used.
    """
    if tls_dir is None:
        return None
    # Imported here, since a command without TLS does not need it.
    from weft.cli.certs import files_of

    if not tls_dir.is_dir():
        raise ConfigError(f"--tls-dir {tls_dir}: no such folder; `weft certs {tls_dir}` makes it")
    return Identity(files_of(tls_dir, "cli"), "cli")


def api_key_metadata() -> Metadata:
    """Metadata with the API key of $WEFT_API_KEY, for gateways that ask for keys. Raises
    ConfigError if the key has characters that no header can carry.
    """
    key = os.environ.get("WEFT_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("$WEFT_API_KEY is not an API key: it contains invalid characters")
    return (("authorization", f"Bearer {key}"),) if key else ()


def explain(error: grpc.RpcError, address: str) -> str:
    if error.code() == grpc.StatusCode.UNAVAILABLE and not _is_typed(error):
        return (
            f"no gateway answers at {address}; is the mesh up (`weft up`), and does it want "
            "--tls-dir?"
        )
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and not _is_typed(error):
        return f"the gateway at {address} did not answer in time; its log may say why"
    if error.code() == grpc.StatusCode.PERMISSION_DENIED:
        # With its own certificate the command line may make all of its calls, but this gateway
        # asked for none, or it has no TLS.
        return (
            f"{error.details()}: the gateway at {address} runs without TLS or with "
            "--no-client-certificates; ask its operators' port, with --admin-address and "
            "--token-file"
        )
    return f"{error.details() or error.code().name}"


def explain_service(error: grpc.RpcError, address: str) -> str:
    """Explains a failed call of a service, to be printed after the service's name."""
    if error.code() == grpc.StatusCode.UNAVAILABLE and not _is_typed(error):
        return f"does not answer at {address}; does the mesh want --tls-dir?"
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and not _is_typed(error):
        return "did not answer in time; its log may say why"
    return error.details() or error.code().name


def _is_typed(error: grpc.RpcError) -> bool:
    """Whether a service made the failure; if not, the transport did."""
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    return any(key == "grpc-status-details-bin" for key, _ in metadata)
