"""Seconds to load a checkpoint from the page cache, beside other loaders and the machine's rates.

    python bench/load_time.py
    python bench/load_time.py --gib 8 --device cuda --json bench/results/load.json

It writes layers of Llama 3.1 8B's shape in bfloat16 to a temporary folder, reads the files so that
they are in the page cache, and takes in turns, each in a process of its own: Weft's loader as a
first start (which computes the files' digests), as a later one and with nothing in the page cache,
from a peer (another process that has the model, whose packed weights the GPU copies, or NIXL),
safetensors, and fastsafetensors where it is installed. With `--source cuda:1` the peer's weights
come from another GPU; without it one GPU has both. Seconds of a loader's phases are printed first.
All keep what they load; Weft's time includes the packing of products for the device, but not what
every worker does before: starting the driver, and naming Triton's compiler. Once it takes what the
machine can do: reads by one thread and by eight, also from disk, writes of new files, copies from
pinned memory to the device, and on a CPU the first write of as much new memory. `pull` fetches the
files from a hub on loopback to a new cache beside them, as `weft model pull` does.

    python bench/load_time.py --only steps --device cuda:0 --source cuda:1

takes the steps of an engine on the source, by themselves and while another process copies its
weights over and over.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import torch
from harness import Harness, Run, in_turns, ratio_of, spread, timed
from safetensors.torch import load_file, save_file
from weft.checkpoint.hub import HubName, pull
from weft.contract.errors import WeftError
from weft.contract.messages import Inbox
from weft.contract.request import StopCriteria
from weft.contract.start_work import START_WORK
from weft.contract.weights import WeightCommand, WeightOffer
from weft.engine.executor.peer_weights import OfferedWeights, PeerWeights
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.kernels.shared.cpu import native_cpu
from weft.kernels.shared.memory import huge_zeros
from weft.testing.models.hub_mirror import serving_mirror

try:
    import fastsafetensors
except ImportError:
    fastsafetensors = None

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 4096, 14_336, 32, 8, 32_000
LAYERS_A_FILE = 5
GIB = 1 << 30
_READ_BYTES, _COPY_BYTES = 16 << 20, 256 << 20
_THREADS = 8
_REPOSITORY = "bench/model"
NUM_PROMPTS, PROMPT_TOKENS, NUM_PAGES = 8, 64, 2048


def random_layer() -> dict[str, torch.Tensor]:
    """The parameters of a layer."""
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    return {
        f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()
    }


def write_model(folder: Path, num_bytes: int) -> None:
    """A checkpoint of about this size, in files of some layers each; all layers are alike."""
    layer = random_layer()
    of_layer = sum(tensor.nbytes for tensor in layer.values())
    layers = max(1, (num_bytes - 2 * VOCAB * HIDDEN) // of_layer)
    ends = {
        "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    weight_map = {}
    for number, first in enumerate(range(0, layers, LAYERS_A_FILE)):
        tensors = {} if number else dict(ends)
        for at in range(first, min(first + LAYERS_A_FILE, layers)):
            tensors |= {f"model.layers.{at}.{key}": one.clone() for key, one in layer.items()}
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "rope_theta": 1e4, "tie_word_embeddings": True,
        "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def weight_paths(folder: Path) -> list[Path]:
    """The checkpoint's files."""
    return sorted(folder.glob("*.safetensors"))


def read_plainly(path: Path, first: int, step: int) -> None:
    """Reads every `step`-th piece of a file into one buffer, again and again."""
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        for at in range(first * _READ_BYTES, path.stat().st_size, step * _READ_BYTES):
            os.preadv(file.fileno(), [buffer], at)


def read_by_one(folder: Path, device: str) -> None:
    """A plain read by one thread."""
    for path in weight_paths(folder):
        read_plainly(path, 0, 1)


def read_by_several(folder: Path, device: str) -> None:
    """A plain read by several threads."""
    with ThreadPoolExecutor(_THREADS) as threads:
        for path in weight_paths(folder):
            list(threads.map(read_plainly, repeat(path), range(_THREADS), repeat(_THREADS)))


