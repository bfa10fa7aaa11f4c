"""Flags, addresses and token of the commands for operators, which talk to several services."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
from weft.cli.channel import (
    DEFAULT_ADDRESS,
    add_tls_flag,
    cli_identity,
    open_channel,
    service_of,
)
from weft.cli.up.settings import default_state_folder
from weft.cli.up.state import StateFolder
from weft.common.admin import read_token
from weft.common.rpc.tls import Identity
from weft.contract.errors import ConfigError


class Operators(NamedTuple):
    """Operators' ports of some services, and the token for them."""

    addresses: Mapping[str, str]
    """host:port by service name."""
    token: str
    identity: Identity | None = None
    """Identity of the command line; None: the mesh runs without TLS."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that a call must carry."""
        return (("authorization", f"Bearer {self.token}"),)

    def open_channel(self, address: str) -> grpc.aio.Channel:
        name = next(name for name, known in self.addresses.items() if known == address)
        return open_channel(address, service_of(name), self.identity)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `find_operators` reads."""
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="of `weft up`; default as there"
    )
    parser.add_argument(
        "--admin-address",
        action="append",
        metavar="[SERVICE=]HOST:PORT",
        help="a service's operators' port, instead of a state folder; may be repeated; with TLS "
        "name the service, as gateway or decode-0",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="default: the one in the state folder"
    )
    add_tls_flag(parser)


def find_operators(arguments: argparse.Namespace, names: Sequence[str]) -> Operators:
    """Finds the services that the flags of `add_flags` name.

    Args:
        names: Services wanted of those in the state folder; empty: all.

    Raises:
        ConfigError: No mesh runs there, a service is not there, or the token or the certificate
            cannot be read.
    """
    identity = cli_identity(arguments.tls_dir)
    if arguments.admin_address:
        if arguments.token_file is None:
            raise ConfigError("--admin-address needs --token-file")
        pairs = [given.rpartition("=") for given in arguments.admin_address]
        named = {name or address: address for name, _, address in pairs}
        return Operators(named, read_token(arguments.token_file), identity)
    folder = StateFolder(arguments.state_dir or default_state_folder(gateway_port()))
    addresses = find_services(folder, names)
    token = read_token(arguments.token_file or folder.admin_token)
    return Operators(addresses, token, identity)


def find_gateway_port(operators: Operators, arguments: argparse.Namespace) -> str:
    """Address of a gateway's operators' port. Raises ConfigError if there is none."""
    if arguments.admin_address:
        return next(iter(operators.addresses.values()))
    for name, address in operators.addresses.items():
        if name.startswith("gateway"):
            return address
    raise ConfigError("the mesh has no gateway; give its operators' port with --admin-address")


def find_services(folder: StateFolder, names: Sequence[str]) -> dict[str, str]:
    """Operators' addresses by service name, from the ready files of a mesh. Empty `names` means all
    services that have such a port. Raises ConfigError if no mesh runs there, or a service is not
    there.
    """
    found: dict[str, str] = {}
    for path in sorted(folder.run.glob("*.json")):
        try:
            address = json.loads(path.read_text()).get("admin_address")
        except (OSError, ValueError):  # it ends, or is being written
            continue
        if address:
            found[path.stem] = address
    if not found:
        raise ConfigError(f"no mesh runs with the state folder {folder.root}; give its --state-dir")
    if missing := sorted(set(names) - found.keys()):
        raise ConfigError(f"no service {', '.join(missing)}; there are {', '.join(found)}")
    return {name: found[name] for name in names} if names else found


def gateway_port() -> int:
    """The gateway's port, by which `weft up` names its default state folder."""
    address = os.environ.get("WEFT_ADDRESS", DEFAULT_ADDRESS)
    port = address.rpartition(":")[2]
    if not port.isdecimal():
        raise ConfigError(f"$WEFT_ADDRESS {address}: give host:port, or --state-dir")
    return int(port)
