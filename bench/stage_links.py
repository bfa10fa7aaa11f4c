"""What a link between two hosts costs stages: bytes that are sent, and prompts at bounded rates.

    sudo python bench/stage_links.py

An engine on a CPU has its two stages in two network namespaces, of which one is this process's own;
it needs root, `ip` and `tc`. `bytes` counts what leaves the first stage's network device for each
token of a prompt. `computed` takes these bytes to models on GPUs: how long the rows of a chunk are
on a link of 25 Gbit/s, as a share of the time in which two H200s compute the chunk
(docs/parallel.md, `--tp 2`), and how many tokens' pages a second host 0 ships over one. `shaped`
bounds the link, so that rows take such shares of the time for which the stages here compute, and
compares prompts with those over the unbounded link, each with as many steps under way as a decode
worker has and as a prefill worker has. The buffers of connections are as small beside a chunk as
the system's are beside one of 8,192 tokens.

`paced` needs no quiet cores: its two stages hand over rows through the links of engines, over a
bounded device, but sleep in place of computing. It compares steps with as many under way as a
decode worker has and as a prefill worker has, with rows that travel meanwhile and with rows for
which stages wait, as shares of the steps that one stage makes alone.

`against` compares prompts of two hosts with those of one, over links of 25 Gbit/s and less. Each
host computes on one core, with as many steps under way as a prefill worker has.
"""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from engine_runs import run_batch
from harness import Harness, Run, in_turns, ratio_of, spread
from model_shapes import LARGE_MODELS, MODELS, write_config
from weft.engine.loop import build
from weft.engine.loop.llm import LLM
from weft.engine.parallel import stage_links
from weft.engine.parallel.stage_links import SocketStages, StageEnds
from weft.testing.engine.host_network import Network
from weft.testing.engine.other_hosts import other_hosts

HERE = "smollm2-135m"
CHUNK, PROMPT, NUM_PROMPTS = 512, 1024, 8
GPU_CHUNK = 8192
LINK_BITS = 25e9
UNBOUNDED_BITS = 400e9
BOUNDED_BITS = (LINK_BITS, 1e9, 1e7)
SHORT_PROMPT = 512
RATES = {"llama-3.1-8b": 75_391, "llama-3.1-70b": 8_321}
"""Prompt tokens a second of two H200s in bfloat16."""
SMALL_BUFFERS = "net.ipv4.tcp_wmem=4096 16384 65536"
ROWS, STEP_S, NUM_STEPS = (2048, 1024), 0.1, 20
"""Of `paced`: rows in float32, the time for which each stage sleeps, steps."""
FIRST_STAGE = """
import socket, sys
sys.path.insert(0, sys.argv[1])
from stage_links import first_stage
first_stage((sys.argv[2], int(sys.argv[3])), sys.argv[4] == "meanwhile")
"""

harness = Harness(__file__, __doc__, repeats=5)
harness.flag("--shares", nargs="+", type=float, default=[0.05, 0.2, 0.5], help="of a step")


def row_bytes(model: str) -> int:
    """Of a token's row in bfloat16."""
    return 2 * int((MODELS | LARGE_MODELS)[model]["hidden_size"])


def page_bytes(model: str) -> int:
    """Of a token's K and V in bfloat16."""
    config = (MODELS | LARGE_MODELS)[model]
    heads = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 2 * 2 * int(heads)


def settings_of(here: dict[str, Any]) -> dict[str, Any]:
    return here | {
        "dtype": "bfloat16",
        "dummy_weights": True,
        "prefix_cache": False,
        "prefill_chunk_tokens": CHUNK,
        "max_step_tokens": CHUNK,
        "max_running_requests": NUM_PROMPTS,
        "num_pages": 2 * NUM_PROMPTS * PROMPT // 16,
        "rank_timeout_s": 120.0,
    }


def bound(network: Network, bits_per_s: float) -> None:
    if not network.shape(1, bits_per_s):
        raise SystemExit("needs root, network namespaces and tc's token buckets")


