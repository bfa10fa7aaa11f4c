"""Models from stores that fsspec knows."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from weft.checkpoint import http_ranges, object_store
from weft.checkpoint.resolve import default_name, resolve_model
from weft.contract.errors import ModelError
from weft.engine.model.loader import load_model
from weft.testing.models.tiny_models import make_tiny

URL = "memory://bucket/models/tiny"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(object_store, "cache_folder", lambda: tmp_path / "cache")
    folder = make_tiny("llama", tmp_path / "source", shards=2)
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    store = fsspec.filesystem("memory")
    store.put(f"{folder}/", "/bucket/models/tiny/", recursive=True)
    yield folder
    store.rm("/bucket", recursive=True)


def test_a_model_is_fetched_and_later_only_what_has_changed(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model(URL)
    assert default_name(URL, folder) == "tiny"
    assert load_model(folder, "float32").digest == load_model(source, "float32").digest
    assert not (folder / "pytorch_model.bin").exists()
    store, fetched = fsspec.filesystem("memory"), []
    get_file = type(store).get_file

    def record(self: object, path: str, *args: object, **options: object) -> None:
        fetched.append(path.rpartition("/")[2])
        get_file(self, path, *args, **options)

    monkeypatch.setattr(type(store), "get_file", record)
    assert resolve_model(URL) == folder
    assert not fetched
    store.pipe("/bucket/models/tiny/generation_config.json", b"{}")
    store.rm("/bucket/models/tiny/model.safetensors.index.json")
    resolve_model(URL)
    assert fetched == ["generation_config.json"]
    assert not (folder / "model.safetensors.index.json").exists()


def test_processes_that_fetch_at_once_fetch_a_file_once(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, active, fetched = fsspec.filesystem("memory"), [0], []
    get_file = type(store).get_file

    def record(self: object, path: str, *args: object, **options: object) -> None:
        active[0] += 1
        fetched.append((path, active[0]))
        time.sleep(0.01)  # Time for another one to come in between.
        get_file(self, path, *args, **options)
        active[0] -= 1

    monkeypatch.setattr(type(store), "get_file", record)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(resolve_model, [URL, URL])
    assert first == second
    assert {number for _, number in fetched} == {1}
    assert len({path for path, _ in fetched}) == len(fetched)


def test_a_name_that_leads_out_of_the_folder_is_refused(source: Path, tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe("/bucket/models/tiny/../../outside.json", b"{}")
    with pytest.raises(ModelError, match="leads out"):
        resolve_model(URL)
    assert not list(tmp_path.rglob("outside.json"))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://bucket/nothing", "config.json"),
        ("nonsense://bucket/m", "nonsense"),
        ("s3://bucket/m", "s3fs"),
    ],
)
def test_what_cannot_be_fetched_says_why(source: Path, url: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        resolve_model(url)


def test_large_files_come_in_pieces(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_PIECE_BYTES", 4096)
    store, ranges = fsspec.filesystem("memory"), list[tuple[int, int]]()
    cat_file = type(store).cat_file

    def piece(self: Any, path: str, start: int, end: int) -> Any:
        ranges.append((start, end))
        return cat_file(self, path, start, end)

    monkeypatch.setattr(type(store), "cat_file", piece)
    weights = sorted(source.glob("*.safetensors"))
    folder = object_store.fetch(URL)
    for path in weights:
        assert (folder / path.name).read_bytes() == path.read_bytes()
    whole = sum(path.stat().st_size for path in source.iterdir() if path.stat().st_size > 4096)
    assert sum(end - start for start, end in ranges) >= whole
    assert max(end - start for start, end in ranges) == 4096
    # A store that ignores ranges gives the whole file at once.
    monkeypatch.setattr(type(store), "cat_file", lambda self, path, start, end: bytes(9000))
    (folder / weights[0].name).unlink()
    object_store.fetch(URL)
    assert (folder / weights[0].name).read_bytes() == weights[0].read_bytes()


class _Links(BaseHTTPRequestHandler):
    """Serves ranges of a file; `wrong` names what is false in its answers."""

    protocol_version = "HTTP/1.1"
    wrong: ClassVar[str]
    content: ClassVar[bytes]

    def do_GET(self) -> None:
        content = self.content if self.path == "/links/m/model.safetensors?signature=1" else b""
        begin, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        is_later = begin > 0
        if self.wrong == "forbids later" and is_later:
            self.send_error(403)
            return
        self.send_response(200 if self.wrong == "ignores ranges" else 206)
        if self.wrong == "ignores ranges":
            begin, last = 0, len(content) - 1
        if self.wrong == "another range":
            begin, last = begin + 1, last + 1
        size = len(content) + (self.wrong == "another file")
        self.send_header("Content-Range", f"bytes {begin}-{last}/{size}")
        part = content[begin : last + 1]
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        is_cut = self.wrong == "cuts" and is_later
        self.wfile.write(part[: len(part) // 2] if is_cut else part)
        self.close_connection = is_cut

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("wrong", "num_by_library"),
    [
        ("", range(1)),
        ("ignores ranges", range(2, 9)),
        ("another range", range(2, 9)),
        ("another file", range(2, 9)),
        ("forbids later", range(1, 9)),
        ("cuts", range(1, 9)),
    ],
)
def test_pieces_come_by_links_or_else_by_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, num_by_library: range
) -> None:
    content, piece = os.urandom(3 * (1 << 20) + 5), 1 << 20
    monkeypatch.setattr(object_store, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(object_store, "_PIECE_BYTES", piece)
    monkeypatch.setattr(http_ranges, "_BUFFER_BYTES", piece // 3)
    monkeypatch.setattr(_Links, "wrong", wrong, raising=False)
    monkeypatch.setattr(_Links, "content", content, raising=False)
    store, by_library = fsspec.filesystem("memory"), list[int]()
    store.pipe({"/links/m/config.json": b"{}", "/links/m/model.safetensors": content})
    with ThreadingHTTPServer(("127.0.0.1", 0), _Links) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        link = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(
            type(store), "sign", lambda self, path, expiration: f"{link}{path}?signature=1"
        )
        cat_file = type(store).cat_file

        def record(self: Any, path: str, start: int, end: int) -> Any:
            by_library.append(start)
            return cat_file(self, path, start, end)

        monkeypatch.setattr(type(store), "cat_file", record)
        try:
            folder = object_store.fetch("memory://links/m")
        finally:
            server.shutdown()
            thread.join(10)
            store.rm("/links", recursive=True)
    assert (folder / "model.safetensors").read_bytes() == content
    assert len(by_library) in num_by_library
    assert len(set(by_library)) == len(by_library)
