"""Seconds to load a checkpoint from the page cache, beside a plain read of its files.

    python bench/load_time.py
    python bench/load_time.py --gib 16 --device cuda --save bench/results/load.json

It writes a random Llama of the given size in bfloat16 to a temporary folder, reads the files once
so that they are in the page cache, and takes in turns, each in a process of its own: a plain read
into memory, Weft's loader, and fastsafetensors where it is installed. Weft's time includes the
packing of products for the device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from weft.engine.model.loader import load_model
from weft.kernels.cpu import native_cpu

try:
    import fastsafetensors
except ImportError:
    fastsafetensors = None

HIDDEN, INNER, HEADS, VOCAB = 2048, 8192, 16, 32_000
LAYERS_A_FILE = 8
GIB = 1 << 30
_READ_BYTES = 16 << 20


def layer_tensors(layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The parameters of a layer."""
    shapes = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    return {
        f"model.layers.{layer}.{name}.weight": torch.empty(shape, dtype=torch.bfloat16).uniform_(
            -0.03, 0.03, generator=generator
        )
        for name, shape in shapes.items()
    }


def write_model(folder: Path, num_bytes: int) -> None:
    """A checkpoint of about this size, in files of some layers each."""
    generator = torch.Generator().manual_seed(0)
    of_layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    layers = max(1, (num_bytes - 2 * VOCAB * HIDDEN) // of_layer)
    ends = {
        "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    weight_map = {}
    for number, first in enumerate(range(0, layers, LAYERS_A_FILE)):
        tensors = {} if number else ends
        for layer in range(first, min(first + LAYERS_A_FILE, layers)):
            tensors |= layer_tensors(layer, generator)
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "rope_theta": 1e4, "tie_word_embeddings": True,
        "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def read_plainly(folder: Path, device: str) -> None:
    """Reads all files into one buffer, again and again."""
    buffer = memoryview(bytearray(_READ_BYTES))
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def load_with_weft(folder: Path, device: str) -> None:
    """Weft's loader."""
    load_model(folder, "bfloat16", device)


def load_with_fastsafetensors(folder: Path, device: str) -> None:
    """fastsafetensors, without any packing."""
    paths = sorted(map(str, folder.glob("*.safetensors")))
    with fastsafetensors.fastsafe_open(paths, device=device) as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            file.get_tensor(name).clone()


WAYS = {
    "plain read": read_plainly,
    "weft": load_with_weft,
    "fastsafetensors": load_with_fastsafetensors,
}


def seconds_of(way: str, folder: Path, device: str) -> float:
    """One load in a process of its own."""
    command = [sys.executable, __file__, "--one", way, "--folder", str(folder), "--device", device]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def measure(gib: float, repeats: int, device: str) -> dict[str, Any]:
    """Medians by way, in turns."""
    ways = [way for way in WAYS if way != "fastsafetensors" or fastsafetensors is not None]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, int(gib * GIB))
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        read_plainly(folder, device)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way in ways:
                times[way].append(seconds_of(way, folder, device))
    rates = {way: size / statistics.median(taken) / GIB for way, taken in times.items()}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "bytes": size,
        "device": device,
        "seconds": times,
        "gib_per_s": rates,
    }


def main() -> None:
    """Measures, prints a row a way, and saves the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", type=Path, help="file for the figures")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        native_cpu()  # Compiled at the first call.
        began = time.perf_counter()
        WAYS[options.one](options.folder, options.device)
        print(time.perf_counter() - began)
        return
    found = measure(options.gib, options.repeats, options.device)
    table = Table("way", "seconds", "GiB/s")
    for way, taken in found["seconds"].items():
        rate = found["gib_per_s"][way]
        table.add_row(way, f"{statistics.median(taken):.2f}", f"{rate:.2f}")
    Console().print(table)
    if options.save:
        options.save.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