def rate_of(llm: LLM, length: int) -> float:
    """Prompt tokens a second."""
    return NUM_PROMPTS * length / run_batch(llm, NUM_PROMPTS, length, 1).first_token_s


def prompt_rate(llm: LLM, network: Network, bits_per_s: float) -> float:
    """Prompt tokens a second over a link of this rate."""
    bound(network, bits_per_s)
    return rate_of(llm, PROMPT)


@harness.part
def links(run: Run) -> None:
    """Bytes, what follows from them, and prompts over bounded links."""
    folder = write_config(Path(run.stack.enter_context(tempfile.TemporaryDirectory())), HERE)
    for role, more_lanes in (("decode", 0), ("prefill", 1)):
        lanes = mock.patch.object(build, "lanes_of", lambda config, n=more_lanes: config.pp + n)
        with ExitStack() as stack:
            stack.enter_context(lanes)
            network = Network(2, stack)
            if network.has_namespaces:
                subprocess.run([*network.before(1), "sysctl", "-qw", SMALL_BUFFERS], check=True)
            here = stack.enter_context(other_hosts(folder, 2, network))
            llm = stack.enter_context(LLM(folder, **settings_of(here)))
            gc.collect()
            shaped(run, role, llm, network)


def shaped(run: Run, role: str, llm: LLM, network: Network) -> None:
    prompt_rate(llm, network, UNBOUNDED_BITS)
    before = network.num_sent(1)
    rate = prompt_rate(llm, network, UNBOUNDED_BITS)
    each = (network.num_sent(1) - before) / (NUM_PROMPTS * PROMPT)
    if role == "decode":
        computed(run, each)
    for share in run.options.shares:
        bits = 8 * each * rate / share
        ways = {
            "unbounded": partial(prompt_rate, llm, network, UNBOUNDED_BITS),
            "bounded": partial(prompt_rate, llm, network, bits),
        }
        found = in_turns(ways, run.options.repeats)
        run.row(
            table="shaped: prompts over a bounded link",
            lanes_of=role,
            share=share,
            mbit_s=bits / 1e6,
            tok_s=spread(found["bounded"]),
            of_unbounded=ratio_of(found["bounded"], found["unbounded"]),
        )


class Alone:
    """A group whose other ranks do not fail."""

    limit_s, num_frames, is_stopped, reason = 120.0, 0, False, ""

    def fail(self, why: str) -> NoReturn:
        raise SystemExit(why)


def thread_bytes(is_meanwhile: bool) -> Any:
    """Rows travel while stages compute; False: stages wait for them."""
    least = stage_links._THREAD_BYTES if is_meanwhile else 1 << 40
    return mock.patch.object(stage_links, "_THREAD_BYTES", least)


def first_stage(address: tuple[str, int], is_meanwhile: bool) -> None:
    """Sleeps and sends rows for each byte that comes."""
    orders, rows = (socket.create_connection(address) for _ in range(2))
    stages = SocketStages(StageEnds(None, rows), Alone(), 0, ("", "the last stage"), ROWS[0])
    stream = torch.zeros(ROWS)
    with thread_bytes(is_meanwhile):
        while orders.recv(1):
            time.sleep(STEP_S)
            stages.send(stream)


