"""Pages between pools on GPUs: the copies, the whole way, and time to the first token.

    python bench/gpu_transfer.py [--prompts 2048 8192] [--streams 0 16] [--out FILE]

Copies: pages of a pool to and from pinned staging pages (gathered or scattered on the device, and
digested), beside plain copies of the same size between the device and pinned memory in the same
run: the link. The whole way: a prompt that the prefill worker has cached is shipped to a decode
worker; bytes by the time from the handle to the acceptance of the last page. Time to the first
token: a prefill and a decode worker (on two GPUs where there are two) beside one worker that does
both, alone and beside running streams, with the gaps between the streams' tokens meanwhile; and the
throughput of requests that come at once: the one worker mixes their prompts with decode steps.

Where NIXL is installed it moves the pages, once between staging areas in host memory and once
between areas in the GPUs' own. Where it is not, `--copy-threads` threads copy them between areas in
host memory. Weights are made up, in the model's real shape. Damaged or missing pages fail the run,
and so do tokens: those of prompts whose answers are not one worker's, from either, must be the
choice of transformers in float32 up to near-ties (`gpu_reference.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_mesh.driver import Mesh, Sent
from gpu_reference import Agreement, Answer, check_tokens
from gpu_setup import describe_gpu
from model_shapes import MODELS
from weft.checkpoint.config import ModelConfig
from weft.engine.base.config import NEVER_SHIP_TOKENS
from weft.engine.transfer.mover import Lanes, PageMover
from weft.engine.transfer.nixl import nixl_available
from weft.engine.transfer.staging import StagingArea
from weft.engine.transfer.staging_memory import PinnedStagingPages
from weft.kernels.page_digest import page_digests
from weft.kernels.page_ops import gather_pages, scatter_pages

PAGE_SIZE = 16
STREAM_TOKENS = 512
"""Prompt length of a stream."""
STREAM_LIFE = 4096
"""Most tokens of a stream; it is cancelled before."""
NEW_TOKENS = 4
LOAD_TOKENS = 128
"""New ones of each request that comes with others at once."""
MODELS_HERE: dict[str, dict[str, Any]] = {
    **MODELS,
    "tiny": {
        **MODELS["qwen3-0.6b"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 999,
    },
}


@dataclass(slots=True)
class Copy:
    """One way of moving pages."""

    name: str
    mib: float
    gb_per_s: float
    share: float
    """Share of the link's rate in the same direction; for a copy inside the device, of the device's
    copy rate, or twice that for operations that only read; for the host's copy, of the link's
    slower direction.
    """


@dataclass(slots=True)
class Shipped:
    """A cached prompt, shipped."""

    system: str
    prompt_tokens: int
    mib: float
    ms: float
    gb_per_s: float
    share: float
    """Share of the slower direction of the link between device and host, or of the link between
    devices.
    """


@dataclass(slots=True)
class FirstToken:
    """Prompts of one length beside streams."""

    system: str
    prompt_tokens: int
    streams: int
    ttft_ms: float
    worst_ms: float
    gap_ms: float
    """Median time between tokens of the streams while prompts arrive."""
    gap_p99_ms: float
    """99th percentile of the same."""
    answers: list[Answer]


@dataclass(slots=True)
class Load:
    """Requests of one length that come at once."""

    system: str
    prompt_tokens: int
    requests: int
    new_tokens: int
    """Number of new tokens of each."""
    tokens_per_s: float
    """New ones of all, from the first submit to the last token."""
    prompt_tokens_per_s: float
    """Prompt tokens per second in the same time."""
    ttft_ms: float
    """Median time to the first token."""


def seconds_of(call: Callable[[], None], device: torch.device, turns: int = 8) -> float:
    """Median time until the device has done it."""
    times = []
    for _ in range(turns):
        if device.type != "cuda":
            break
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        torch.cuda.current_stream().synchronize()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:]) if times else float("nan")


def bench_copies(page_bytes: int, device: torch.device, num_moved: int) -> list[Copy]:
    """Copies of one page shape, with the link's own rates."""
    num_pages = 4 * num_moved
    pool = torch.zeros((num_pages, page_bytes), dtype=torch.uint8, device=device)
    memory = PinnedStagingPages(2 * num_moved, page_bytes, device)
    pinned = torch.from_numpy(memory.pages)
    area = StagingArea(memory.pages, num_moved)
    mover = PageMover(pool, area, memory, Lanes(device, page_bytes))
    pages = random.sample(range(1, num_pages), num_moved)
    landing, sending = list(range(num_moved)), list(range(num_moved, 2 * num_moved))
    size = num_moved * page_bytes
    numbers = torch.tensor(pages, device=device)
    dense = torch.empty((num_moved, page_bytes), dtype=torch.uint8, device=device)
    host = np.empty((num_moved, page_bytes), np.uint8)

    def rate(call: Callable[[], None]) -> float:
        return size / seconds_of(call, device) / 1e9

    out = rate(lambda: pinned[num_moved:].copy_(dense, non_blocking=True))
    into = rate(lambda: dense.copy_(pinned[:num_moved], non_blocking=True))
    on_device = rate(lambda: dense.copy_(pool[:num_moved]))
    rows = [("link: device to pinned", out, out), ("link: pinned to device", into, into)]
    if torch.cuda.device_count() > 1:
        other = torch.empty_like(dense, device="cuda:1")
        across = rate(lambda: other.copy_(dense, non_blocking=True))
        rows.append(("link: device to device", across, across))

    def digest() -> None:
        page_digests(pool, numbers)

    def moved(digests: bool, is_out: bool) -> Callable[[], None]:
        def call() -> None:
            if is_out:
                move = mover.move_out(pages, sending, with_digests=digests)
            else:
                move = mover.move_in(landing, pages, mover.mark(), with_digests=digests)
            move.wait()

        return call

    rows += [
        ("gather + copy", rate(moved(False, True)), out),
        ("gather + copy + digest", rate(moved(True, True)), out),
        ("copy + scatter", rate(moved(False, False)), into),
        ("copy + scatter + digest", rate(moved(True, False)), into),
        ("gather alone", rate(lambda: gather_pages(pool, numbers, dense)), on_device),
        ("scatter alone", rate(lambda: scatter_pages(dense, numbers, pool)), on_device),
        ("digest alone", rate(digest), 2 * on_device),
    ]
    copied = [seconds_on_host(lambda: np.copyto(host, area.pages[:num_moved])) for _ in range(5)]
    host_rate = size / statistics.median(copied) / 1e9
    rows.append(("staging to staging, one thread", host_rate, min(out, into)))
    mover.close()
    return [Copy(name, size / 2**20, value, value / roof) for name, value, roof in rows]


