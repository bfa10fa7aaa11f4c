"""Weights in place on a GPU: pauses, updates from another process, sleep and waking.

    python bench/gpu_refit.py [--shape llama-3.1-8b] [--what pause files lent group sleep]
    python bench/gpu_refit.py --shape qwen3-30b-a3b --unreserved --what files lent
    python bench/gpu_refit.py --device cpu --shape smollm2-135m --what lent sleep

The model has made-up weights of a known shape. An engine in this process is updated by a child
process that holds other weights: by handles of its memory on the same card (`lent`; `files`: with
one allocation for the tensors of each file), or over NCCL from the second card, if there is one
(`group`). Times are from the pause to the end of the resumption, with everything received, packed
and digested. `sleep` is level 1 of weights and pages,
with the host's memory reserved at the start (`--sleep-host-bytes`), each time after an update.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Harness, Run, spread, timed
from model_shapes import MODELS
from safetensors import safe_open
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.contract.token_ids import token_ids
from weft.contract.weights import SentTensor, TensorHandle, WeightCommand, WeightGroup
from weft.engine.base.content_digest import content_digest
from weft.engine.executor.shared_tensors import opened
from weft.engine.loop.llm import LLM
from weft.engine.model.weights.announced import decode_tensors, encode_tensors
from weft.testing.models.lenders import lent_by_gpu, lent_by_host
from weft.testing.models.senders import free_port

CHILD = "--trainer"
NUM_REQUESTS = 16
PACKED_BYTES = 1 << 30
"""vLLM's trainers put so many bytes into one broadcast."""


def layer_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's tensors by their names."""
    hidden, heads = config["hidden_size"], config["head_dim"]
    q, kv = (config[f"num_{name}_heads"] * heads for name in ("attention", "key_value"))
    sizes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    if config["model_type"].startswith("qwen3"):
        sizes |= {f"self_attn.{name}_norm": (heads,) for name in "qk"}
    mlps, inner = ["mlp"], config["intermediate_size"]
    if "num_experts" in config:
        sizes["mlp.gate"] = (config["num_experts"], hidden)
        mlps = [f"mlp.experts.{number}" for number in range(config["num_experts"])]
        inner = config["moe_intermediate_size"]
    for mlp in mlps:
        sizes |= {f"{mlp}.gate_proj": (inner, hidden), f"{mlp}.up_proj": (inner, hidden)}
        sizes[f"{mlp}.down_proj"] = (hidden, inner)
    return sizes


def write_model(folder: Path, config: dict[str, Any]) -> int:
    """A checkpoint of zeros in files of one layer each, which take no memory. Returns its bytes."""
    hidden, layer = config["hidden_size"], layer_sizes(config)
    parts = [{"model.embed_tokens.weight": (config["vocab_size"], hidden)}]
    parts += [
        {f"model.layers.{at}.{name}.weight": size for name, size in layer.items()}
        for at in range(config["num_hidden_layers"])
    ]
    parts.append({"model.norm.weight": (hidden,)})
    if not config["tie_word_embeddings"]:
        parts.append({"lm_head.weight": (config["vocab_size"], hidden)})
    weight_map, total = dict[str, str](), 0
    for number, part in enumerate(parts):
        header, at = dict[str, Any](), 0
        for name, size in part.items():
            end = at + math.prod(size) * torch.bfloat16.itemsize
            header[name] = {"dtype": "BF16", "shape": size, "data_offsets": (at, end)}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = f"model-{number:05}.safetensors"
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + at)
        weight_map |= dict.fromkeys(part, file)
        total += at
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def made(folder: Path, device: torch.device, *, is_by_file: bool) -> dict[str, torch.Tensor]:
    """Random weights of the shapes in a folder.

    Args:
        is_by_file: Whether those of each file share one tensor's memory.
    """
    found = dict[str, torch.Tensor]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        counts = [math.prod(size) for size in sizes.values()]
        groups = [sum(counts)] if is_by_file else counts
        numbers = [
            torch.empty(one, dtype=torch.bfloat16, device=device).normal_(0, 0.02) for one in groups
        ]
        flat = torch.split(numbers[0], counts) if is_by_file else numbers
        found |= {
            name: one.view(size) for (name, size), one in zip(sizes.items(), flat, strict=True)
        }
    return found


