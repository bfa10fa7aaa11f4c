"""The registry's manifest: pure values, and the changes that are allowed.

An entry is one content of one name. For each name at most one entry is SERVING, the one that
requests with the name get, and at most one is LOADING. RETIRED entries remain for requests that
began with them.

    begin            commit                          drop
    ------> LOADING --------> SERVING ----> RETIRED ------>
               | abandon              retire, or
               v                      the commit of another one
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
from weft.contract.errors import ConfigError, InvalidRequest, Overloaded, WeftError
from weft.contract.handle import ADAPTER_DIGEST_BYTES

State = Literal["loading", "serving", "retired"]
FORMAT = 1
"""Version of the file format; others are refused."""
MAX_ENTRIES = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One content registered under one name."""

    name: str
    digest: str
    """Content digest, 64 hex digits."""
    model: str
    """Name of its base model."""
    path: str
    """Folder that it was copied from, relative to the root."""
    state: State
    generation: int
    """Generation of the registry in which the entry was created."""
    created: float
    """Time of creation, Unix seconds."""
    is_pinned: bool = False
    """Whether it is kept on the device where there is room."""
    is_lenient: bool = False
    """Whether parts that cannot be applied are left out; the digest says so too."""
    until: float = 0.0
    """While it is loading: Unix time, seconds, from which the load counts as abandoned; the loading
    gateway keeps extending it.
    """

    @property
    def identity(self) -> tuple[str, int, State]:
        """Name, generation and state, which a renewal does not change."""
        return (self.name, self.generation, self.state)

    def is_same(self, other: Entry) -> bool:
        """Whether both are one entry in one state, renewed or not."""
        return self.identity == other.identity

    def means_as(self, other: Entry) -> bool:
        """Whether both have the same content for the same model."""
        return (self.digest, self.model) == (other.digest, other.model)

    def covers(self, other: Entry) -> bool:
        """Whether this entry already does what `other` asks for: it has the same content, and is
        pinned if `other` is.
        """
        return self.means_as(other) and (self.is_pinned or not other.is_pinned)

    @property
    def digest_bytes(self) -> bytes:
        """The digest as services send it."""
        return bytes.fromhex(self.digest)


class AdapterExists(InvalidRequest):
    """The name refers to other content, and the caller did not ask for a replacement."""

    reason = "ADAPTER_EXISTS"


class AdaptersOff(InvalidRequest):
    """The services run without an adapter root."""

    reason = "ADAPTERS_OFF"
    grpc_code = "FAILED_PRECONDITION"


