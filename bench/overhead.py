"""The CPU time per token of tracing, metrics and page digests together.

Two meshes run side by side: one with all three on (every trace exported to a collector, every
service scraped once a turn, so several times as often as by Prometheus), one with all three off by
the flags that users have. They take turns at the same prompts, in random order within each pair;
the CPU time of all processes of a mesh is taken before and after its turn. The ratio of a pair is
on / off.

Two meshes with the same settings differ by two or three per cent for their whole life, depending on
where their memory lies, so more pairs alone do not help. Both are started anew for every pair
(`--restarts`), and the bound is the upper end of the 95 % interval of the geometric mean, by
Student's t over the starts. The processes of a mesh share one core (`--cores`), with one thread for
each engine, because on several cores the cost of a token depends on what runs beside it.

    python bench/overhead.py                     24 pairs of the demo model, about 15 minutes
    python bench/overhead.py --repeats 4 --restarts 2 --requests 8
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import psutil  # type: ignore[import-untyped]
from harness import Harness, Run, spread
from machine import cpu_seconds
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from serving.load import LoadError, Raw
from serving.mesh import MeshError, MeshProcess
from serving.rest_client import RestClient

SHIP_ALL = "--local-prefill-max-tokens 0"
OFF_EVERYWHERE = "--no-tracing --metrics-port none"
OFF_WORKER = f"{OFF_EVERYWHERE} --no-page-digests"
NAMES = ("on", "off")
START_TRIES = 3
EXPORT_DELAY_MS = 2000
"""Shorter than the SDK's own 5 s, so that a turn need not settle for longer."""
SETTLE_S = 2.5
"""Seconds after a turn in which late exports and reports are counted too."""
GOAL = 1.03
VOCABULARY = 49_152


@dataclass(frozen=True, slots=True)
class Turn:
    """One mesh's half of a pair."""

    cpu_s: float
    wall_s: float
    num_tokens: int
    texts: tuple[str, ...]

    @property
    def cpu_per_token_s(self) -> float:
        return self.cpu_s / self.num_tokens


class SpanSink(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that counts spans and forgets them."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.num_spans += sum(len(scope.spans) for scope in resource.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def span_sink() -> Iterator[tuple[SpanSink, str]]:
    """A collector on a free port, and its endpoint."""
    server = grpc.server(ThreadPoolExecutor(2))
    sink = SpanSink()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield sink, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def flags_of(name: str, num_cores: int) -> str:
    """Flags of `weft up` for the mesh with all three on, or off."""
    threads = f"--num-threads {num_cores}"
    gateway, worker = ("", threads) if name == "on" else (OFF_EVERYWHERE, f"{OFF_WORKER} {threads}")
    return (
        f"{SHIP_ALL} --gateway-args '{gateway}' --prefill-args '{worker}' --decode-args '{worker}'"
    )


def keep_on_cores(pid: int, num_cores: int) -> None:
    """Restricts a process and its descendants to some of this process's cores."""
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


class Side:
    """One of the two meshes."""

    def __init__(self, name: str, arguments: argparse.Namespace, endpoint: str) -> None:
        """Starts the mesh.

        Args:
            name: on or off.
            arguments: Of the command line.
            endpoint: Of the collector.
        """
        self.name = name
        exporting = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            # A turn's spans are exported in this turn, and no others.
            "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_DELAY_MS),
        }
        for variable, value in exporting.items():
            if name == "on":
                os.environ[variable] = value
            else:
                os.environ.pop(variable, None)
        flags = flags_of(name, arguments.cores)
        self.mesh = MeshProcess(arguments.model, arguments.dtype, flags)
        self._num_cores = arguments.cores
        self._streams = arguments.streams
        self._client: RestClient | None = None

    def wait_until_ready(self) -> None:
        self.mesh.wait_until_ready()
        keep_on_cores(self.mesh.pid, self._num_cores)
        self._client = RestClient(self.mesh.url)

    async def turn(self, prompts: Sequence[list[int]], num_tokens: int) -> Turn:
        """Answers all prompts.

        Raises:
            LoadError: An answer is not whole.
        """
        before, began = cpu_seconds(self.mesh.pid), asyncio.get_running_loop().time()
        places = asyncio.Semaphore(self._streams)
        texts = await asyncio.gather(*(self._ask(p, num_tokens, places) for p in prompts))
        wall_s = asyncio.get_running_loop().time() - began
        await self._scrape()
        await asyncio.sleep(SETTLE_S)
        after = cpu_seconds(self.mesh.pid)
        if before.keys() != after.keys():
            raise LoadError(f"a process of the mesh with {self.name} was started anew")
        cpu_s = sum(after[pid] - before[pid] for pid in after)
        return Turn(cpu_s, wall_s, num_tokens * len(prompts), tuple(texts))

    async def _ask(self, prompt: list[int], num_tokens: int, places: asyncio.Semaphore) -> str:
        assert self._client is not None
        raw = Raw()
        async with places:
            await self._client.exchange(self._client.encode(prompt, num_tokens), raw, None)
        return self._client.decode(raw, num_tokens).text or ""

    async def _scrape(self) -> None:
        """Scrapes all metrics, as Prometheus does."""
        files = (self.mesh.state / "run").glob("*.json")
        addresses = [json.loads(file.read_text()).get("metrics_address") for file in files]
        for address in filter(None, addresses):
            await asyncio.to_thread(_get, f"http://{address}/metrics")


