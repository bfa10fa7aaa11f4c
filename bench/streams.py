"""What one gateway and one REST edge can stream: tokens/s, and processor time for each token.

A decode worker without a model sends a token of each stream at a fixed pace; the client counts the
bytes of OpenAI chat streams. Requests are all open before the first token and end after the last,
so that neither counts. At a pace that gateway and edge can hold each token has an event of its own;
beyond it tokens are merged, and the rate is the limit.

    python bench/streams.py                             about three minutes
    python bench/streams.py --streams 256 --rates 4000  one row
    python bench/streams.py --baseline ../old-tree      beside another working tree, in turns
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from harness import ROOT, Harness, Run, tree_environment
from serving.load import LoadError, new_runner
from serving.mesh import MeshError, free_ports
from serving.rest_client import get_json
from tokenizers import Tokenizer
from weft.checkpoint.resolve import resolve_model

TEXT = (
    " The old lighthouse keeper counted the ships that passed each night, and wrote the number of"
    " lights in a book with a blue cover. On the first of May, he wrote, there were none at all."
)
MODEL = "demo"
READY_S = 180.0
QUIET_S = 0.5
"""Without a byte for this long, all has arrived."""
TIMEOUT_S = 300.0
CONNECTS_AT_ONCE = 64
NAMES = ("gateway", "edge", "worker", "client")

harness = Harness(__file__, __doc__, repeats=1)
harness.flag("--model", default="demo", help="whose tokenizer and chat template count")
harness.flag("--streams", type=int, nargs="+", default=[64, 256, 1024, 4096])
harness.flag(
    "--rates",
    type=float,
    nargs="+",
    default=[4000.0, 200_000.0],
    help="tokens a second of all streams that the worker sends",
)
harness.flag("--tokens", type=int, default=32_768, help="of all streams, at least 16 of each")
harness.flag("--fields", type=json.loads, default={}, help="further fields of the bodies, as JSON")
harness.flag("--gateway-args", default="", help="further flags of the gateway")
harness.flag("--edge", type=Path, help="another weft-rest")
harness.flag("--profile", type=Path, help="folder for profiles by `perf` of gateway and edge")


class Client(asyncio.Protocol):
    """One stream: keeps its bytes."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.pieces: list[bytes] = []
        self.is_closed = False

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)
        self._load.last_at = time.perf_counter()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True

    def text_and_events(self) -> tuple[str, int]:
        """The whole text, and the number of events that brought it."""
        head, _, rest = b"".join(self.pieces).partition(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise LoadError(f"{head!r} {rest[:300]!r}")
        body, ended = bytearray(), False
        while rest and not ended:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            body += rest[:length]
            rest, ended = rest[length + 2 :], not length
        events = [part for part in bytes(body).split(b"\n\n") if part.startswith(b"data: ")]
        if not ended or not events or events[-1] != b"data: [DONE]":
            raise LoadError(f"a stream broke off: {bytes(body[-300:])!r}")
        deltas = [json.loads(one[6:])["choices"][0]["delta"] for one in events[:-1]]
        texts = [delta["content"] for delta in deltas if delta.get("content")]
        return "".join(texts), len(texts)


class Load:
    """All streams of one run."""

    def __init__(self, url: str, fields: dict[str, Any], num_tokens: int) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._host, self._port = host, int(port)
        self.last_at = 0.0
        """When the last byte came, by `time.perf_counter`."""
        self.streams: list[Client] = []
        body = json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": "Tell me of the lighthouse."}],
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "stream": True,
                **fields,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body

    async def open(self, count: int) -> None:
        """Sends all requests."""
        loop, places = asyncio.get_running_loop(), asyncio.Semaphore(CONNECTS_AT_ONCE)

        async def one() -> None:
            async with places:
                transport, client = await loop.create_connection(
                    lambda: Client(self), self._host, self._port
                )
                transport.write(self._request)
                self.streams.append(client)

        await asyncio.gather(*(one() for _ in range(count)))

    async def until_submitted(self, answer: Callable[[], object]) -> None:
        """Waits for the worker to have all requests. Raises LoadError if one is refused."""
        waiting = asyncio.create_task(asyncio.to_thread(answer))
        while not waiting.done():
            await asyncio.sleep(0.05)
            for stream in self.streams:
                if stream.is_closed:
                    raise LoadError(repr(b"".join(stream.pieces)[:500]))

    async def until_quiet(self) -> None:
        """Waits until nothing has come for a while."""
        while time.perf_counter() - self.last_at < QUIET_S:
            await asyncio.sleep(QUIET_S / 4)

    async def until_closed(self) -> None:
        """Waits for the ends of all streams."""
        while not all(stream.is_closed for stream in self.streams):
            await asyncio.sleep(0.05)


class Front:
    """A gateway, an edge and the worker behind them."""

    def __init__(self, folder: Path, options: Any) -> None:
        model_dir = resolve_model(options.model)
        environment = os.environ | tree_environment(ROOT)
        self._processes: dict[str, subprocess.Popen[Any]] = {}
        self._worker = self._start(
            "worker",
            *(sys.executable, str(Path(__file__).with_name("streams_worker.py"))),
            *("--model-dir", str(model_dir), "--model", MODEL, "--text", TEXT),
            environment=environment,
            log=folder / "worker.log",
        )
        address = self.answer()["address"]
        grpc_port, rest_port = free_ports(2)
        self.url = f"http://127.0.0.1:{rest_port}"
        self._start(
            "gateway",
            *(sys.executable, "-m", "weft.cli", "serve", "gateway"),
            *("--model-dir", str(model_dir), "--model-name", MODEL, "--decode", address),
            *("--host", "127.0.0.1", "--port", str(grpc_port), "--console", "off"),
            *("--max-running-requests", "100000", "--max-queued-requests", "100000"),
            *shlex.split(options.gateway_args),
            environment=environment,
            log=folder / "gateway.log",
        )
        edge = options.edge or ROOT / "services" / "rest" / "bin" / "weft-rest"
        self._start(
            "edge",
            *(str(edge), "--listen", f"127.0.0.1:{rest_port}"),
            *("--backend", f"127.0.0.1:{grpc_port}", "--metrics-listen", "127.0.0.1:0"),
            environment=environment,
            log=folder / "edge.log",
        )
        self._folder = folder

    def _start(
        self, name: str, *command: str, environment: dict[str, str], log: Path
    ) -> subprocess.Popen[Any]:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log.open("wb")}
        if name == "worker":
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, stderr=log.open("ab"), env=environment, **pipes)
        self._processes[name] = process
        return process

    def pid(self, name: str) -> int:
        """Process id of gateway, edge or worker."""
        return self._processes[name].pid

    def order(self, **order: Any) -> None:
        """Tells the worker."""
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps(order).encode() + b"\n")
        self._worker.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the worker."""
        assert self._worker.stdout is not None
        found: dict[str, Any] = json.loads(self._worker.stdout.readline())
        return found

    def wait_until_ready(self) -> None:
        """Waits until requests are served. Raises MeshError if that does not come."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with suppress(OSError, LoadError, ValueError):
                get_json(self.url, "/readyz")
                return
            time.sleep(0.1)
        logs = [path.read_text(errors="replace")[-700:] for path in self._folder.glob("*.log")]
        raise MeshError("not ready: " + "\n".join(logs))

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds so far, by process; the client is this one."""
        found = {"client": time.process_time()}
        for name, process in self._processes.items():
            times = psutil.Process(process.pid).cpu_times()
            found[name] = times.user + times.system
        return found

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()


async def measure(
    front: Front, options: Any, count: int, num_tokens: int, rate: float
) -> tuple[dict[str, Any], Load]:
    """One run; the figures of a row."""
    front.order(streams=count, tokens=num_tokens, step_s=count / rate)
    load = Load(front.url, options.fields, num_tokens)
    async with asyncio.timeout(TIMEOUT_S):
        await load.open(count)
        await load.until_submitted(front.answer)
        await asyncio.sleep(QUIET_S)  # the gateway has to take the last acceptances
        before, began = front.cpu_s(), time.perf_counter()
        load.last_at = began + TIMEOUT_S
        with profiled(front, options.profile, f"{count}-{rate:g}"):
            front.order(go=True)
            sent = await asyncio.to_thread(front.answer)
            load.last_at = time.perf_counter()
            await load.until_quiet()
        after, last_at = front.cpu_s(), load.last_at
        front.order(end=True)
        await load.until_closed()
    total = count * num_tokens
    return {
        "streams": count,
        "sent_per_s": rate,
        "tokens_per_s": total / (last_at - began),
        "messages": sent["messages"],
        **{f"{name}_us": 1e6 * (after[name] - before[name]) / total for name in NAMES},
    }, load


@contextmanager
def profiled(front: Front, folder: Path | None, name: str) -> Iterator[None]:
    """Has `perf` watch gateway and edge meanwhile, if asked for."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    watching = [
        subprocess.Popen(
            ["perf", "record", "-q", "-g", "-F", "499", "-p", str(front.pid(process)), "-o", path]
        )
        for process in ("gateway", "edge")
        for path in [str(folder / f"{process}-{name}.perf")]
    ]
    try:
        yield
    finally:
        for one in watching:
            one.send_signal(2)
            one.wait()


@harness.part
def streams(run: Run) -> None:
    """All numbers of streams at all rates."""
    options = run.options
    tokenizer = Tokenizer.from_file(str(resolve_model(options.model) / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        runner = stack.enter_context(new_runner())
        front = stack.enter_context(closing(Front(Path(folder), options)))
        front.wait_until_ready()
        runner.run(measure(front, options, 16, 64, 1000.0))  # warms up
        for count in options.streams:
            num_tokens = max(16, options.tokens // count)
            repeated = ids * (num_tokens // len(ids) + 1)
            wanted = tokenizer.decode(repeated[:num_tokens])
            for rate in options.rates * options.repeats:
                row, load = runner.run(measure(front, options, count, num_tokens, rate))
                found = [stream.text_and_events() for stream in load.streams]
                num_wrong = sum(text != wanted for text, _ in found)
                num_events = sum(events for _, events in found)
                each = count * num_tokens / max(1, num_events)
                events = {f"{name}_us_an_event": each * row[f"{name}_us"] for name in NAMES[:2]}
                run.row(row, tokens_an_event=each, **events)
                if num_wrong:
                    run.fail(f"{num_wrong} of {count} texts are wrong")


if __name__ == "__main__":
    sys.exit(harness.main())
