"""Rate at which a model comes from an HTTP object store on this host, beside the store's own rate.

    python bench/object_store.py
    python bench/object_store.py --gib 4 --repeats 5

The store is a process that serves ranges of files with `sendfile`. `store` reads all bytes over as
many connections as `object_store.fetch` has, into the same memory, and drops them; goal: 0.8 of its
rate. `store, kept` has new memory for each byte, which some virtual machines give slowly. `curl`
writes the same ranges to files. `fetch` is `object_store.fetch` with an empty cache on
disk, its checks included, by the store's links to files; `fetch, no links` by the library of the
store, here a small file system over `http.client`. All in turns. Processor time is that of the
reader alone, of 1 GiB.
"""

from __future__ import annotations

import http.client
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
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
            body = json.dumps(sizes).encode()
            self._head(200, len(body))
            self.wfile.write(body)
            return
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        at, end = int(first), int(last) + 1
        self._head(206, end - at, f"bytes {first}-{last}/{path.stat().st_size}")
        self.wfile.flush()
        with path.open("rb") as file:
            while at < end:
                at += os.sendfile(self.connection.fileno(), file.fileno(), at, end - at)

    def _head(self, status: int, size: int, part: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        if part:
            self.send_header("Content-Range", part)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class HttpStore(fsspec.AbstractFileSystem):
    """Files of `Ranges`, as fsspec sees a store."""

    protocol = "bench"
    address: ClassVar[str]
    has_links: ClassVar[bool] = True
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

    def sign(self, path: str, expiration: int = 100, **_: object) -> str:
        if not self.has_links:
            raise NotImplementedError
        return f"http://{self.address}/{path.strip('/')}"

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


def pieces_of(files: dict[str, int]) -> list[tuple[str, int, int]]:
    """Names, begins and ends of the pieces that `fetch` asks for."""
    return [
        (name, at, min(at + PIECE_BYTES, size))
        for name, size in files.items()
        for at in range(0, size, PIECE_BYTES)
    ]


def read_all(files: dict[str, int], *, is_kept: bool) -> None:
    """Reads all bytes, and drops them or has memory for all of them."""
    kept = threading.local()
    memory = {
        name: memoryview(mmap.mmap(-1, size if is_kept else 1)) for name, size in files.items()
    }

    def read(piece: tuple[str, int, int]) -> int:
        name, at, end = piece
        if not hasattr(kept, "connection"):
            kept.connection = http.client.HTTPConnection(HttpStore.address)
            kept.buffer = memoryview(bytearray(1 << 20))
        kept.connection.request("GET", f"/{name}", headers={"Range": f"bytes={at}-{end - 1}"})
        response, count = kept.connection.getresponse(), 0
        into = memory[name][at:end] if is_kept else kept.buffer
        while more := response.readinto(into[count:] if is_kept else into):
            count += more
        return count

    with ThreadPoolExecutor(THREADS) as threads:
        assert sum(threads.map(read, pieces_of(files))) == sum(files.values())


def read_by_curl(files: dict[str, int], to: str) -> None:
    """Writes each piece to a file of its own, all by one process."""
    lines = [
        f'next\nurl = "http://{HttpStore.address}/{name}"\nrange = "{at}-{end - 1}"\n'
        f'output = "{to}/{name.replace("/", "-")}-{at}"\n'
        for name, at, end in pieces_of(files)
    ]
    command = ["curl", "--silent", "--fail", "--parallel", "--parallel-max", str(THREADS)]
    config = "".join(lines).removeprefix("next\n")
    subprocess.run([*command, "--config", "-"], input=config, text=True, check=True)


def processor_s() -> float:
    """Seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


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
    size = sum(files.values())

    def fetch(*, has_links: bool) -> None:
        HttpStore.has_links = has_links
        object_store.fetch("bench://model")

    def ways(to: str) -> dict[str, Callable[[], object]]:
        return {
            "store": lambda: read_all(files, is_kept=False),
            "store, kept": lambda: read_all(files, is_kept=True),
            "curl": lambda: read_by_curl(files, to),
            "fetch": lambda: fetch(has_links=True),
            "fetch, no links": lambda: fetch(has_links=False),
        }

    taken: dict[str, list[float]] = {way: [] for way in ways("")}
    cores: dict[str, list[float]] = {way: [] for way in taken}
    for turn in range(options.repeats + 1):
        # A way whose memory another has just given back is faster on some virtual machines.
        for way in random.sample(list(taken), len(taken)):
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                os.environ["WEFT_CACHE_DIR"] = cache
                begin = processor_s()
                seconds = timed(ways(cache)[way])
            if turn:  # The first turn fills the page cache.
                taken[way].append(seconds)
                cores[way].append((processor_s() - begin) * GIB / size)
            os.sync()  # Nobody else pays for what this way has left to be written.
    for way, found in taken.items():
        run.row(
            way=way,
            s=spread(found),
            gib_per_s=spread([size / one / GIB for one in found]),
            to_store=ratio_of(taken["store"], found),
            to_kept=ratio_of(taken["store, kept"], found),
            processor_s_per_gib=spread(cores[way]),
        )


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(Path(sys.argv[2]))
    sys.exit(harness.main())