def seconds_on_host(call: Callable[[], None]) -> float:
    """Wall time of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def bench_shipping(mesh: Mesh, system: str, vocab: int, prompt_tokens: int, link: float) -> Shipped:
    """A prompt that the prefill worker has computed before."""
    prompt = [random.randrange(vocab) for _ in range(prompt_tokens)]
    mesh.finish(mesh.submit(prompt, NEW_TOKENS))
    rows = []
    for _ in range(5):
        mesh.flush_decode()
        (sent,) = mesh.finish(mesh.submit(prompt, NEW_TOKENS))
        fills = fills_of(sent, prompt_tokens)
        assert sum(fill.computed_tokens for fill in fills) == 0
        seconds = sum(fill.end_s - fill.start_s for fill in fills)
        rows.append((seconds, sum(fill.bytes for fill in fills)))
    seconds, size = sorted(rows)[len(rows) // 2]
    rate = size / seconds / 1e9
    return Shipped(system, prompt_tokens, size / 2**20, 1e3 * seconds, rate, rate / link)


def fills_of(sent: Sent, prompt_tokens: int) -> list[Any]:
    """A request's fills, which brought all of its full pages; it has more than one."""
    assert sent.finished is not None
    fills = sent.finished.timeline.fills
    assert [fill.failure for fill in fills] == [""] * len(fills), fills
    accepted = sum(fill.accepted_tokens for fill in fills)
    assert accepted == prompt_tokens // PAGE_SIZE * PAGE_SIZE, fills
    return list(fills)


def bench_first_token(
    mesh: Mesh, system: str, vocab: int, prompt_tokens: int, num_streams: int, turns: int
) -> FirstToken:
    """Prompts one after the other, the same for every system."""
    draw = random.Random(prompt_tokens * 1000 + num_streams)
    prompts = [[draw.randrange(vocab) for _ in range(prompt_tokens)] for _ in range(turns + 2)]
    streams = [
        mesh.submit([random.randrange(vocab) for _ in range(STREAM_TOKENS)], STREAM_LIFE)
        for _ in range(num_streams)
    ]
    mesh.turn_until(lambda: all(mesh.requests[stream].tokens for stream in streams))
    answers = []
    began = 0.0
    for turn, prompt in enumerate(prompts):
        (sent,) = mesh.finish(mesh.submit(prompt, NEW_TOKENS))
        if mesh.prefill is not None:
            fills_of(sent, prompt_tokens)
        if turn >= 2:  # the first ones warm up
            began = began or sent.sent_at
            answers.append(sent)
    ended = answers[-1].times[0]
    gaps = [
        1e3 * (after - before)
        for stream in streams
        for before, after in zip(
            mesh.requests[stream].times, mesh.requests[stream].times[1:], strict=False
        )
        if began <= before and after <= ended and after > before
    ]
    for stream in streams:
        mesh.cancel(stream)
    mesh.finish(*streams)
    times = [1e3 * sent.first_token_s for sent in answers]
    p50, p99 = np.percentile(gaps, (50, 99)) if gaps else (0.0, 0.0)
    return FirstToken(
        system=system,
        prompt_tokens=prompt_tokens,
        streams=num_streams,
        ttft_ms=statistics.median(times),
        worst_ms=max(times),
        gap_ms=float(p50),
        gap_p99_ms=float(p99),
        answers=[
            Answer(prompt, sent.tokens) for prompt, sent in zip(prompts[2:], answers, strict=True)
        ],
    )


