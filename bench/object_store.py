"""Rate at which a model comes from an HTTP object store on this host, beside the store's own rate.

    python bench/object_store.py
    python bench/object_store.py --gib 4 --repeats 5

The store is a process that serves ranges of files with `sendfile`; fsspec reaches it by a small
file system over `http.client`, as it reaches others by their libraries. `store` reads all bytes
over as many connections as `object_store.fetch` has, and drops them; `fetch` is that function with
an empty cache on disk, its checks included. Both in turns; goal: 0.8 of the store's rate.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from harness import Harness, Run, ratio_of, spread, timed
from weft.checkpoint import object_store

GIB = 1 << 30
SERVE = "serve"
PIECE_BYTES, THREADS = object_store._PIECE_BYTES, object_store._THREADS
GOAL = 0.8


class Ranges(BaseHTTPRequestHandler):
    """GET of a folder lists it as JSON; GET of a file needs a range."""

    protocol_version = "HTTP/1.1"
    root: ClassVar[Path]

    def do_GET(self) -> None:
        path = self.root / self.path.lstrip("/")
        if path.is_dir():
            sizes = {one.name: one.stat().st_size for one in path.iterdir()}
            self._head(200, body := json.dumps(sizes).encode(), len(body))
            self.wfile.write(body)
            return
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        at, end = int(first), int(last) + 1
        self._head(206, b"", end - at)
        self.wfile.flush()
        with path.open("rb") as file:
            while at < end:
                at += os.sendfile(self.connection.fileno(), file.fileno(), at, end - at)

    def _head(self, status: int, body: bytes, size: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class HttpStore(fsspec.AbstractFileSystem):
    """Files of `Ranges`, as fsspec sees a store."""

    protocol = "bench"
    address: ClassVar[str]
    _threads: ClassVar[threading.local] = threading.local()

    def ls(self, path: str, detail: bool = True, **_: object) -> Any:
        found = json.loads(self._get(f"/{path.strip('/')}", {}))
        files = [
            {"name": f"{path.rstrip('/')}/{name}", "size": size, "type": "file"}
            for name, size in found.items()
        ]
        return files if detail else [file["name"] for file in files]

    def info(self, path: str, **_: object) -> Any:
        folder, _, name = path.rpartition("/")
        if not folder:
            return {"name": path, "size": 0, "type": "directory"}
        return next(one for one in self.ls(folder) if one["name"].endswith(f"/{name}"))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: object
    ) -> bytes:
        first, last = start or 0, (self.size(path) if end is None else end) - 1
        return self._get(f"/{path.strip('/')}", {"Range": f"bytes={first}-{last}"})

    def get_file(self, rpath: str, lpath: str, **_: object) -> None:
        Path(lpath).write_bytes(self.cat_file(rpath))

    def _get(self, path: str, headers: dict[str, str]) -> bytes:
        connection = getattr(self._threads, "connection", None)
        if connection is None:
            connection = self._threads.connection = http.client.HTTPConnection(self.address)
        connection.request("GET", path, headers=headers)
        return bytes(connection.getresponse().read())


def serve(folder: Path) -> None:
    Ranges.root = folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), Ranges)
    print(server.server_port, flush=True)
    server.serve_forever()


def read_all(store: HttpStore, files: dict[str, int]) -> None:
    """Reads all bytes and drops them."""
    pieces = [
        (name, at, min(at + PIECE_BYTES, size))
        for name, size in files.items()
        for at in range(0, size, PIECE_BYTES)
    ]
    with ThreadPoolExecutor(THREADS) as threads:
        lengths = threads.map(lambda one: len(store.cat_file(*one)), pieces)
        assert sum(lengths) == sum(files.values())


harness = Harness(__file__, __doc__, repeats=3)
harness.flag("--gib", type=float, default=1.0, help="size of the model")
harness.flag("--at", type=Path, help="folder for the store and the cache; else the temporary one")


@harness.part
def rates(run: Run) -> None:
    options = run.options
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(dir=options.at)))
    model = folder / "store" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for number in range(2):
        content = os.urandom(1 << 20) * int(options.gib * 512)
        (model / f"model-{number}.safetensors").write_bytes(content)
        del content
    command = [sys.executable, __file__, SERVE, str(model.parent)]
    process = run.stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    run.stack.callback(process.kill)
    assert process.stdout is not None
    HttpStore.address = f"127.0.0.1:{process.stdout.readline().strip()}"
    fsspec.register_implementation("bench", HttpStore)
    store = fsspec.filesystem("bench")
    files = {one["name"]: one["size"] for one in store.ls("model")}
    taken: dict[str, list[float]] = {"store": [], "fetch": []}
    for turn in range(options.repeats + 1):
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            os.environ["WEFT_CACHE_DIR"] = cache
            of_store = timed(lambda: read_all(store, files))
            of_fetch = timed(lambda: object_store.fetch("bench://model"))
        if turn:  # The first turn fills the page cache.
            taken["store"].append(of_store)
            taken["fetch"].append(of_fetch)
    size = sum(files.values())
    for way, found in taken.items():
        run.row(
            way=way,
            s=spread(found),
            gib_per_s=spread([size / one / GIB for one in found]),
            to_store=ratio_of(taken["store"], found),
        )


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(Path(sys.argv[2]))
    sys.exit(harness.main())
