"""Which hosts and addresses images may be fetched from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import NamedTuple

_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9])?")
_PATTERN = re.compile(r"(?P<host>\*|\[[0-9a-f:.]+\]|(\*\.)?[a-z0-9_.-]+)(:(?P<port>[0-9]{1,5}))?")

_Network = IPv4Network | IPv6Network


def _networks(*texts: str) -> tuple[_Network, ...]:
    return tuple(ip_network(text) for text in texts)


_METADATA = _networks(
    "100.100.100.200/32",  # Alibaba Cloud
    "168.63.129.16/32",  # Azure, whose address is a public one
    "169.254.0.0/16",  # AWS, Google Cloud, Azure and others
    "192.0.0.192/32",  # Oracle Cloud
    "fd00:ec2::/32",  # AWS
    "fe80::/10",
)
"""Where a machine of a cloud gets its credentials, and link-local addresses."""
_PRIVATE = _networks(
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "::1/128",
    "fc00::/7",
)
_PUBLIC_V6 = IPv6Network("2000::/3")
_OTHER_V6 = _networks("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
"""Within `_PUBLIC_V6`: tunnels, which lead to addresses of IPv4, and what nobody has."""
_RELAYS = IPv4Network("192.88.99.0/24")
_NAT64 = IPv6Network("64:ff9b::/96")


class _Pattern(NamedTuple):
    host: str
    port: int | None

    def allows(self, host: str, port: int, default_port: int) -> bool:
        if port != (default_port if self.port is None else self.port):
            return False
        if self.host.startswith("*"):
            return host.endswith(self.host[1:])
        return host == self.host


class HostPatterns:
    """Hosts that an operator names: HOST, `*.DOMAIN` for all below a domain, or `*`, each with a
    port or for the port of its scheme.
    """

    def __init__(self, texts: Iterable[str], *, has_wildcards: bool = True) -> None:
        """Raises ValueError for a text that is no pattern; without `has_wildcards` also for one
        that is no single host.
        """
        self._patterns = [_parse(text, has_wildcards) for text in texts]

    def allows(self, host: str, port: int, default_port: int) -> bool:
        """Whether a host, in lower case and an IPv6 address without brackets, is among them."""
        return any(one.allows(host, port, default_port) for one in self._patterns)


def is_host(text: str) -> bool:
    """Whether a text is a name or an address, as the host of a URL in lower case."""
    if _NAME.fullmatch(text):
        return True
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return isinstance(address, IPv6Address) and address.scope_id is None


def may_connect(text: str, *, allows_private: bool) -> bool:
    """Whether an address may be connected to: a public one, and with `allows_private` one of a
    private network or of this machine; never one of a cloud's metadata, link-local or multicast.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address in _NAT64:
        address = IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address in network for network in _METADATA):
        return False
    if any(address in network for network in _PRIVATE):
        return allows_private
    if not address.is_global or address.is_multicast or address in _RELAYS:
        return False
    if isinstance(address, IPv4Address):
        return True
    return address in _PUBLIC_V6 and not any(address in network for network in _OTHER_V6)


def _parse(text: str, has_wildcards: bool) -> _Pattern:
    found = _PATTERN.fullmatch(text.lower())
    host, port = ("", None) if found is None else (found["host"].strip("[]"), found["port"])
    is_wild = host.startswith("*")
    is_named = has_wildcards if host == "*" else is_host(host.removeprefix("*."))
    if not is_named or (is_wild and not has_wildcards) or (port and not 1 <= int(port) <= 65535):
        forms = "HOST, *.DOMAIN or *" if has_wildcards else "HOST"
        raise ValueError(f"{text!r:.80} is not {forms}, each with or without :PORT")
    return _Pattern(host, int(port) if port else None)