def bench_load(mesh: Mesh, system: str, vocab: int, prompt_tokens: int, requests: int) -> Load:
    """Sends all requests at once, the same for every system."""
    draw = random.Random(f"{requests} prompts of {prompt_tokens}")
    prompts = [[draw.randrange(vocab) for _ in range(prompt_tokens)] for _ in range(requests)]
    sent = mesh.finish(*[mesh.submit(prompt, LOAD_TOKENS) for prompt in prompts])
    seconds = max(each.times[-1] for each in sent) - min(each.sent_at for each in sent)
    assert [len(each.tokens) for each in sent] == [LOAD_TOKENS] * requests
    return Load(
        system=system,
        prompt_tokens=prompt_tokens,
        requests=requests,
        new_tokens=LOAD_TOKENS,
        tokens_per_s=requests * LOAD_TOKENS / seconds,
        prompt_tokens_per_s=requests * prompt_tokens / seconds,
        ttft_ms=1e3 * statistics.median(each.first_token_s for each in sent),
    )


def load_size(arguments: argparse.Namespace, prompt_tokens: int) -> int:
    """Requests that come at once: as many as asked for, or as the pools have room for."""
    pages = -(-(prompt_tokens + LOAD_TOKENS) // PAGE_SIZE)
    return max(1, min(int(arguments.load), int(arguments.pool_pages) * 4 // 5 // pages))


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs everything, printing tables as it goes."""
    model = MODELS_HERE[arguments.model]
    (folder / "config.json").write_text(json.dumps(model))
    is_cpu = arguments.device == "cpu"
    num_devices = 1 if is_cpu else torch.cuda.device_count()
    devices = ["cpu", "cpu"] if is_cpu else ["cuda:0", f"cuda:{min(1, num_devices - 1)}"]
    kv = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    page_bytes = 2 * kv * PAGE_SIZE
    copies = [] if is_cpu else bench_copies(page_bytes, torch.device("cuda:0"), arguments.pages)
    for copy in copies:
        print(f"{copy.name:32} {copy.mib:8.0f} MiB {copy.gb_per_s:9.1f} GB/s {copy.share:6.1%}")
    if not is_cpu:
        torch.cuda.empty_cache()
    if arguments.copies_only:
        return {"copies": [asdict(copy) for copy in copies]}
    links = {copy.name: copy.gb_per_s for copy in copies if copy.name.startswith("link")}
    settings: dict[str, Any] = {
        "model_dir": folder,
        "dtype": "bfloat16",
        "dummy_weights": True,
        "page_size": PAGE_SIZE,
        "num_pages": arguments.pool_pages,
        "max_context_tokens": max(arguments.prompts) + STREAM_LIFE,
        "max_running_requests": max(8, arguments.load, max(arguments.streams) + 4),
        "prefill_chunk_tokens": arguments.chunk_tokens,
        "max_step_tokens": arguments.chunk_tokens + 64,
        "force_staging": is_cpu,
        "lease_s": 60.0,
        "fill_progress_timeout_s": 60.0,
    }
    decode = settings | {"device": devices[0]}
    alone = decode | {"transport": "data", "local_prefill_max_tokens": NEVER_SHIP_TOKENS}
    systems: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [("one worker", alone, None)]
    transport = "nixl" if nixl_available()[0] else "data"
    for memory in ("host", "device") if transport == "nixl" else ("host",):
        way = {"transport": transport, "staging_memory": memory}
        apart = decode | way | {"local_prefill_max_tokens": 0}
        systems.append((f"apart, {memory}", apart, settings | way | {"device": devices[1]}))
    vocab = model["vocab_size"]
    rows: list[FirstToken] = []
    loads: list[Load] = []
    shipped: list[Shipped] = []
    for system, decode, prefill in systems:
        with Mesh(decode, prefill, arguments.copy_threads) as mesh:
            print(f"{system}: {mesh.transport}", flush=True)
            if prefill is not None:
                for length in arguments.prompts:
                    shipped.append(
                        bench_shipping(mesh, system, vocab, length, link_of(links, system))
                    )
                    report_shipped(shipped[-1])
            for length in arguments.prompts:
                for streams in arguments.streams:
                    rows.append(
                        bench_first_token(mesh, system, vocab, length, streams, arguments.turns)
                    )
                    report_first_token(rows[-1])
                requests = load_size(arguments, length)
                loads.append(bench_load(mesh, system, vocab, length, requests))
                report_load(loads[-1])
            assert mesh.counters()["digest_mismatches"] == 0
    if not is_cpu:
        torch.cuda.empty_cache()
    equal, total, judged = judge(rows, folder, devices[0])
    return {
        **describe_gpu(arguments.commit),
        "device": "cpu" if is_cpu else torch.cuda.get_device_name(),
        "model": arguments.model,
        "page_bytes": page_bytes,
        "chunk_tokens": arguments.chunk_tokens,
        "transport": transport if transport == "nixl" else f"{arguments.copy_threads} copy threads",
        "copies": [asdict(copy) for copy in copies],
        "shipped": [asdict(row) for row in shipped],
        "first_token": [{k: v for k, v in asdict(row).items() if k != "answers"} for row in rows],
        "load": [asdict(row) for row in loads],
        "equal_prompts": [equal, total],
        "others_against_float32": asdict(judged) if judged is not None else None,
    }


def link_of(links: dict[str, float], system: str) -> float:
    """GB/s of the slowest link on a system's way."""
    host = [rate for name, rate in links.items() if "pinned" in name]
    between = [rate for name, rate in links.items() if "pinned" not in name]
    return min((between or host) if system.endswith("device") else host, default=float("nan"))


def report_shipped(row: Shipped) -> None:
    """Prints one line."""
    print(
        f"{row.system:13} shipped {row.prompt_tokens:6} cached tokens: {row.mib:8.1f} MiB in "
        f"{row.ms:7.1f} ms, {row.gb_per_s:6.2f} GB/s, {row.share:.1%} of the link",
        flush=True,
    )


def report_first_token(row: FirstToken) -> None:
    """Prints one line."""
    print(
        f"{row.system:13} {row.prompt_tokens:6} tokens beside {row.streams:3} streams: first token "
        f"{row.ttft_ms:8.1f} ms (worst {row.worst_ms:8.1f}), gaps {row.gap_ms:6.2f} ms, p99 "
        f"{row.gap_p99_ms:7.2f} ms",
        flush=True,
    )


def report_load(row: Load) -> None:
    """Prints one line."""
    print(
        f"{row.system:13} {row.requests:3} requests of {row.prompt_tokens:6} tokens at once: "
        f"{row.tokens_per_s:8.1f} new tok/s, {row.prompt_tokens_per_s:9.1f} prompt tok/s, first "
        f"token {row.ttft_ms:8.1f} ms",
        flush=True,
    )


def judge(
    rows: Sequence[FirstToken], folder: Path, device: str
) -> tuple[int, int, Agreement | None]:
    """Compares answers with those of one worker, without streams beside them.

    Returns:
        How many are equal, of how many; and how those that are not, and the one worker's, agree
        with transformers in float32: None if there are none.
    """
    quiet = {(row.system, row.prompt_tokens): row.answers for row in rows if row.streams == 0}
    pairs = [
        (ours, theirs)
        for (system, length), answers in quiet.items()
        if system.startswith("apart")
        for ours, theirs in zip(answers, quiet["one worker", length], strict=True)
    ]
    others = [answer for pair in pairs if pair[0] != pair[1] for answer in pair]
    equal = len(pairs) - len(others) // 2
    print(f"first {NEW_TOKENS} tokens equal to one worker's: {equal} of {len(pairs)} prompts")
    if not others:
        return equal, len(pairs), None
    judged = check_tokens(folder, ModelConfig.load(folder), others, device)
    print(f"the others, and the one worker's, against float32: {judged}", flush=True)
    return equal, len(pairs), judged


def main() -> None:
    """Runs it and writes one JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS_HERE, default="llama-3.1-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--prompts", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--streams", nargs="+", type=int, default=[0, 16])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--load", type=int, default=16, help="requests that come at once")
    parser.add_argument("--pages", type=int, default=128, help="of the copies measured by itself")
    parser.add_argument("--copies-only", action="store_true", help="no engines")
    parser.add_argument("--pool-pages", type=int, default=6000)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--copy-threads", type=int, default=4)
    parser.add_argument("--commit", default="", help="of the sources, for the JSON")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        content = run(arguments, Path(folder))
    if arguments.out:
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    judged = content.get("others_against_float32")
    assert judged is None or Agreement(**judged).is_close, f"wrong tokens: {judged}"


if __name__ == "__main__":
    main()