def forget(folder: Path) -> None:
    """Drops the files' pages from the page cache."""
    for path in weight_paths(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # Pages that are not yet written would stay.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_as_much(folder: Path, device: str) -> None:
    """Writes new files of the same sizes, by one thread."""
    piece = memoryview(os.urandom(_READ_BYTES))
    for path in weight_paths(folder):
        with (folder / f"{path.name}.copy").open("wb", buffering=0) as file:
            for at in range(0, size := path.stat().st_size, _READ_BYTES):
                file.write(piece[: size - at])
        Path(file.name).unlink()


def pull_from_mirror(folder: Path, device: str) -> None:
    """Downloads the files; the environment names hub and cache."""
    pull(HubName(_REPOSITORY))


def copy_as_much(folder: Path, device: str) -> None:
    """Copies as many bytes to new memory: of a GPU, or of the host in huge pages."""
    size = sum(path.stat().st_size for path in weight_paths(folder))
    is_cuda = torch.device(device).type == "cuda"
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
    kept = []
    for _ in range(size // _COPY_BYTES):
        if is_cuda:
            kept.append(source.to(device, non_blocking=True))
        else:
            kept.append(huge_zeros((_COPY_BYTES,), torch.uint8).copy_(source))


def load_with_weft(folder: Path, device: str) -> None:
    """Weft's loader, of a checkpoint that it has seen before."""
    load_model(folder, "bfloat16", device)


def load_first(folder: Path, device: str) -> None:
    """Weft's loader, of files that have changed since it saw them."""
    for path in weight_paths(folder):
        os.utime(path)
    load_model(folder, "bfloat16", device)


def offer_weights(folder: Path, device: str) -> None:
    """Loads the model, prints its `WeightOffer`, and keeps it until nobody writes to this process
    any more.
    """
    if ":" in device:
        torch.cuda.set_device(device)
    loaded = load_model(folder, "bfloat16", device)
    offered, began = OfferedWeights(0), time.monotonic()
    try:
        ranks = [offered.offer(loaded.packed, loaded.digest)]
    except WeftError as error:
        raise SystemExit(f"weights cannot be offered: {error}; choose other --ways") from None
    offer = WeightOffer(
        model_digest=loaded.digest,
        start_digest=loaded.packed.origin.digest,
        files=loaded.packed.origin.files,
        version="",
        ranks=ranks,
    )
    print(f"offered after {time.monotonic() - began:.2f} s", file=sys.stderr)
    print(offer.to_json(), flush=True)
    sys.stdin.read()
    offered.withdraw()


def load_from_peer(folder: Path, device: str) -> None:
    """Weft's loader, of another process's packed weights."""
    copy_from(WeightOffer.of_json(Path(os.environ[OFFER]).read_text()), folder, device)


def load_over_nixl(folder: Path, device: str) -> None:
    """The same as if the other process were on another host."""
    offer = WeightOffer.of_json(Path(os.environ[OFFER]).read_text())
    ranks = [replace(one, allocations=[]) for one in offer.ranks]
    copy_from(replace(offer, ranks=ranks), folder, device)


def copy_from(offer: WeightOffer, folder: Path, device: str) -> None:
    loaded = load_model(folder, "bfloat16", device, peer=PeerWeights(offer, 0))
    assert loaded.is_from_peer, "the log says why the files were read"


@contextmanager
def peer_of(folder: Path, device: str, at: Path) -> Iterator[dict[str, str]]:
    """Another process that has the model; what tells of it in the environment."""
    command = [sys.executable, __file__, PEER, str(folder), device]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as source:
        assert source.stdin is not None
        assert source.stdout is not None
        offered = source.stdout.readline()
        if not offered:
            raise SystemExit("no process offers its weights; its message is above")
        offer = at / "offer.json"
        offer.write_text(offered)
        try:
            yield {OFFER: str(offer)}
        finally:
            source.stdin.close()


@contextmanager
def copying(offer: Path, folder: Path, device: str) -> Iterator[Callable[[], int]]:
    """Another process that copies a worker's weights over and over, from when it has done so once;
    how often it has since.
    """
    command = [sys.executable, __file__, COPIES, str(folder), device]
    environment, num_done = {**os.environ, OFFER: str(offer)}, 0
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdout=pipe, env=environment) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline(), "the log says why the weights were not copied"
        os.set_blocking(reader.stdout.fileno(), False)

        def count() -> int:
            nonlocal num_done
            with suppress(BlockingIOError):
                num_done += os.read(reader.stdout.fileno(), 1 << 16).count(b"\n")
            return num_done

        try:
            yield count
        finally:
            reader.terminate()


def copy_for_ever(folder: Path, device: str) -> None:
    while True:
        load_from_peer(folder, device)
        print(flush=True)


def load_with_safetensors(folder: Path, device: str) -> None:
    """safetensors, without any packing."""
    kept = [load_file(path, device) for path in weight_paths(folder)]
    if torch.device(device).type == "cpu":
        # They are mapped until somebody needs them, and all are kept, as by the other loaders.
        kept = [{name: one.clone() for name, one in tensors.items()} for tensors in kept]


def load_with_fastsafetensors(folder: Path, device: str) -> None:
    """fastsafetensors, without any packing."""
    paths = [str(path) for path in weight_paths(folder)]
    with fastsafetensors.fastsafe_open(
        paths, device=f"{device}:0" if device == "cuda" else device, nogds=True
    ) as file:
        kept = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 - not a mapping
        assert kept


RATES: dict[str, Callable[[Path, str], None]] = {
    "read, 1 thread": read_by_one,
    "read, 8 threads": read_by_several,
    "read, 8 threads, from disk": read_by_several,
    "write, 1 thread": write_as_much,
    "copy to new memory": copy_as_much,
    "pull": pull_from_mirror,
}
OVER_NIXL = "weft, from a peer over NIXL"
LOADERS: dict[str, Callable[[Path, str], None]] = {
    "weft, first start": load_first,
    "weft": load_with_weft,
    "weft, from disk": load_with_weft,
    "weft, from a peer": load_from_peer,
    OVER_NIXL: load_over_nixl,
    "safetensors": load_with_safetensors,
    "fastsafetensors": load_with_fastsafetensors,
}
WAYS = RATES | LOADERS
CHANGING = ("write, 1 thread", "weft, first start")
"""Ways that change the checkpoint's folder, which is therefore never one that the user names."""
ONE, PEER, COPIES = "one", "peer", "copies"
"""Words before a way that is to be timed in this process, before a model to be offered, and before
one to be copied for ever.
"""
OFFER = "WEFT_BENCH_OFFER"
"""Variable that names the file of an offer."""
FROM_DISK = ", from disk"
"""Ends the names of ways before which the page cache forgets the files."""


def seconds_of(way: str, folder: Path, device: str, source: str) -> dict[str, float]:
    """One of `WAYS` in a process of its own, as `s`, and its phases. A peer has the model on
    `source`.
    """
    command = [sys.executable, __file__, ONE, way, str(folder), device]
    with serving_mirror() as mirror, tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        mirror.folders[_REPOSITORY] = folder
        hub = {"HF_ENDPOINT": mirror.url, "HF_HUB_CACHE": cache, "HF_HUB_OFFLINE": "0"}
        if way == "pull":
            mirror.commit(_REPOSITORY)  # Computes the files' hashes.
        if way.endswith(FROM_DISK):
            forget(folder)
        is_copied = WAYS[way] in (load_from_peer, load_over_nixl)
        peer = peer_of(folder, source, Path(cache)) if is_copied else nullcontext({})
        with peer as told:
            environment = {**os.environ, **hub, **told}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    for phase, seconds in found.items():
        print(f"{way}, {phase}: {seconds:.3f}", flush=True)
    return found


def time_one(way: str, folder: Path, device: str) -> float:
    """Seconds of one of `WAYS` in this process."""
    is_cuda = torch.device(device).type == "cuda"
    if is_cuda:
        from weft.kernels.shared.kernel_cache import begin_naming

        if ":" in device:
            torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # Starts the driver.
        begin_naming().join()
    elif native_cpu() is None:  # Compiled at the first call.
        raise SystemExit("no C compiler: packing would not be the usual one")

    def whole() -> None:
        WAYS[way](folder, device)
        if is_cuda:
            torch.cuda.synchronize(device)

    return timed(whole)


harness = Harness(__file__, __doc__, repeats=3)
harness.flag("--gib", type=float, default=4.0, help="size of the checkpoint")
harness.flag("--ways", nargs="+", choices=WAYS, help="default all")
harness.flag("--device", default="cpu")
harness.flag("--tokens", type=int, default=1000, help="generated by each request")
harness.flag("--source", help="device of the peer; else --device")
harness.flag("--at", type=Path, help="where to write it; else the temporary folder")
harness.flag("--folder", type=Path, help="checkpoint to load, unchanged; else written")


@harness.check
def complete(options: argparse.Namespace) -> None:
    """Ways that change nothing that the user named."""
    options.source = options.source or options.device
    left_out = CHANGING if options.folder else ()
    # On a CPU weights of a peer always come over NIXL.
    same = {OVER_NIXL} if options.device == "cpu" else set[str]()
    options.ways = options.ways or [way for way in WAYS if way not in (*left_out, *same)]
    if changing := set(options.ways).intersection(left_out):
        harness.error(f"--folder: {', '.join(sorted(changing))} would change it")


def written_model(run: Run) -> Path:
    options = run.options
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(dir=options.at)))
    write_model(folder, int(options.gib * GIB))
    return folder


