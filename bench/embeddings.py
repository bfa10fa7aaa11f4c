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

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embedder_shapes import SHAPES, random_texts, write_model
from harness import Harness, Run, in_turns, ratio_of, spread
from tokenizers import Tokenizer
from weft.checkpoint.dtypes import resolve_dtype
from weft.contract.tasks import PoolingParams
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


def clocked(embed: Embed, texts: Sequence[str]) -> tuple[np.ndarray, float]:
    """Vectors, and the seconds that they took."""
    began = time.perf_counter()
    vectors = embed(texts)
    return np.asarray(vectors, np.float32), time.perf_counter() - began


def least_cosine(found: np.ndarray, wanted: np.ndarray) -> float:
    """Of vectors of the same texts."""
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return float(((found * wanted).sum(1) / lengths).min())


harness = Harness(__file__, __doc__, repeats=3)
harness.flag("--shape", choices=SHAPES, default="bert-base")
harness.flag("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
harness.flag("--peer-dtype", choices=("float32", "bfloat16"), default="float32")
harness.flag("--quantization", choices=("auto", "int8"), default="auto")
harness.flag("--infinity", type=Path, help="Python of infinity-emb's environment")
harness.flag("--documents", type=int, default=256, help="of the shortest; longer: fewer")
harness.flag("--layers", type=int, help="fewer than the shape's")


@harness.part
def embeddings(run: Run) -> None:
    """All lengths of texts."""
    from sentence_transformers import SentenceTransformer

    options = run.options
    model_dir = Path(run.stack.enter_context(tempfile.TemporaryDirectory()))
    write_model(options.shape, model_dir, layers=options.layers)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    given = {"dtype": getattr(torch, options.peer_dtype)}
    theirs = SentenceTransformer(str(model_dir), device="cpu", model_kwargs=given)
    settings = {"dtype": resolve_dtype(options.dtype), "quantization": options.quantization}
    llm = run.stack.enter_context(
        LLM(model_dir, **settings, prefix_cache=False, max_running_requests=128)
    )

    def embed(texts: Sequence[str]) -> list[Any]:
        prompts = [one.ids for one in tokenizer.encode_batch(list(texts))]
        return [one[0] for one in llm.pool(prompts, PoolingParams(output="embedding"))]

    ways: dict[str, Callable[[Sequence[str]], tuple[np.ndarray, float]]] = {
        "sentence-transformers": lambda texts: clocked(theirs.encode, texts),
        "Weft": lambda texts: clocked(embed, texts),
    }
    if options.infinity is not None:
        other = Infinity(options.infinity, model_dir, options.peer_dtype)
        run.stack.callback(other.close)
        ways["infinity-emb"] = other.embed
    for name, (shortest, longest) in LENGTHS.items():
        count = max(8, options.documents * 28 // (shortest + longest))
        texts = random_texts(count, shortest, longest)
        calls = {way: lambda call=call, texts=texts: call(texts) for way, call in ways.items()}
        found = in_turns(calls, options.repeats)
        rates = {way: [count / took for _, took in each] for way, each in found.items()}
        ours, peers = (found[way][-1][0] for way in ("Weft", "sentence-transformers"))
        run.row(
            {"words": name, "documents": count} | {w: spread(each) for w, each in rates.items()},
            ratio=ratio_of(rates["Weft"], rates["sentence-transformers"]),
            least_cosine=least_cosine(ours, peers),
        )


if __name__ == "__main__":
    sys.exit(harness.main())
