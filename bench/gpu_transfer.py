"""Pages between pools on GPUs: the copies, the whole way, and time to the first token.

    python bench/gpu_transfer.py [--prompts 2048 8192] [--streams 0 16]

Copies: pages of a pool to and from pinned staging pages (gathered or scattered on the device, and
digested), beside plain copies of the same size between the device and pinned memory in the same
run: the link. The whole way: a prompt that the prefill worker has cached is shipped to a decode
worker; bytes by the time from the handle to the acceptance of the last page. Time to the first
token: a prefill and a decode worker (on two GPUs where there are two) beside one worker that does
both, alone and beside running streams, with the gaps between the streams' tokens meanwhile; and the
throughput of requests that come at once: the one worker mixes their prompts with decode steps.

Pages are moved by NIXL, in shared memory (CUDA IPC between GPUs) and as messages, the former two
between staging areas in host memory and between areas in the GPUs' own. Messages go from engine to
engine here, without gRPC. Weights are made up, in the model's real shape. Damaged or missing pages
fail the run, and so do tokens: those of prompts whose answers are not one worker's, from either,
must be the choice of transformers in float32 up to near-ties (`gpu_reference.py`).
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clocks import event_s
from gpu_mesh.driver import Mesh, Sent
from gpu_reference import Agreement, Answer, check_tokens
from harness import Harness, Run, timed
from model_shapes import MODELS
from weft.checkpoint.config import ModelConfig
from weft.engine.base.config import NEVER_SHIP_TOKENS
from weft.engine.transfer.mover import Lanes, PageMover
from weft.engine.transfer.staging import StagingArea
from weft.engine.transfer.staging_memory import PinnedStagingPages
from weft.kernels.ops.page_digest import page_digests
from weft.kernels.ops.pages import gather_pages, scatter_pages
from weft.pages.transfer.nixl_binding import nixl_available

PAGE_SIZE = 16
STREAM_TOKENS = 512
"""Prompt length of a stream."""
STREAM_LIFE = 4096
"""Most tokens of a stream; it is cancelled before."""
NEW_TOKENS = 4
WAYS = (
    *(("nixl", "host"), ("nixl", "device"), ("shared", "host"), ("shared", "device")),
    ("data", "host"),
)
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


harness = Harness(__file__, __doc__)
harness.flag("--model", choices=MODELS_HERE, default="llama-3.1-8b")
harness.flag("--device", choices=["cuda", "cpu"], default="cuda")
harness.flag("--prompts", nargs="+", type=int, default=[2048, 8192])
harness.flag("--streams", nargs="+", type=int, default=[0, 16])
harness.flag("--turns", type=int, default=7)
harness.flag("--load", type=int, default=16, help="requests that come at once")
harness.flag("--pages", type=int, default=128, help="of the copies measured by itself")
harness.flag("--copies-only", action="store_true", help="no engines")
harness.flag("--pool-pages", type=int, default=6000)
harness.flag("--chunk-tokens", type=int, default=1024)


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
    if device.type != "cuda":
        return float("nan")

    def whole() -> None:
        call()
        torch.cuda.current_stream().synchronize()

    times = []
    for _ in range(turns):
        torch.cuda.synchronize()
        times.append(event_s(whole))
    return statistics.median(times[2:])


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
    copied = [timed(lambda: np.copyto(host, area.pages[:num_moved])) for _ in range(5)]
    host_rate = size / statistics.median(copied) / 1e9
    rows.append(("staging to staging, one thread", host_rate, min(out, into)))
    mover.close()
    return [Copy(name, size / 2**20, value, value / roof) for name, value, roof in rows]


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


@harness.part
def transfer(run: Run) -> None:
    """Everything."""
    random.seed(0)
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory()))
    options, model = run.options, MODELS_HERE[run.options.model]
    (folder / "config.json").write_text(json.dumps(model))
    is_cpu = options.device == "cpu"
    num_devices = 1 if is_cpu else torch.cuda.device_count()
    devices = ["cpu", "cpu"] if is_cpu else ["cuda:0", f"cuda:{min(1, num_devices - 1)}"]
    kv = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    page_bytes = 2 * kv * PAGE_SIZE
    copies = [] if is_cpu else bench_copies(page_bytes, torch.device("cuda:0"), options.pages)
    for copy in copies:
        run.row(copy, table="copies")
    if not is_cpu:
        torch.cuda.empty_cache()
    if options.copies_only:
        return
    links = {copy.name: copy.gb_per_s for copy in copies if copy.name.startswith("link")}
    settings: dict[str, Any] = {
        "model_dir": folder,
        "dtype": "bfloat16",
        "dummy_weights": True,
        "page_size": PAGE_SIZE,
        "num_pages": options.pool_pages,
        "max_context_tokens": max(options.prompts) + STREAM_LIFE,
        "max_running_requests": max(8, options.load, max(options.streams) + 4),
        "prefill_chunk_tokens": options.chunk_tokens,
        "max_step_tokens": options.chunk_tokens + 64,
        "force_staging": is_cpu,
        "lease_s": 60.0,
        "fill_progress_timeout_s": 60.0,
    }
    decode = settings | {"device": devices[0]}
    alone = decode | {"transport": "data", "local_prefill_max_tokens": NEVER_SHIP_TOKENS}
    systems: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [("one worker", alone, None)]
    for transport, memory in WAYS:
        if transport == "nixl" and not nixl_available()[0]:
            print(f"no NIXL: {nixl_available()[1]}")
            continue
        way = {"transport": transport, "staging_memory": memory}
        apart = decode | way | {"local_prefill_max_tokens": 0}
        name = f"apart, {transport}, {memory}"
        systems.append((name, apart, settings | way | {"device": devices[1]}))
    vocab = model["vocab_size"]
    run.keep(page_bytes=page_bytes)
    rows: list[FirstToken] = []
    for system, decode, prefill in systems:
        with Mesh(decode, prefill) as mesh:
            print(f"{system}: {mesh.transport}", flush=True)
            link = link_of(links, system)
            for length in options.prompts if prefill is not None else ():
                run.row(bench_shipping(mesh, system, vocab, length, link), table="shipped")
            for length in options.prompts:
                for streams in options.streams:
                    rows.append(
                        bench_first_token(mesh, system, vocab, length, streams, options.turns)
                    )
                    run.row(rows[-1], table="first tokens")
                # As many as asked for, or as the pools have room for.
                pages = -(-(length + LOAD_TOKENS) // PAGE_SIZE)
                requests = max(1, min(options.load, options.pool_pages * 4 // 5 // pages))
                run.row(bench_load(mesh, system, vocab, length, requests), table="load")
            assert mesh.counters()["digest_mismatches"] == 0
    if not is_cpu:
        torch.cuda.empty_cache()
    equal, total, judged = judge(rows, folder, devices[0])
    run.keep(equal_prompts=[equal, total], others_against_float32=judged)
    if judged is not None and not judged.is_close:
        run.fail(f"wrong tokens: {judged}")


def link_of(links: dict[str, float], system: str) -> float:
    """GB/s of the slowest link on a system's way."""
    host = [rate for name, rate in links.items() if "pinned" in name]
    between = [rate for name, rate in links.items() if "pinned" not in name]
    return min((between or host) if system.endswith("device") else host, default=float("nan"))


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


if __name__ == "__main__":
    sys.exit(harness.main())
