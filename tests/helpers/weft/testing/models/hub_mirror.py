"""A Hugging Face hub on loopback that serves folders."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MAIN = "main"
_LARGE_BYTES = 1 << 20
"""Files of this size on are hashed once; tests change small ones alone."""


@dataclass
class Mirror:
    """What a mirror has, and what it was asked."""

    folders: dict[str, Path] = field(default_factory=dict)
    """Folder of each `organisation/name`."""
    gated: set[str] = field(default_factory=set)
    """Repositories that want a token."""
    tokens: list[str] = field(default_factory=list)
    """Headers of authorisation that have come."""
    sent: list[str] = field(default_factory=list)
    """Files whose bytes were sent, as `organisation/name/path`."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """Files, by path, whose connection ends once after so many bytes."""
    url: str = ""

    def commit(self, repository: str) -> str:
        """Changes with the contents of the folder."""
        state = hashlib.sha1(usedforsecurity=False)
        for path in self.files(repository):
            state.update(path.encode())
            state.update(_hash_of(self.folders[repository] / path).encode())
        return state.hexdigest()

    def files(self, repository: str) -> list[str]:
        """Paths in a repository."""
        folder = self.folders[repository]
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@contextmanager
def serving_mirror() -> Iterator[Mirror]:
    """Runs a mirror; repositories may be added while it runs."""
    mirror = Mirror()

    class Handler(_Handler):
        state = mirror

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    mirror.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield mirror
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Mirror

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repository, rest = "/".join(parts[2:4] if is_api else parts[:2]), parts[4:]
        if not is_api:
            rest = parts[2:]
        if token := self.headers.get("Authorization"):
            self.state.tokens.append(token)
        if repository not in self.state.folders:
            return self._fail("RepoNotFound", with_body)
        if repository in self.state.gated and not token:
            return self._fail("GatedRepo", with_body, 403)
        commit = self.state.commit(repository)
        if len(rest) > 1 and rest[1] not in (MAIN, commit):
            return self._fail("RevisionNotFound", with_body)
        if is_api and rest[:1] == ["revision"]:
            return self._json({"id": repository, "sha": commit, "siblings": []}, with_body)
        if is_api and rest[:1] == ["tree"]:
            return self._json(self._tree(repository), with_body)
        if not is_api and rest[:1] == ["resolve"]:
            return self._file(repository, "/".join(rest[2:]), commit, with_body)
        return self._fail("EntryNotFound", with_body)

    def _tree(self, repository: str) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = []
        for path in self.state.files(repository):
            file = self.state.folders[repository] / path
            size, digest = file.stat().st_size, _hash_of(file)
            entry: dict[str, object] = {"type": "file", "path": path, "size": size, "oid": digest}
            if path.endswith(".safetensors"):
                entry["oid"] = digest[:40]
                entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
            entries.append(entry)
        return entries

    def _file(self, repository: str, path: str, commit: str, with_body: bool) -> None:
        file = self.state.folders[repository] / path
        if not file.is_file():
            return self._fail("EntryNotFound", with_body)
        size, first = file.stat().st_size, 0
        if wanted := self.headers.get("Range"):
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{_hash_of(file)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if first:
            self.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - first))
        self.end_headers()
        if not with_body:
            return
        self.state.sent.append(f"{repository}/{path}")
        if (bound := self.state.cut_after.pop(path, None)) is not None:
            self.close_connection = True
        self.wfile.flush()
        with file.open("rb") as content:
            self.connection.sendfile(content, first, bound)

    def _json(self, content: object, with_body: bool) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def _fail(self, code: str, with_body: bool, status: int = 404) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _hash_of(path: Path) -> str:
    """What a hub calls a file: SHA-256 of weights, and git's SHA-1 of the others."""
    stat = path.stat()
    if stat.st_size < _LARGE_BYTES:
        return _hash(path)
    return _known_hash(path, stat.st_size, stat.st_mtime_ns)


@cache
def _known_hash(path: Path, num_bytes: int, changed_ns: int) -> str:
    return _hash(path)


def _hash(path: Path) -> str:
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
