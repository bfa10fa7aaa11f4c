"""Certificates for tests, as `weft certs` makes them, and ways to be wrong."""

from __future__ import annotations

import datetime
from pathlib import Path

import grpc
from weft.cli.certs import Authority, files_of, issue, make_authority
from weft.common.rpc.authorize import SERVICES
from weft.common.rpc.tls import Identity, service_name

DAY = datetime.timedelta(days=1)


def make_certificates(folder: Path, *services: str) -> Authority:
    """A new authority and certificates of the services (default: all) in a folder."""
    folder.mkdir(exist_ok=True)
    authority = make_authority(folder)
    for service in services or SERVICES:
        issue(authority, folder, service, ["localhost", "127.0.0.1"])
    return authority


def identity(folder: Path, service: str) -> Identity:
    """The identity of a service."""
    return Identity(files_of(folder, service), service)


def raw_channel(
    address: str, target: str, ca: Path, own: tuple[Path, Path] | None = None
) -> grpc.aio.Channel:
    """A channel that checks nothing of its own certificate first.

    Args:
        address: host:port.
        target: Service that is expected there.
        ca: Authorities trusted.
        own: Certificate and key; None: none.
    """
    cert, key = (None, None) if own is None else (path.read_bytes() for path in own)
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key, cert)
    options = (("grpc.ssl_target_name_override", service_name(target)),)
    return grpc.aio.secure_channel(address, credentials, options=options)