def _get(url: str) -> bytes:
    from urllib.request import ProxyHandler, build_opener

    with build_opener(ProxyHandler({})).open(url, timeout=10) as answer:
        body: bytes = answer.read()
        return body


def started(name: str, arguments: argparse.Namespace, endpoint: str) -> Side:
    """A side that is ready. Tries again: another program may take a port that was free.

    Raises:
        MeshError: It did not start.
    """
    for tries_left in reversed(range(START_TRIES)):
        side = Side(name, arguments, endpoint)
        try:
            side.wait_until_ready()
        except MeshError:
            side.mesh.stop()
            if not tries_left:
                raise
        else:
            return side
    raise AssertionError("there is at least one try")


def new_prompts(draw: random.Random, count: int, length: int) -> list[list[int]]:
    """Prompts that nobody has cached."""
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


async def measure(
    arguments: argparse.Namespace, endpoint: str, draw: random.Random
) -> list[list[dict[str, Turn]]]:
    """Measures all pairs, by start.

    Raises:
        LoadError: An answer is not whole.
        MeshError: A mesh did not start.
    """
    starts: list[list[dict[str, Turn]]] = []
    for restart in range(arguments.restarts):
        share = arguments.repeats * (restart + 1) // arguments.restarts - sum(map(len, starts))
        starts.append([])
        names = draw.sample(NAMES, 2)
        sides = []
        try:
            for name in names:  # one after the other: loading is not measured
                sides.append(started(name, arguments, endpoint))
            for number in range(-arguments.warm_up, share):
                shape = (arguments.requests, arguments.prompt_tokens)
                prompts = new_prompts(draw, *shape)
                order = draw.sample(sides, 2)
                pair = {s.name: await s.turn(prompts, arguments.tokens) for s in order}
                if number >= 0:
                    starts[-1].append(pair)
        finally:
            for side in sides:
                side.mesh.stop()
    return starts


def interval(log_ratios: Sequence[float], draws: int = 2_000_000) -> tuple[float, float, float]:
    """(geometric mean, low, high) of the ratios: a 95 % interval by Student's t."""
    values = np.asarray(log_ratios)
    mean = float(values.mean())
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    # Its quantile by simulation: numpy has the distribution, not its inverse.
    simulated = np.random.default_rng(0).standard_t(len(values) - 1, draws)
    half = float(np.quantile(simulated, 0.975)) * error
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


harness = Harness(__file__, __doc__, repeats=24)
harness.flag("--model", default="demo", help="as of `weft up`")
harness.flag("--dtype", default="auto", help="as of `weft up`")
for name, default, text in (
    ("restarts", 24, "times that both meshes are started"),
    ("warm-up", 1, "pairs after each start that do not count"),
    ("cores", 1, "that a mesh has"),
    ("requests", 12, "in a turn"),
    ("streams", 8, "requests under way at once"),
    ("tokens", 64, "generated by each request"),
    ("prompt-tokens", 100, "of each prompt, shipped as far as there are full pages"),
    ("seed", 0, "of prompts and orders"),
):
    harness.flag(f"--{name}", type=int, default=default, metavar="N", help=text)


@harness.check
def complete(options: argparse.Namespace) -> None:
    """A pair for each start."""
    if not 2 <= options.restarts <= options.repeats:
        harness.error("give 2 restarts or more, and a pair (--repeats) for each")


@harness.part
def overhead(run: Run) -> None:
    """All pairs."""
    options = run.options
    with span_sink() as (sink, endpoint):
        starts = asyncio.run(measure(options, endpoint, random.Random(options.seed)))
    pairs = [pair for start in starts for pair in start]
    ratios = [[p["on"].cpu_per_token_s / p["off"].cpu_per_token_s for p in s] for s in starts]
    mean, low, high = interval([float(np.log(start).mean()) for start in ratios])
    for name in NAMES:
        costs = [pair[name].cpu_per_token_s for pair in pairs]
        rates = [pair[name].num_tokens / pair[name].wall_s for pair in pairs]
        figures = {"cpu_ms_a_token": spread(costs, 1e3), "tokens_per_s": spread(rates)}
        run.row({"tracing_metrics_digests": name} | figures)
    run.note(
        f"on / off over {len(pairs)} pairs of {len(starts)} starts: {mean:.4f}, 95 % interval "
        f"{low:.4f} to {high:.4f}; goal: at most {GOAL}, {'met' if high <= GOAL else 'not met'}"
    )
    texts = [a == b for p in pairs for a, b in zip(p["on"].texts, p["off"].texts, strict=True)]
    run.note(f"texts equal on both meshes: {sum(texts)} of {len(texts)}")
    run.note(f"{sink.num_spans:,} spans were exported")
    run.keep(ratio=mean, interval_95=[low, high], goal=GOAL, ratios=ratios)
    if not sink.num_spans:
        run.fail("nothing was traced")


if __name__ == "__main__":
    sys.exit(harness.main())
