"""Responses in a Valkey or Redis server or cluster, shared by gateways.

Each response is one value that expires. Its name is a digest of tenant and id, and the value
contains the name that it was written for, so that no tenant gets another one's response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from weft.common.valkey_servers import Command, Reply, ValkeyServers, read_password
from weft.contract.errors import PeerUnavailable
from weft.gateway.api.responses.store import StoredResponse

MAX_VALUE_BYTES = 16 << 20
"""Largest value; a larger response is not kept, and a longer value is not read."""
_FORMAT = b"WR2"
_DIGEST_BYTES = 32
_SIZE_BYTES = 4
_HEADER_BYTES = len(_FORMAT) + _DIGEST_BYTES + 2 * _SIZE_BYTES


class SharedResponses:
    """Implements `ResponseStore`. Belongs to the event loop. The server bounds all values together,
    by its `maxmemory`.

    Args:
        urls: One server, or some nodes of one cluster.
        password_file: None: the password is in the URLs, or there is none.
        prefix: Prefix of the names of values; gateways with the same one share responses.
        ttl_s: Seconds after its last use at which a response expires.

    Raises:
        ConfigError: A URL is not valid, or the file cannot be read.
    """

    is_shared = True

    def __init__(
        self,
        urls: Sequence[str],
        password_file: Path | None,
        *,
        prefix: str,
        ttl_s: float,
        timeout_s: float,
    ) -> None:
        password = None
        if password_file is not None:
            password = read_password(password_file, "response_store_password_file")
        self._servers = ValkeyServers(urls, password, timeout_s, param="response_store_url")
        self._prefix = prefix
        self._ttl_ms = round(ttl_s * 1000)
        self._timeout_s = timeout_s

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """A response that no server accepts is not kept."""
        name = self._name(tenant, response_id)
        value = pack(name, stored)
        if len(value) <= MAX_VALUE_BYTES:
            await self._call(("SET", name, value, "PX", self._ttl_ms))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        name = self._name(tenant, response_id)
        size = await self._call(("STRLEN", name))
        if size == 0 or (isinstance(size, int) and size > MAX_VALUE_BYTES):
            return None
        value = await self._call(("GETEX", name, "PX", self._ttl_ms))
        if value is None:
            return None
        if not isinstance(value, bytes):
            raise _unavailable()
        return unpack(name, value)

    async def delete(self, tenant: str, response_id: str) -> bool:
        removed = await self._call(("DEL", self._name(tenant, response_id)))
        if not isinstance(removed, int):
            raise _unavailable()
        return removed > 0

    async def close(self) -> None:
        await self._servers.close()

    async def _call(self, command: Command) -> Reply:
        (reply,) = await self._servers.call([command], self._timeout_s)
        return reply

    def _name(self, tenant: str, response_id: str) -> bytes:
        named = hashlib.sha256(f"{len(tenant)}:{tenant}{response_id}".encode())
        return f"{self._prefix}:{named.hexdigest()}".encode()


def pack(name: bytes, stored: StoredResponse) -> bytes:
    """Packs a response into the value of a name."""
    texts = (stored.response, stored.history, stored.items)
    sizes = [len(text).to_bytes(_SIZE_BYTES, "big") for text in texts[:-1]]
    body = b"".join((*sizes, *texts))
    return _FORMAT + _digest(name, body) + body


def unpack(name: bytes, value: bytes) -> StoredResponse | None:
    """Unpacks the response in the value of a name; None if the value belongs to another name or is
    damaged.
    """
    digest_at, size_at = len(_FORMAT), len(_FORMAT) + _DIGEST_BYTES
    if len(value) < _HEADER_BYTES or not value.startswith(_FORMAT):
        return None
    if value[digest_at:size_at] != _digest(name, value[size_at:]):
        return None
    middle = size_at + _SIZE_BYTES
    end = _HEADER_BYTES + int.from_bytes(value[size_at:middle], "big")
    behind = end + int.from_bytes(value[middle:_HEADER_BYTES], "big")
    if behind > len(value):
        return None
    return StoredResponse(value[_HEADER_BYTES:end], value[end:behind], value[behind:])


def _digest(name: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(
        body, digest_size=_DIGEST_BYTES, key=hashlib.sha256(name).digest()
    ).digest()


def _unavailable() -> PeerUnavailable:
    return PeerUnavailable("the store of responses does not answer; try again", stage="validate")
