"""API keys of tenants: their format, and the file that stores them.

A key is `sk-weft-ID-SECRET`. The file holds SHA-256 digests, not keys. A slow password hash would
add nothing: the secret is 32 random bytes, which cannot be guessed, and every request would pay for
the hash.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from weft.common.file_lock import wait_for_lock
from weft.contract.errors import ConfigError

PREFIX = "sk-weft-"
MAX_KEY_CHARS = 256
TENANT = r"[a-zA-Z0-9][a-zA-Z0-9._@-]{0,63}"
_ID = r"[0-9a-f]{12}"
_KEY = re.compile(rf"{PREFIX}({_ID})-[A-Za-z0-9_-]{{43}}")
_HASH_TEXT = re.compile(rf"({TENANT}):({_ID}):([0-9a-f]{{64}})")
_NO_DIGEST = bytes(32)
_LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """The sender of requests, as identified by its API key."""

    name: str
    cache_group: str
    """Tenants of the same group may use each other's cached prefixes."""
    manages_adapters: bool = field(default=False, compare=False)
    """Whether the key of this call may load and unload adapters."""

    def salt(self, cache_salt: str) -> str:
        """Derives from a client's salt one that no request of another cache group can have. It
        still separates requests of the tenant.
        """
        # Two digests, so that no choice of a salt makes one tenant's input another's.
        group = hashlib.blake2b(self.cache_group.encode(), digest_size=32).digest()
        return hashlib.blake2b(cache_salt.encode(), key=group, digest_size=32).hexdigest()

    def session(self, session_id: str) -> str:
        """Derives a session id that no other tenant's chat can have, though they may share a salt;
        empty stays empty.
        """
        if not session_id:
            return session_id
        name = hashlib.blake2b(self.name.encode(), digest_size=32).digest()
        return hashlib.blake2b(session_id.encode(), key=name, digest_size=32).hexdigest()


def name_of(tenant: Tenant | None) -> str:
    """Name of a tenant; empty for a caller without an API key."""
    return "" if tenant is None else tenant.name


class KeyEntry(BaseModel):
    """One key as the file has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=rf"^{_ID}$")
    """Public part of the key."""
    tenant: str = Field(pattern=rf"^{TENANT}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the whole key."""
    cache_group: str = Field("", pattern=rf"^({TENANT})?$")
    """Group that shares cached prefixes; empty: the tenant shares with no other."""
    manages_adapters: bool = False
    """Whether it may load and unload adapters, which all tenants then see."""
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None
    """Time of expiry; absent: never."""


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[KeyEntry] = []


class KeySet:
    """Keys for lookup."""

    def __init__(self, entries: Iterable[KeyEntry]) -> None:
        """Raises ConfigError when two entries have one id."""
        self._entries: dict[str, tuple[KeyEntry, bytes]] = {}
        for entry in entries:
            if entry.id in self._entries:
                raise ConfigError(f"two API keys have the id {entry.id}")
            self._entries[entry.id] = (entry, bytes.fromhex(entry.sha256))

    def find(self, key: str, now: datetime.datetime) -> Tenant | None:
        """Finds the tenant of a key; None: unknown or expired.

        The time that it takes depends on whether there is a key with that id, which is no secret,
        and not on the secret.
        """
        match = _KEY.fullmatch(key) if len(key) <= MAX_KEY_CHARS else None
        entry, expected = self._entries.get(match[1] if match else "", (None, _NO_DIGEST))
        if not hmac.compare_digest(_digest(key), expected) or entry is None:
            return None
        if entry.expires is not None and entry.expires <= now:
            return None
        # The prefixes keep a group and a tenant of the same name apart.
        group = f"group {entry.cache_group}" if entry.cache_group else f"tenant {entry.tenant}"
        return Tenant(entry.tenant, group, entry.manages_adapters)


def new_key(
    tenant: str,
    cache_group: str = "",
    lifetime: datetime.timedelta | None = None,
    *,
    manages_adapters: bool = False,
) -> tuple[str, KeyEntry]:
    """Generates a key; returns it and the entry to store.

    Raises:
        ConfigError: The tenant's or the group's name is not usable.
    """
    key_id = secrets.token_hex(6)
    key = f"{PREFIX}{key_id}-{secrets.token_urlsafe(32)}"
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    try:
        entry = KeyEntry(
            id=key_id,
            tenant=tenant,
            sha256=_digest(key).hex(),
            cache_group=cache_group,
            manages_adapters=manages_adapters,
            created=now,
            expires=None if lifetime is None else now + lifetime,
        )
    except ValidationError as error:
        raise ConfigError(
            "names of tenants and groups have 1 to 64 letters, digits or ._@-, a letter or digit "
            "first"
        ) from error
    return key, entry


def read_keys(path: Path) -> list[KeyEntry]:
    """Reads the keys of a file.

    Raises:
        ConfigError: The file cannot be read or is not a file of keys; the message does not quote
        it.
    """
    try:
        return _KeyFile.model_validate_json(path.read_bytes()).keys
    except FileNotFoundError as error:
        told = f"no such file; `weft keys add TENANT --file {path}` makes it"
        raise ConfigError(f"API key file {path}: {told}") from error
    except OSError as error:
        raise ConfigError(f"API key file {path}: {error.strerror}") from error
    except ValidationError as error:
        places = {".".join(map(str, item["loc"])) for item in error.errors(include_input=False)}
        where = ", ".join(sorted(place for place in places if place)) or "it is not JSON"
        raise ConfigError(f"API key file {path} is not valid: {where}") from None


@contextlib.contextmanager
def locked_keys(path: Path) -> Iterator[None]:
    """Prevents others from changing the file between reading and writing it.

    Raises:
        ConfigError: The lock, a file next to it, cannot be taken.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        lock = os.open(path.with_name(f".{path.name}.lock"), flags, 0o600)
    except OSError as error:
        raise ConfigError(f"API key file {path}: {error.strerror}") from error
    try:
        try:
            wait_for_lock(lock, _LOCK_TIMEOUT_S)
        except TimeoutError:
            raise ConfigError(f"API key file {path}: another process is changing it") from None
        except OSError as error:
            raise ConfigError(f"API key file {path}: {error.strerror}") from error
        yield
    finally:
        os.close(lock)


def write_keys(path: Path, entries: Iterable[KeyEntry]) -> None:
    """Replaces the file atomically; only this user can read it.

    Raises:
        ConfigError: It cannot be written.
    """
    keys = [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps({"keys": keys}, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(f"API key file {path}: {error.strerror}") from error


def parse_hash(text: str) -> KeyEntry:
    """Parses an entry in the form `TENANT:ID:SHA256`, for the environment.

    Raises:
        ValueError: The text does not have this form.
    """
    match = _HASH_TEXT.fullmatch(text)
    if match is None:
        raise ValueError("give TENANT:ID:SHA256, as `weft keys list --hashes` prints it")
    fields: Mapping[str, str] = {"tenant": match[1], "id": match[2], "sha256": match[3]}
    return KeyEntry.model_validate(fields)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
