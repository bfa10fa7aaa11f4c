"""Parsing of Kubernetes Services in settings."""

from __future__ import annotations


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