@harness.part
def loading(run: Run) -> None:
    """All ways: loaders in turns, the machine's rates once."""
    options = run.options
    folder = options.folder or written_model(run)
    ways = [way for way in options.ways if way != "fastsafetensors" or fastsafetensors is not None]
    size = sum(path.stat().st_size for path in weight_paths(folder))
    read_by_one(folder, options.device)
    devices = options.device, options.source
    seconds_of("weft", folder, *devices)  # So that libraries are in the page cache too.
    times: dict[str, list[dict[str, float]]] = {}
    for turn in range(options.repeats):
        for way in ways if not turn else [way for way in ways if way in LOADERS]:
            times.setdefault(way, []).append(seconds_of(way, folder, *devices))
    run.keep(bytes=size)
    for way, taken in times.items():
        phases = {name: spread([one[name] for one in taken]) for name in taken[0]}
        rates = [size / one["s"] / GIB for one in taken]
        run.row(way=way, s=phases.pop("s"), gib_per_s=spread(rates), phases=phases)


@harness.part_if_named
def steps(run: Run) -> None:
    """A token of eight requests on the source: alone, while it makes its offer, and while its
    weights are copied over and over.
    """
    options = run.options
    folder = options.folder or written_model(run)
    stop = StopCriteria(max_tokens=options.tokens, ignore_eos=True)
    prompts = [[number + 1] * PROMPT_TOKENS for number in range(NUM_PROMPTS)]
    num_copies: list[int] = []
    at = Path(run.stack.enter_context(tempfile.TemporaryDirectory())) / "offer.json"
    settings = {"dtype": "bfloat16", "num_pages": NUM_PAGES, "prefix_cache": False}
    with LLM(folder, device=options.source, **settings) as llm:

        def alone() -> float:
            return timed(lambda: llm.generate(prompts, stop=stop)) / options.tokens

        def beside() -> float:
            with copying(at, folder, options.device) as count:
                before, seconds = count(), alone()
                num_copies.append(count() - before)
            return seconds

        in_turns({"alone": alone}, 1)
        llm.engine.turn(Inbox(weight_commands=[WeightCommand(query=-1, action="offer")]))
        offering = alone()
        at.write_text(llm.offer_weights().to_json())
        found = in_turns({"alone": alone, "beside": beside}, options.repeats)
    alone_s = spread(found["alone"])
    run.row(way="alone", ms=spread(found["alone"], 1e3))
    run.row(way="making the offer", ms=offering * 1e3, to_alone=offering / alone_s.median)
    run.row(
        way="while copied over and over",
        ms=spread(found["beside"], 1e3),
        to_alone=ratio_of(found["beside"], found["alone"]),
        copies=spread(num_copies[1:]),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [ONE]:
        taken = time_one(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
        print(json.dumps({"s": taken, **START_WORK.seconds()}))
        sys.exit(0)
    if sys.argv[1:2] == [COPIES]:
        copy_for_ever(Path(sys.argv[2]), sys.argv[3])
    if sys.argv[1:2] == [PEER]:
        offer_weights(Path(sys.argv[2]), sys.argv[3])
        sys.exit(0)
    sys.exit(harness.main())
