"""Local disk as a tier's medium: one file per page, named by its content.

    DIR/lock                                 held by the process that uses the folder
    DIR/new/NUMBER                           a page that is being written
    DIR/pages/XX/KEY.PARENT.DIGEST.GROUP     a page; XX are the first digits of its key

Groups have no folders of their own: there may be one group per user, and empty folders would stay
for ever.

A file is renamed to its final name once its bytes are written, and the name contains their digest.
After a crash a truncated file has the wrong size, and a file that was never written has the wrong
digest; both count as misses. The tier does not synchronise files, since no page is the only copy of
its data. At start the index is built from the names, in the order of last use (the files' times).
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from weft.contract import faults
from weft.contract.errors import ConfigError
from weft.contract.layout import PagePart
from weft.contract.pages import Page
from weft.pages.memory.eviction import EvictionPolicy
from weft.pages.tiers.keyed import KeyedPages, PageName, PagePlace
from weft.pages.tiers.tier import Tier

_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{64}|-)\.([0-9a-f]{16})\.((?:[0-9a-f]{2})+|-)")
_FOLDER = re.compile(r"[0-9a-f]{2}")


class PageFile(NamedTuple):
    """A page file on disk."""

    name: PageName
    digest: int
    num_bytes: int
    last_used_s: float


class PageFiles:
    """Implements `Medium` over a folder.

    Args:
        folder: Created if it does not exist. One process at a time may use it.

    Raises:
        ConfigError: The folder cannot be used, or another process uses it.
    """

    def __init__(self, folder: Path) -> None:
        self._pages = folder / "pages"
        self._new = folder / "new"
        self._numbers = itertools.count()
        self._made: set[Path] = set()
        try:
            self._pages.mkdir(parents=True, exist_ok=True)
            self._new.mkdir(exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for unfinished in self._new.iterdir():
                unfinished.unlink()
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                f"disk cache: another process uses {folder}; give each worker and store its own",
                param="disk_cache_dir",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"disk cache: {folder} cannot be used: {error}", param="disk_cache_dir"
            ) from error

    def scan(self) -> Iterator[PageFile]:
        """Lists all page files, in no order."""
        for folder in self._pages.iterdir():
            if _FOLDER.fullmatch(folder.name) is None or not folder.is_dir():
                continue
            with os.scandir(folder) as entries:
                for entry in entries:
                    if (found := _NAME.fullmatch(entry.name)) is not None:
                        yield _stored(found, entry)

    def discard(self, page: PageFile) -> None:
        self.remove(PagePlace(0, page.name, page.digest))

    def read(self, place: PagePlace, into: Page) -> bool:
        return self.read_part(place, into, PagePart(1, into.size, 0, into.size))

    def read_part(self, place: PagePlace, into: Page, part: PagePart) -> bool:
        try:
            descriptor = os.open(self._path(place), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            view = memoryview(into.data)
            for number in range(part.num_ranges):
                done = number * part.stride + part.begin
                end = done + part.size
                while done < end:
                    num_bytes = os.preadv(descriptor, [view[done:end]], done)
                    if not num_bytes:
                        return False
                    done += num_bytes
            if part.begin == 0:
                os.utime(descriptor)
        finally:
            os.close(descriptor)
        if faults.TIER_DISK_READ.is_armed:
            faults.TIER_DISK_READ.flip_bit(into.reshape(1, -1), [0])
        return True

    def write(self, place: PagePlace, content: Page) -> None:
        if faults.TIER_DISK_WRITE.is_armed:
            faults.TIER_DISK_WRITE.fire()
        path, new = self._path(place), self._new / str(next(self._numbers))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._make(path.parent)
            descriptor = os.open(new, flags, 0o600)
            try:
                view, done = memoryview(np.ascontiguousarray(content).data), 0
                while done < len(view):
                    done += os.write(descriptor, view[done:])
            finally:
                os.close(descriptor)
            new.rename(path)
        except OSError:
            self._made.clear()  # Folders may have been removed by others.
            new.unlink(missing_ok=True)
            raise

    def remove(self, place: PagePlace) -> None:
        try:
            self._path(place).unlink(missing_ok=True)
        except OSError:  # The next start finds and counts the file.
            return

    def direct(self, place: PagePlace, *, is_read: bool) -> Page | None:
        return None

    def close(self) -> None:
        """Releases the folder's lock for another process."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _path(self, place: PagePlace) -> Path:
        key, parent, group = place.name
        digits = key.hex()
        name = f"{digits}.{parent.hex() or '-'}.{place.digest:016x}.{group.hex() or '-'}"
        return self._pages / digits[:2] / name

    def _make(self, folder: Path) -> None:
        if folder not in self._made:
            self._new.mkdir(parents=True, exist_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
            self._made.add(folder)


def disk_tier(
    files: PageFiles,
    num_bytes: int,
    page_bytes: int,
    policy: EvictionPolicy,
    *,
    is_sure: bool = True,
) -> Tier:
    """Creates a tier of at most `num_bytes` bytes in a folder, with the pages found there.

    Files with pages of another size are removed, and so are the oldest files if there are too many.
    If `page_bytes` is not certain (`is_sure`), files of other sizes are kept until
    `discard_others`.

    Raises:
        ConfigError: Not a single page fits.
        OSError: The folder cannot be read.
    """
    num_slots = num_bytes // page_bytes
    if num_slots < 1:
        raise ConfigError(
            f"disk_cache_bytes = {num_bytes:,}: a page has {page_bytes:,} bytes",
            param="disk_cache_bytes",
        )
    tier = Tier("disk", KeyedPages(num_slots, policy), files, page_bytes)
    found: list[PageFile] = []
    for page in files.scan():
        if page.num_bytes == page_bytes:
            found.append(page)
        elif is_sure:
            files.discard(page)
    found.sort(key=lambda page: page.last_used_s, reverse=True)
    for page in found[num_slots:]:
        files.discard(page)
    for page in reversed(found[:num_slots]):
        slot = tier.pages.reserve(page.name.key)
        if slot is None:  # Two files have this key and different digests; either one serves.
            files.discard(page)
        else:
            tier.pages.publish(PagePlace(slot, page.name, page.digest))
    return tier


def discard_others(files: PageFiles, page_bytes: int) -> None:
    """Removes files with pages of another size. Reads and writes may run at the same time.

    Raises:
        OSError: The folder cannot be read.
    """
    for page in files.scan():
        if page.num_bytes != page_bytes:
            files.discard(page)


def stored_page_bytes(files: PageFiles) -> int:
    """Most common size of the files; 0: there are none. A loss of power may have truncated some."""
    sizes = Counter(page.num_bytes for page in files.scan() if page.num_bytes)
    return max(sizes, key=sizes.__getitem__, default=0)


def _stored(found: re.Match[str], entry: os.DirEntry[str]) -> PageFile:
    key, parent, digest, group = found.groups()
    about = entry.stat(follow_symlinks=False)
    name = PageName(bytes.fromhex(key), _bytes_of(parent), _bytes_of(group))
    return PageFile(name, int(digest, 16), about.st_size, about.st_mtime)


def _bytes_of(digits: str) -> bytes:
    return b"" if digits == "-" else bytes.fromhex(digits)