def train(form: str, folder: Path, port: int) -> None:
    """The child: weights of the shapes in a folder, lent or broadcast as its input asks."""
    device = torch.device({"host": "cpu", "nccl": "cuda:1"}.get(form, "cuda:0"))
    tensors = made(folder, device, is_by_file=form == "files")
    if form in ("gpu", "files"):
        _tell([asdict(one) for one in lent_by_gpu(tensors)])
        sys.stdin.readline()
        return
    if form == "host":
        with lent_by_host(tensors) as lent:
            _tell([asdict(one) for one in lent])
            sys.stdin.readline()
        return
    torch.cuda.set_device(device)
    _tell([asdict(one) for one in lent_by_gpu(tensors)])
    wait = timedelta(seconds=60)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=wait))
    store = c10d.PrefixStore("trainer", store)
    group, _ = c10d._new_process_group_helper(
        2, 0, [], c10d.Backend("nccl"), store, group_name="trainer", timeout=wait, group_desc="w"
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    packs, pack, size = list[torch.Tensor](), list[torch.Tensor](), 0
    for one in tensors.values():
        pack.append(one.view(-1).view(torch.uint8))
        size += one.nbytes
        if size > PACKED_BYTES:
            packs.append(torch.cat(pack))
            pack, size = [], 0
    packs += [torch.cat(pack)] if pack else []
    for line in sys.stdin:
        for one in packs if line.startswith("packed") else tensors.values():
            torch.distributed.broadcast(one, 0, group=group)
        torch.cuda.synchronize()


def _tell(found: object) -> None:
    print(json.dumps(found, default=bytes.hex), flush=True)


@contextmanager
def trainer(form: str, folder: Path, port: int = 0) -> Iterator[tuple[Any, list[SentTensor]]]:
    """The child, and what it lends or sends."""
    command = [sys.executable, __file__, CHILD, form, str(folder), str(port)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        try:
            assert child.stdout is not None
            yield child, [_sent(row) for row in json.loads(child.stdout.readline())]
        finally:
            child.kill()


def _sent(row: dict[str, Any]) -> SentTensor:
    handles = [
        TensorHandle(**(one | {"handle": bytes.fromhex(one["handle"])})) for one in row["handles"]
    ]
    return SentTensor(**(row | {"handles": handles}))


def pauses(llm: LLM, count: int) -> tuple[list[float], list[float]]:
    """Seconds of a pause and its end while requests run, and of the steps before."""
    engine = llm.engine
    submits = [
        Submit(
            gateway=0,
            request_id=f"p{number}",
            attempt=1,
            prompt=token_ids(range(10, 74)),
            sampling=SamplingParams(temperature=0.0),
            stop=StopCriteria(max_tokens=1000, ignore_eos=True),
        )
        for number in range(NUM_REQUESTS)
    ]
    engine.turn(Inbox(submits=submits))
    for _ in range(60):
        engine.turn()
    found, steps = list[float](), list[float]()
    for number in range(count):
        before = time.perf_counter()
        for _ in range(20):
            engine.turn()
        steps.append((time.perf_counter() - before) / 20)
        found.append(timed(partial(_obey, llm, 2 * number)))
    llm.pause("abort")
    llm.resume()
    return found, steps


def _obey(llm: LLM, query: int) -> None:
    for at, action in enumerate(("pause", "resume")):
        command = WeightCommand(query=10_000 + query + at, action=action)  # type: ignore[arg-type]
        inbox: Inbox | None = Inbox(weight_commands=[command])
        while not llm.engine.turn(inbox).weight_replies:
            inbox = None


def update(llm: LLM, send: Any, tensors: Sequence[SentTensor], **options: Any) -> None:
    llm.pause()
    llm.command_weights("begin")
    if send is not None:
        send()
    llm.command_weights("receive", tensors=list(tensors), **options)
    llm.command_weights("end")
    llm.resume()


def open_all(device: torch.device, tensors: Sequence[SentTensor]) -> None:
    """What an update does beside its copies."""
    announced, lent = decode_tensors(encode_tensors(tensors))
    with opened(device, announced.names, lent) as shared:
        for one in shared._opening:
            one.result()


def settings_of(run: Run, size: int) -> dict[str, Any]:
    options, on_gpu = run.options, run.options.device != "cpu"
    settings: dict[str, Any] = {"device": options.device, "dtype": "bfloat16", "num_pages": 2048}
    if on_gpu:
        reserved = 0 if options.unreserved else size + size // 8
        settings |= {"sleep_host_bytes": reserved, "cuda_graphs": options.graphs}
    return settings | {"max_context_tokens": 2048, "max_running_requests": NUM_REQUESTS}


def some_digests(llm: LLM) -> list[bytes]:
    """Of every twentieth tensor: all of them take minutes."""
    packed = llm.engine.parts.local.refits._packed
    assert packed is not None
    return [content_digest(one) for _, one in packed.tensors()[::20]]


def told(llm: LLM) -> str:
    return llm.weights.model_digest.hex()[:16]


harness = Harness(__file__, __doc__, repeats=5)
harness.flag("--shape", default="llama-3.1-8b", choices=sorted(MODELS))
harness.flag("--layers", type=int, help="of a shorter model")
harness.flag("--device", default="cuda:0")
harness.flag("--at", type=Path, help="where the checkpoint is written; else the temporary folder")
harness.flag("--graphs", action="store_true", help="capture steps")
harness.flag("--unreserved", action="store_true", help="no memory of the host is reserved")
harness.flag("--what", nargs="+", default=["pause", "lent", "group", "sleep"])


@harness.part
def weights(run: Run) -> None:
    """Everything with one engine, since loading it takes most of the time."""
    options, began = run.options, time.perf_counter()
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(dir=options.at)))
    config = MODELS[options.shape] | (
        {"num_hidden_layers": options.layers} if options.layers else {}
    )
    size = write_model(folder, config)
    print(f"written after {time.perf_counter() - began:.0f} s", flush=True)
    llm = run.stack.enter_context(LLM(folder, **settings_of(run, size)))
    print(f"loaded after {time.perf_counter() - began:.0f} s", flush=True)
    run.keep(bytes=size)
    if "pause" in options.what:
        found, steps = pauses(llm, options.repeats)
        allowed = 2 * statistics.median(steps) * 1e3 + 5
        run.row(what="pause and resume", ms=spread(found, 1e3), allowed_ms=allowed)
    on_gpu = options.device != "cpu"
    if "files" in options.what and on_gpu:
        with trainer("files", folder) as (_, tensors):
            lent(run, llm, tensors, "one allocation for each layer")
    with trainer("gpu" if on_gpu else "host", folder) as (_, tensors):
        if "lent" in options.what:
            lent(run, llm, tensors, "each tensor by itself")
        if "sleep" in options.what:
            falling, waking = list[float](), list[float]()
            for turn in range(options.repeats):
                if turn:
                    update(llm, None, tensors)
                before = some_digests(llm)
                falling.append(timed(llm.sleep))
                waking.append(timed(llm.wake))
                assert some_digests(llm) == before
            note = "not reserved" if options.unreserved else "reserved"
            for what, taken in (("sleep", falling), ("wake", waking)):
                first, *others = taken
                ms = spread(others or taken, 1e3)
                run.row(what=f"{what}, {note}", ms=ms, first_ms=first * 1e3)
    if "group" in options.what and on_gpu and torch.cuda.device_count() > 1:
        over_nccl(run, llm, folder)


