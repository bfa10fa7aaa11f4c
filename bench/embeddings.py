"""Embeddings a second on a CPU, beside sentence-transformers and infinity-emb in the same run.

All get the same texts and the same random weights: the others encode them in their own way (sorted
by length, in padded batches), and an engine in this process gets what the same tokenizer makes of
them. The vectors are compared. By default each runs as its users run it: sentence-transformers and
infinity-emb compute in float32, Weft in bfloat16 where the CPU multiplies that fast.

    python bench/embeddings.py                                    BERT-base's shape
    python bench/embeddings.py --shape qwen3-0.6b --documents 64
    python bench/embeddings.py --dtype float32 --infinity /path/to/python
    python bench/embeddings.py --peer-dtype bfloat16 --quantization int8

Needs the package sentence-transformers. infinity-emb needs older packages than Weft does, so it has
an environment of its own, whose interpreter is given.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from embedder_shapes import SHAPES, random_texts, write_model
from rich.console import Console
from rich.table import Table
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from weft.checkpoint.dtypes import resolve_dtype
from weft.contract.tasks import Pool
from weft.engine.loop.llm import LLM

LENGTHS = {"8 to 48": (8, 48), "16 to 480": (16, 480), "256": (256, 256)}
Embed = Callable[[Sequence[str]], Any]

_INFINITY = """
import asyncio, json, sys, time
from infinity_emb import AsyncEmbeddingEngine, EngineArgs
folder, dtype = sys.argv[1:]
engine = AsyncEmbeddingEngine.from_args(EngineArgs(
    model_name_or_path=folder, engine="torch", device="cpu", dtype=dtype, bettertransformer=False,
    model_warmup=False))
async def answer():
    async with engine:
        print("ready", flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            vectors, _ = await engine.embed(sentences=json.loads(line))
            took = time.perf_counter() - began
            print(json.dumps([took, [one.tolist() for one in vectors]]), flush=True)
asyncio.run(answer())
"""


class Infinity:
    """infinity-emb in a process of another interpreter.

    Args:
        python: The interpreter.
        folder: The model's directory.
        dtype: What it computes in.
    """

    def __init__(self, python: Path, folder: Path, dtype: str) -> None:
        command = [str(python), "-I", "-c", _INFINITY, str(folder), dtype]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._line("ready")

    def embed(self, texts: Sequence[str]) -> tuple[np.ndarray, float]:
        """Vectors, and the seconds that they took there."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(texts)) + "\n")
        self._process.stdin.flush()
        seconds, vectors = json.loads(self._line("["))
        return np.asarray(vectors, np.float32), seconds

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self, begin: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(begin):
                return line
        raise SystemExit("infinity-emb ended; its error is above")


class Measured(NamedTuple):
    """What one of them did with the texts."""

    vectors: np.ndarray
    per_s: float
    """Documents a second, of the fastest round."""


def timed(embed: Embed) -> Callable[[Sequence[str]], tuple[np.ndarray, float]]:
    """`embed` with the seconds that it takes."""

    def run(texts: Sequence[str]) -> tuple[np.ndarray, float]:
        began = time.perf_counter()
        vectors = embed(texts)
        return np.asarray(vectors, np.float32), time.perf_counter() - began

    return run


def measure(
    ways: dict[str, Callable[[Sequence[str]], tuple[np.ndarray, float]]],
    texts: Sequence[str],
    rounds: int,
) -> dict[str, Measured]:
    """All of them in turns, after a few texts to begin with."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    vectors = {}
    for embed in ways.values():
        embed(texts[:8])
    for _ in range(rounds):
        for name, embed in ways.items():
            vectors[name], seconds = embed(texts)
            times[name].append(seconds)
    return {name: Measured(vectors[name], len(texts) / min(times[name])) for name in ways}


def least_cosine(found: np.ndarray, wanted: np.ndarray) -> float:
    """Of vectors of the same texts."""
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return float(((found * wanted).sum(1) / lengths).min())


def main() -> None:
    """Prints the table, and writes its figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--shape", choices=SHAPES, default="bert-base")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--peer-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quantization", choices=("auto", "int8"), default="auto")
    parser.add_argument("--infinity", type=Path, help="Python of infinity-emb's environment")
    parser.add_argument("--documents", type=int, default=256, help="of the shortest; longer: fewer")
    parser.add_argument("--layers", type=int, help="fewer than the shape's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="file for the figures")
    args = parser.parse_args()
    dtype = resolve_dtype(args.dtype)
    own = dtype + (", int8" if args.quantization == "int8" else "")
    title = f"{args.shape}, {torch.get_num_threads()} threads; Weft {own}, others {args.peer_dtype}"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        write_model(args.shape, model_dir, layers=args.layers)
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        given = {"dtype": getattr(torch, args.peer_dtype)}
        theirs = SentenceTransformer(folder, device="cpu", model_kwargs=given)
        other = None
        if args.infinity is not None:
            other = Infinity(args.infinity, model_dir, args.peer_dtype)
        settings = {"dtype": dtype, "quantization": args.quantization}
        with LLM(model_dir, **settings, prefix_cache=False, max_running_requests=128) as llm:

            def embed(texts: Sequence[str]) -> list[Any]:
                prompts = [one.ids for one in tokenizer.encode_batch(list(texts))]
                return [one[0] for one in llm.pool(prompts, Pool(output="embedding"))]

            ways = {"sentence-transformers": timed(theirs.encode), "Weft": timed(embed)}
            if other is not None:
                ways["infinity-emb"] = other.embed
            for name, (shortest, longest) in LENGTHS.items():
                count = max(8, args.documents * 28 // (shortest + longest))
                texts = random_texts(count, shortest, longest)
                found = measure(ways, texts, args.rounds)
                row: dict[str, Any] = {"words": name, "documents": count}
                row |= {way: one.per_s for way, one in found.items()}
                peer = found["sentence-transformers"]
                row["ratio"] = found["Weft"].per_s / peer.per_s
                row["least_cosine"] = least_cosine(found["Weft"].vectors, peer.vectors)
                rows.append(row)
        if other is not None:
            other.close()
    table = Table(*rows[0], title=title)
    for row in rows:
        numbers = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        numbers[-1] = f"{row['least_cosine']:.6f}"
        table.add_row(*numbers)
    Console().print(table)
    if args.save is not None:
        args.save.write_text(json.dumps({"setup": title, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
