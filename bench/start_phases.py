"""Seconds of each phase of a worker's start, of workers that start cold, warm and beside a peer.

    python bench/start_phases.py
    python bench/start_phases.py --shapes qwen3-0.6b llama-3.1-8b qwen3-30b-a3b:12 --device cuda
    python bench/start_phases.py --shapes llama-3.1-8b --flags "--quantization int4" --device cuda

A shape is a model of `model_shapes`, whose weights are made up and written to files; after a colon,
how many of its layers. A decode worker is started in each way by `weft serve decode`:

- `cold`: empty caches (compiled kernels, digests of files), and weights that are not in the page
  cache. Python's libraries are;
- `warm`: with the caches that the cold one has left;
- `peer`: as cold, beside the warm worker, from which it takes weights and compiled kernels; beside
  the cold one with `--ways cold peer`, which saves a start.

Phases follow one another; `total` is all of them, from the process's start to readiness. Rows that
begin with `of these` are work within the phases. What loading takes beside reading, digests and
compiling is the packing of products.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import Harness, Run, spread
from model_shapes import write_config
from safetensors.torch import save_file
from weft.checkpoint.config import ModelConfig
from weft.engine.model.loader import class_of
from weft.engine.model.weights.random_weights import RandomWeights
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.registry import scheme_of
from weft.engine.model.weights.weights import Weights
from weft.testing.models.senders import free_port
from weft.testing.services.certificates import make_certificates

FILE_BYTES = 2 << 30
NUM_DRAWN = 1 << 24
"""Random numbers, which all tensors repeat: drawing those of a large model takes minutes."""
START_S = 600.0
COLD, WARM, PEER = "cold", "warm", "peer"
WORK = "of these: "


class Shapes(RandomWeights):
    """Notes the tensors that a model asks for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.found: dict[str, tuple[int, ...]] = {}

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        self.found[part.name] = part.shape


def write_model(folder: Path, shape: str) -> int:
    """A checkpoint in bfloat16. Returns its bytes."""
    name, _, layers = shape.partition(":")
    write_config(folder, name, **({"num_hidden_layers": int(layers)} if layers else {}))
    config, shapes = ModelConfig.load(folder), Shapes()
    class_of(config)(config, Weights(shapes, scheme_of(None), torch.bfloat16, torch.device("meta")))
    weight_map, total = dict[str, str](), 0
    noise = torch.empty(NUM_DRAWN, dtype=torch.bfloat16).normal_(0.0, 0.02)
    for number, names in enumerate(groups(shapes.found)):
        tensors = {name: made_up(name, shapes.found[name], noise) for name in names}
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
        total += sum(one.nbytes for one in tensors.values())
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def groups(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Names of the tensors of each file."""
    names, size = list[str](), 0
    for name, shape in shapes.items():
        names.append(name)
        size += torch.Size(shape).numel() * 2
        if size > FILE_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names


def made_up(name: str, shape: tuple[int, ...], noise: torch.Tensor) -> torch.Tensor:
    size = torch.Size(shape).numel()
    if name.endswith("norm.weight"):
        return torch.ones_like(noise[:size]).view(shape)
    return noise.repeat(-(-size // len(noise)))[:size].clone().view(shape)


def forget(folder: Path) -> None:
    """Drops the weights from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # Pages that are not yet written would stay.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def worker(
    model: Path, cache: Path, tls: Path, flags: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """A decode worker that is ready: its address, and what it has told of its start."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        *(sys.executable, "-m", "weft.cli", "serve", "decode", "--model-dir", str(model)),
        *("--port", address.partition(":")[2], "--log-format", "json"),
        *("--tls-cert", str(tls / "decode.pem"), "--tls-key", str(tls / "decode-key.pem")),
        *("--tls-ca", str(tls / "ca.pem"), *flags),
    ]
    caches = {"WEFT_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=os.environ | caches, stdout=log, stderr=log)
        try:
            yield address, told_by(process, lambda: os.pread(log.fileno(), 1 << 24, 0).decode())
        finally:
            process.terminate()
            process.wait(60)


def told_by(process: subprocess.Popen[bytes], log: Callable[[], str]) -> dict[str, Any]:
    """What the worker's line `ready` says."""
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        for line in log().splitlines():
            if '"message": "ready"' in line:
                found: dict[str, Any] = json.loads(line)
                return found
        time.sleep(0.1)
    raise SystemExit(f"the worker has not become ready:\n{log()[-3000:]}")


def start(model: Path, cache: Path, tls: Path, flags: list[str]) -> dict[str, float]:
    """`seconds_of` a worker that is ended again."""
    with worker(model, cache, tls, flags) as (_, told):
        return seconds_of(told, flags)


def seconds_of(told: dict[str, Any], flags: list[str]) -> dict[str, float]:
    """Seconds of each phase of a worker's start, of all, and of work within them."""
    phases: dict[str, float] = told["start_seconds"]
    work = {f"{WORK}{name}": s for name, s in told["start_work_seconds"].items()}
    print(f"{shlex.join(flags)}: {json.dumps(phases | work)}", flush=True)
    return {**phases, "total": sum(phases.values()), **work}


harness = Harness(__file__, __doc__, repeats=3)
harness.flag("--shapes", nargs="+", default=["qwen3-0.6b"])
harness.flag("--device", default="cpu")
harness.flag("--kv-gib", type=float, default=1.0, help="of each worker's pool")
harness.flag("--flags", type=shlex.split, default=[], help="more flags of the workers")
harness.flag("--ways", nargs="+", choices=(COLD, WARM, PEER), default=[COLD, WARM, PEER])
harness.flag("--at", type=Path, help="where to write the weights; else the temporary folder")


@harness.part
def starts(run: Run) -> None:
    """Each shape in a table of its own; its ways in turns."""
    options = run.options
    flags = ["--device", options.device, "--kv-memory-bytes", str(int(options.kv_gib * 2**30))]
    flags += options.flags
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(dir=options.at) as name:
            folder, tls = Path(name), Path(name) / "tls"
            model = folder / "model"
            model.mkdir()
            size = write_model(model, shape)
            make_certificates(tls, "decode")
            found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
            for turn in range(options.repeats):
                kept, source = folder / f"cache-{turn}", COLD
                forget(model)
                if WARM in options.ways:
                    found.setdefault(COLD, []).append(start(model, kept, tls, flags))
                    source = WARM
                with worker(model, kept, tls, flags) as (address, told):
                    found.setdefault(source, []).append(seconds_of(told, flags))
                    if PEER in options.ways:
                        forget(model)
                        more = ["--weights-from", address, "--kernels-from-peers"]
                        found[PEER].append(
                            start(model, folder / f"empty-{turn}", tls, [*flags, *more])
                        )
            run.keep(**{f"{shape} bytes": size})
            names = dict.fromkeys(name for turns in found.values() for one in turns for name in one)
            for phase in sorted(names, key=lambda name: (name.startswith(WORK), name == "total")):
                seconds = {
                    way: spread([one.get(phase, 0.0) for one in turns])
                    for way, turns in found.items()
                }
                run.row(table=" ".join([shape, *options.flags]), phase=phase, **seconds)


if __name__ == "__main__":
    sys.exit(harness.main())
