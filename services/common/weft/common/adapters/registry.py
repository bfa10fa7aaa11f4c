"""The registry's folder: one manifest file, changed by compare-and-swap, and the copies.

    <root>/adapters.json           the manifest
    <root>/.weft/<digest>/         the entries' contents: copies that do not change
    <root>/.weft/lock              held while the manifest changes
    <root>/<anything else>         where adapters are loaded from

Any gateway may change it; workers and the other gateways follow. The root may be a shared volume of
several machines, as long as it has file locks and atomic renames (local disks, NFS 4).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.common.adapters.manifest import Manifest, parse, serialise
from weft.common.adapters.paths import COPIES, copy_adapter, remove_copies
from weft.common.file_lock import wait_for_lock
from weft.contract.errors import ConfigError, Overloaded

MANIFEST = "adapters.json"
MAX_MANIFEST_BYTES = 16 << 20
Stamp = tuple[int, int, int]
"""Identity of a file's version: modification time, inode, size."""


class Registry:
    """One adapter root. All methods wait for disks: call them in threads. Other processes have
    `lock_timeout_s` to finish their changes.

    Raises:
        ConfigError: There is no such folder.
    """

    def __init__(self, root: Path, lock_timeout_s: float = 10.0) -> None:
        if not root.is_dir():
            raise ConfigError(f"--adapter-root {root}: no such folder")
        self.root = root
        self._lock_timeout_s = lock_timeout_s
        self._path = root / MANIFEST
        self._was_there = False
        """Whether there was a manifest. Weft never removes it, so a missing one shows that the
        volume is gone.
        """

    def directory(self, digest: bytes) -> Path:
        """Folder of the files with a content digest."""
        return self.root / COPIES / digest.hex()

    def stamp(self) -> Stamp:
        """A value that differs after each change; zeros while there is no manifest."""
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_ino, found.st_size)

    def read(self) -> Manifest:
        """Reads the current manifest; an empty one if there never was any.

        Raises:
            ConfigError: The manifest cannot be read, is not valid, or has disappeared.
        """
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError:
            if self._was_there:
                raise ConfigError(
                    f"{self._path} is gone: bring the volume or the file back, or start anew"
                ) from None
            return Manifest()
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror}") from error
        if len(data) > MAX_MANIFEST_BYTES:
            raise ConfigError(f"{self._path} has more than {MAX_MANIFEST_BYTES} bytes")
        manifest = parse(data, str(self._path))
        self._was_there = True
        return manifest

    def change(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Replaces the manifest by the result of `change`, under a lock; returns the new one.
        `change` is a pure function. If it raises, the error is passed on and nothing changes.

        Raises:
            ConfigError: The manifest cannot be read or written.
            Overloaded: Another process keeps the lock, or the manifest would be too large to read.
        """
        with self._lock():
            old = self.read()
            new = change(old)
            if new != old:
                self._write(new)
            return new

    def add_copy(self, path: str, digest_of: Callable[[Path], bytes], max_bytes: int) -> bytes:
        return copy_adapter(self.root, path, digest_of, max_bytes)

    def clean(self) -> None:
        """Removes copies that no entry names.

        Raises:
            ConfigError: The manifest cannot be read.
            Overloaded: Another process keeps the lock.
        """
        with self._lock():
            remove_copies(self.root, self.read().digests())

    def _write(self, manifest: Manifest) -> None:
        data = serialise(manifest)
        if len(data) > MAX_MANIFEST_BYTES:
            raise Overloaded(
                f"the registry would have {len(data):,} bytes, {MAX_MANIFEST_BYTES:,} at most; "
                "unload some adapters",
                stage="queue",
            )
        temporary = self.root / COPIES / f"{MANIFEST}.new"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}") from error

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        path = self.root / COPIES / "lock"
        try:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}; a gateway writes into its adapter root"
            ) from error
        try:
            try:
                wait_for_lock(descriptor, self._lock_timeout_s)
            except TimeoutError:
                raise Overloaded(
                    f"{path} is held by another process for over {self._lock_timeout_s:g} s",
                    stage="queue",
                    retry_after_s=1.0,
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"{path} cannot be locked: {error.strerror}; the adapter root must be on a "
                    "file system with locks"
                ) from error
            yield
        finally:
            os.close(descriptor)
