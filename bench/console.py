"""What the console costs: processor time of a mesh at rest, and per token under load, by viewers.

One mesh; viewers of `/mesh/watch` come and go, and turns with none and with five follow one another
in random order, so that the same processes are compared. Viewers read and do not parse: a browser's
own work is not the mesh's. At rest the gateway and the edge are counted, under load every process.

    python bench/console.py
    python bench/console.py --repeats 4 --requests 8 --rest-s 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import sys
from collections.abc import AsyncIterator, Sequence

import httpx
import psutil  # type: ignore[import-untyped]
from harness import Harness, Run, Spread, spread
from overhead import interval, new_prompts
from serving.load import LoadError, Raw
from serving.mesh import MeshProcess
from serving.rest_client import RestClient

VIEWERS = 5
GOAL_AT_REST, GOAL_UNDER_LOAD = 0.01, 1.03
SETTLE_S = 1.0
FRONT = ("serve gateway", "weft-rest")


@contextlib.asynccontextmanager
async def viewers(url: str, count: int) -> AsyncIterator[None]:
    """Watches the mesh for the duration of the block, as the console does."""

    async def view(client: httpx.AsyncClient, has_begun: asyncio.Event) -> None:
        async with client.stream("GET", "/mesh/watch?interval=1s") as answer:
            async for _ in answer.aiter_raw():
                has_begun.set()
        raise LoadError("a stream of the mesh has ended")

    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        begun = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(view(client, event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def cpu_s(pid: int, is_front: bool) -> float:
    """Processor time so far of a mesh's processes, or of its gateway and edge alone."""
    total = 0.0
    for process in psutil.Process(pid).children(recursive=True):
        command = " ".join(process.cmdline())
        if not is_front or any(part in command for part in FRONT):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def at_rest(mesh: MeshProcess, count: int, duration_s: float) -> float:
    """Share of a core that the gateway and the edge of a mesh at rest use."""
    async with viewers(mesh.url, count):
        await asyncio.sleep(SETTLE_S)
        before = cpu_s(mesh.pid, is_front=True)
        await asyncio.sleep(duration_s)
        return (cpu_s(mesh.pid, is_front=True) - before) / duration_s


async def under_load(
    mesh: MeshProcess, count: int, prompts: Sequence[list[int]], arguments: argparse.Namespace
) -> tuple[float, float]:
    """Processor time a token, in seconds, and tokens a second."""
    client, places = RestClient(mesh.url), asyncio.Semaphore(arguments.streams)

    async def ask(prompt: list[int]) -> None:
        async with places:
            raw = Raw()
            await client.exchange(client.encode(prompt, arguments.tokens), raw, None)
            client.decode(raw, arguments.tokens)

    loop = asyncio.get_running_loop()
    async with viewers(mesh.url, count):
        before, began = cpu_s(mesh.pid, is_front=False), loop.time()
        await asyncio.gather(*map(ask, prompts))
        num_tokens, wall_s = arguments.tokens * len(prompts), loop.time() - began
        return (cpu_s(mesh.pid, is_front=False) - before) / num_tokens, num_tokens / wall_s


async def measure(mesh: MeshProcess, run: Run) -> None:
    """Mesh at rest, then turns with viewers and without."""
    options, draw = run.options, random.Random(run.options.seed)
    rest = {count: await at_rest(mesh, count, options.rest_s) for count in (0, 1, VIEWERS)}
    turns: dict[int, list[tuple[float, float]]] = {0: [], VIEWERS: []}
    for number in range(-1, options.repeats):
        prompts = new_prompts(draw, options.requests, options.prompt_tokens)
        for count in draw.sample([0, VIEWERS], 2):
            # Other prompts than the other side's, which are cached now.
            fresh = [[draw.randrange(3, 400), *prompt] for prompt in prompts]
            turn = await under_load(mesh, count, fresh, options)
            if number >= 0:
                turns[count].append(turn)
    for count, share in rest.items():
        figures: dict[str, Spread] = {}
        if turns.get(count):
            costs, rates = zip(*turns[count], strict=True)
            figures = {"cpu_ms_a_token": spread(costs, 1e3), "tokens_per_s": spread(rates)}
        run.row({"viewers": count, "core_share_at_rest": share} | figures)
    pairs = zip(turns[VIEWERS], turns[0], strict=True)
    ratios = [math.log(with_all[0] / without[0]) for with_all, without in pairs]
    mean, low, high = interval(ratios)
    run.note(
        f"a token with {VIEWERS} viewers over one with none: {mean:.4f}, 95 % interval "
        f"{low:.4f} to {high:.4f} over {len(ratios)} pairs; goal: at most {GOAL_UNDER_LOAD}"
    )
    run.note(
        f"goal at rest: one viewer costs at most {100 * GOAL_AT_REST:g} % of a core; it costs "
        f"{100 * (rest[1] - rest[0]):.2f} %"
    )


harness = Harness(__file__, __doc__, repeats=12)
harness.flag("--model", default="demo")
harness.flag("--dtype", default="bfloat16")
harness.flag("--requests", type=int, default=12)
harness.flag("--streams", type=int, default=4)
harness.flag("--prompt-tokens", type=int, default=64)
harness.flag("--tokens", type=int, default=64)
harness.flag("--rest-s", type=float, default=20.0)
harness.flag("--seed", type=int, default=0)


@harness.part
def console(run: Run) -> None:
    """One mesh."""
    threads = "--prefill-args '--num-threads 1' --decode-args '--num-threads 1'"
    mesh = MeshProcess(run.options.model, run.options.dtype, threads)
    run.stack.callback(mesh.stop)
    mesh.wait_until_ready()
    asyncio.run(measure(mesh, run))


if __name__ == "__main__":
    sys.exit(harness.main())
