"""Parsing of worker addresses in settings."""

from __future__ import annotations


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`.

    Raises:
        ValueError: It is not such an address.
    """
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port; give for example 127.0.0.1:50052")
    return host, int(port)


def split_service(text: str) -> tuple[str, str]:
    """Splits `SERVICE:PORT`.

    Raises:
        ValueError: It is not of that form.
    """
    service, colon, port = text.partition(":")
    if not service or not colon or not port or port.isdigit() or "." in service:
        raise ValueError(
            f"{text!r} is not SERVICE:PORT of this namespace, PORT a name; as weft-decode:grpc"
        )
    return service, port