def lent(run: Run, llm: LLM, tensors: Sequence[SentTensor], how: str) -> None:
    names, options = {told(llm)}, run.options
    times = [timed(partial(update, llm, None, tensors)) for _ in range(options.repeats)]
    names.add(told(llm))
    assert len(names) == 2, "an update has the same name each time"
    first, *others = times
    pieces = len({one.handle or one.shm for tensor in tensors for one in tensor.handles})
    ms = spread(others or times, 1e3)
    run.row(what=f"lent, {how}", pieces=pieces, ms=ms, first_ms=first * 1e3)
    if options.device != "cpu":
        device = torch.device(options.device)
        alone = [timed(partial(open_all, device, tensors)) for _ in range(options.repeats)]
        run.row(what="to open and close what is lent", pieces=pieces, ms=spread(alone, 1e3))


def over_nccl(run: Run, llm: LLM, folder: Path) -> None:
    port = free_port()
    with trainer("nccl", folder, port) as (child, lent):
        tensors = [SentTensor(name=one.name, dtype=one.dtype, shape=one.shape) for one in lent]
        group = WeightGroup(
            name="trainer", address="127.0.0.1", port=port, rank=1, size=2, backend="nccl"
        )
        llm.command_weights("join", group=group)

        def ask(how: str) -> None:
            child.stdin.write(f"{how}\n")
            child.stdin.flush()

        for how, packed_bytes in (("packed", PACKED_BYTES), ("single", 0)):
            once = partial(
                update,
                llm,
                partial(ask, how),
                tensors,
                group_name="trainer",
                packed_bytes=packed_bytes,
            )
            first, *others = [timed(once) for _ in range(run.options.repeats)]
            ms = spread(others or [first], 1e3)
            run.row(what=f"NCCL from the other card, {how}", ms=ms, first_ms=first * 1e3)
        llm.command_weights("leave", group_name="trainer")


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        train(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        sys.stdout.flush()
        os._exit(0)
    sys.exit(harness.main())
