"""What the console costs: processor time of a mesh at rest, and per token under load, by viewers.

One mesh; viewers of `/mesh/watch` come and go, and turns with none and with five follow one another
in random order, so that the same processes are compared. Viewers read and do not parse: a browser's
own work is not the mesh's. At rest the gateway and the edge are counted, under load every process.

    python bench/console.py
    python bench/console.py --pairs 4 --requests 8 --rest-s 5
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
import numpy as np
import psutil  # type: ignore[import-untyped]
from overhead import interval, new_prompts
from rich.console import Console
from rich.table import Table
from serving.load import LoadError, Raw
from serving.mesh import MeshError, MeshProcess
from serving.rest_client import RestClient
from serving.setup import MachineUse, describe_lines, describe_setup

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


async def measure(mesh: MeshProcess, arguments: argparse.Namespace, console: Console) -> None:
    """Measures, and prints the table."""
    draw = random.Random(arguments.seed)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = ("viewers", "at rest, % of a core", "CPU ms/token", "tokens/s")
    for name in columns:
        table.add_column(name, justify="right")
    rest = {count: await at_rest(mesh, count, arguments.rest_s) for count in (0, 1, VIEWERS)}
    turns: dict[int, list[tuple[float, float]]] = {0: [], VIEWERS: []}
    for number in range(-1, arguments.pairs):
        prompts = new_prompts(draw, arguments.requests, arguments.prompt_tokens)
        for count in draw.sample([0, VIEWERS], 2):
            # Other prompts than the other side's, which are cached now.
            fresh = [[draw.randrange(3, 400), *prompt] for prompt in prompts]
            turn = await under_load(mesh, count, fresh, arguments)
            if number >= 0:
                turns[count].append(turn)
    for count, share in rest.items():
        costs, rates = zip(*turns[count], strict=True) if turns.get(count) else ((), ())
        table.add_row(
            str(count),
            f"{100 * share:.2f}",
            f"{1e3 * np.median(costs):.3f}" if costs else "",
            f"{np.median(rates):.1f}" if rates else "",
        )
    console.print(table)
    pairs = zip(turns[VIEWERS], turns[0], strict=True)
    ratios = [math.log(with_all[0] / without[0]) for with_all, without in pairs]
    mean, low, high = interval(ratios)
    console.print(
        f"a token with {VIEWERS} viewers over one with none: {mean:.4f}, 95 % interval "
        f"{low:.4f} to {high:.4f} over {len(ratios)} pairs; goal: at most {GOAL_UNDER_LOAD}",
        highlight=False,
    )
    console.print(
        f"goal at rest: one viewer costs at most {100 * GOAL_AT_REST:g} % of a core; it costs "
        f"{100 * (rest[1] - rest[0]):.2f} %",
        highlight=False,
    )


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; 1 if the mesh did not answer."""
    arguments = _parser().parse_args(argv)
    console, before = Console(), MachineUse.now()
    for line in describe_lines(describe_setup(arguments.dtype, 1)):
        console.print(line, highlight=False)
    threads = "--num-threads 1"
    mesh = MeshProcess(
        arguments.model, arguments.dtype, f"--prefill-args '{threads}' --decode-args '{threads}'"
    )
    try:
        mesh.wait_until_ready()
        asyncio.run(measure(mesh, arguments, console))
    except (LoadError, MeshError) as error:
        sys.stderr.write(f"bench/console.py: {error}\n")
        return 1
    finally:
        mesh.stop()
    others = MachineUse.now().others_since(before)
    console.print(f"other programs kept {others:.1f} cores busy", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rest-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