def paced_steps(network: Network, lanes: int, way: str) -> float:
    """Steps in the time in which one stage alone makes one."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listener.bind((network.of_tests, 0))
        listener.listen()
        listener.settimeout(60.0)
        at = [network.of_tests, str(listener.getsockname()[1])]
        command = [*network.before(1), sys.executable, "-c", FIRST_STAGE]
        command += [str(Path(__file__).parent), *at, way]
        child = stack.enter_context(subprocess.Popen(command))
        stack.callback(child.kill)
        orders, rows = (stack.enter_context(listener.accept()[0]) for _ in range(2))
        stages = SocketStages(StageEnds(rows, None), Alone(), 1, ("the first stage", ""), ROWS[0])
        stack.callback(stages.close)
        stack.enter_context(thread_bytes(way == "meanwhile"))
        orders.sendall(bytes(lanes))
        for step in range(lanes + NUM_STEPS):
            if step == lanes:
                began_s = time.perf_counter()
            stages.receive(ROWS, torch.float32)
            time.sleep(STEP_S)
            orders.sendall(b"x")
        return NUM_STEPS * STEP_S / (time.perf_counter() - began_s)


@harness.part
def paced(run: Run) -> None:
    """Steps over a bounded link, by stages that sleep in place of computing."""
    network = Network(2, run.stack)
    if not network.has_namespaces:
        raise SystemExit("needs root, network namespaces and tc's token buckets")
    subprocess.run([*network.before(1), "sysctl", "-qw", SMALL_BUFFERS], check=True)
    for share in run.options.shares:
        wire_s = share * STEP_S
        bound(network, 8 * 4 * ROWS[0] * ROWS[1] / wire_s)
        for role, lanes in (("decode", 2), ("prefill", 3)):
            ways = {
                way: partial(paced_steps, network, lanes, way) for way in ("meanwhile", "waiting")
            }
            found = in_turns(ways, run.options.repeats, warm_up=0)
            run.row(
                table="paced: steps of stages that sleep, as a share of one stage's",
                lanes_of=role,
                share=share,
                meanwhile=spread(found["meanwhile"]),
                waiting=spread(found["waiting"]),
                gain=ratio_of(found["meanwhile"], found["waiting"]),
                expected=min(1.0, lanes / (2 + share)),
            )


@harness.part
def against(run: Run) -> None:
    """Prompts of two hosts, as shares of those of one."""
    folder = write_config(Path(run.stack.enter_context(tempfile.TemporaryDirectory())), HERE)
    network = Network(2, run.stack)
    run.stack.enter_context(mock.patch.object(build, "lanes_of", lambda config: config.pp + 1))
    here = run.stack.enter_context(other_hosts(folder, 2, network))
    two = run.stack.enter_context(LLM(folder, **settings_of(here)))
    one = run.stack.enter_context(LLM(folder, **settings_of({"num_threads": 1})))
    gc.collect()

    def of_two(bits_per_s: float) -> float:
        bound(network, bits_per_s)
        return rate_of(two, SHORT_PROMPT)

    ways = {"one": partial(rate_of, one, SHORT_PROMPT)}
    ways |= {f"{bits:g}": partial(of_two, bits) for bits in BOUNDED_BITS}
    found = in_turns(ways, run.options.repeats)
    for bits in BOUNDED_BITS:
        run.row(
            table="against: prompts of two hosts of one core each, and of one",
            mbit_s=bits / 1e6,
            tok_s=spread(found[f"{bits:g}"]),
            one_tok_s=spread(found["one"]),
            of_one=ratio_of(found[f"{bits:g}"], found["one"]),
        )


def computed(run: Run, each: float) -> None:
    more = each / row_bytes(HERE)
    run.row(table="bytes a token", model=HERE, sent=each, of_rows=row_bytes(HERE), ratio=more)
    for model, of_gpus in RATES.items():
        wire_s = GPU_CHUNK * row_bytes(model) * more * 8 / LINK_BITS
        share = wire_s * of_gpus / GPU_CHUNK
        run.row(
            table=f"computed: chunks of {GPU_CHUNK:,} tokens at 25 Gbit/s",
            model=model,
            mb=GPU_CHUNK * row_bytes(model) * more / 1e6,
            on_link_ms=1e3 * wire_s,
            computed_ms=1e3 * GPU_CHUNK / of_gpus,
            share=share,
            # At most: of two steps under way one waits for half of each transfer; with a third,
            # stages wait only for what a transfer takes longer than a step.
            lost_by_decode=1 - 1 / (1 + share / 2),
            lost_by_prefill=max(0.0, 1 - 1 / share),
            pages_tok_s=LINK_BITS / 8 / page_bytes(model),
            tok_s=of_gpus,
        )


if __name__ == "__main__":
    sys.exit(harness.main())