class LoadUnderWay(Overloaded):
    """Another caller is loading the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All entries, and the number of changes so far."""

    format: int = FORMAT
    generation: int = 0
    entries: tuple[Entry, ...] = ()

    def of(self, name: str, state: State) -> Entry | None:
        """The newest entry of a name in a state."""
        found = [entry for entry in self.entries if (entry.name, entry.state) == (name, state)]
        return max(found, key=lambda entry: entry.generation, default=None)

    def in_state(self, state: State) -> Iterator[Entry]:
        """The entries in a state, in the order of their names."""
        return iter(
            sorted((one for one in self.entries if one.state == state), key=lambda one: one.name)
        )

    def digests(self) -> set[str]:
        """Digests whose copies must be kept."""
        return {entry.digest for entry in self.entries}

    def begin(self, entry: Entry, *, replaces: bool, now: float) -> Manifest:
        """Adds an entry that workers are to load, unless its content is already served as asked.

        Pinning a content that is already served is a load like any other, since there may be no
        room.

        Args:
            entry: Entry in state `loading`; its generation is set here.
            replaces: Whether the name may change its content.
            now: Unix time, seconds.

        Raises:
            AdapterExists: The name has other content, and `replaces` is not set.
            LoadUnderWay: Another load of the name is under way.
            Overloaded: There are too many entries.
        """
        serving, loading = self.of(entry.name, "serving"), self.of(entry.name, "loading")
        if serving is not None and serving.covers(entry):
            return self
        if serving is not None and not serving.means_as(entry) and not replaces:
            is_same = serving.model == entry.model
            what = "with other content" if is_same else f"for the model `{serving.model}`"
            raise AdapterExists(
                f"the adapter `{entry.name}` exists {what} in this adapter root; replace it with "
                "load_inplace (--replace of weft adapter load), or take another name",
                stage="validate",
                param="name",
            )
        if loading is not None and loading.until > now:
            raise LoadUnderWay(
                f"another load of the adapter `{entry.name}` is under way",
                stage="queue",
                retry_after_s=min(10.0, loading.until - now),
            )
        if len(self.entries) >= MAX_ENTRIES:
            raise Overloaded(f"the registry has {MAX_ENTRIES} entries; unload some", stage="queue")
        kept = [one for one in self.entries if one is not loading]
        return self._with([*kept, replace(entry, generation=self.generation + 1)])

    def commit(self, entry: Entry, now: float) -> Manifest:
        """Makes a name refer to this entry, as `begin` added it; its previous entry retires. `now`
        is Unix time, seconds.

        Raises:
            Overloaded: The entry is gone, because another gateway took the load for abandoned.
        """
        if not self.has(entry):
            raise Overloaded(
                f"the load of the adapter `{entry.name}` took too long, or was cancelled",
                stage="queue",
            )

        changed = []
        for one in self.entries:
            if one.is_same(entry):
                changed.append(replace(one, state="serving", created=now, until=0.0))
            elif one.state == "retired" and one.name == entry.name and one.means_as(entry):
                # An entry with the new one's content must not retire: its copy would be dropped
                # while it is used.
                continue
            elif (one.name, one.state) != (entry.name, "serving"):
                changed.append(one)
            # If the new entry has the same content, it also serves the old entry's requests.
            elif not one.means_as(entry):
                changed.append(replace(one, state="retired"))
        return self._with(changed)

    def retire(self, name: str) -> Manifest:
        """Removes a name; cancels a load of it."""
        kept = [one for one in self.entries if (one.name, one.state) != (name, "loading")]
        return self._with(
            replace(one, state="retired") if (one.name, one.state) == (name, "serving") else one
            for one in kept
        )

    def drop(self, gone: Iterable[Entry]) -> Manifest:
        """Returns a manifest without these entries. An entry whose state has changed meanwhile
        stays.
        """
        away = {one.identity for one in gone}
        return self._with(one for one in self.entries if one.identity not in away)

    def drop_given_up(self, own: Iterable[Entry], now: float) -> Manifest:
        """Returns a manifest without loads that were not renewed in time, except the caller's
        `own`. `now` is Unix time, seconds.
        """
        kept = {one.identity for one in own}
        late = (one for one in self.in_state("loading") if one.until <= now)
        return self.drop(one for one in late if one.identity not in kept)

    def has(self, entry: Entry) -> bool:
        """Whether the entry is there and in the same state."""
        return any(one.is_same(entry) for one in self.entries)

    def renew(self, entry: Entry, until: float) -> Manifest:
        """Returns a manifest in which a loading entry, as `begin` added it, counts as abandoned
        only from `until` on (Unix time, seconds). Workers see no change.
        """
        entries = (replace(one, until=until) if one.is_same(entry) else one for one in self.entries)
        return replace(self, entries=tuple(entries))

    def _with(self, entries: Iterable[Entry]) -> Manifest:
        changed = tuple(entries)
        if changed == self.entries:
            return self
        return Manifest(generation=self.generation + 1, entries=changed)


_decoder = msgspec.json.Decoder(Manifest)


def parse(data: bytes, where: str) -> Manifest:
    """Parses the bytes of a manifest file, which errors call `where`.

    Raises:
        ConfigError: The file is no manifest, or is of another version of Weft.
    """
    try:
        manifest = _decoder.decode(data)
        _check(manifest)
    except (msgspec.MsgspecError, WeftError, ValueError) as error:
        raise ConfigError(f"{where} is not an adapter registry: {error}") from error
    return manifest


def serialise(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def check_name(name: str) -> str:
    """Returns a name if it is valid for an adapter.

    Raises:
        InvalidRequest: It is not valid.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            "name: 1 to 128 letters, digits and ._-/ are needed, a letter or digit first",
            stage="validate",
            param="name",
        )
    return name


def _check(manifest: Manifest) -> None:
    if manifest.format != FORMAT:
        raise ValueError(f"its format is {manifest.format}, and {FORMAT} is known here")
    for entry in manifest.entries:
        check_name(entry.name)
        if (
            len(entry.digest) != 2 * ADAPTER_DIGEST_BYTES
            or len(entry.digest_bytes) != ADAPTER_DIGEST_BYTES
        ):
            raise ValueError(f"the digest of {entry.name}")
