"""Embeddings a second on a CPU, beside sentence-transformers in the same run.

Both get the same texts and the same random weights: sentence-transformers encodes them in its own
way (sorted by length, in padded batches), and an engine in this process gets what the same
tokenizer makes of them. The vectors are compared.

    python bench/embeddings.py                                    BERT-base's shape, float32
    python bench/embeddings.py --shape qwen3-0.6b --documents 64
    python bench/embeddings.py --dtype bfloat16 --quantization int8

Needs the package sentence-transformers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embedder_shapes import SHAPES, random_texts, write_model
from rich.console import Console
from rich.table import Table
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from weft.engine.base.tasks import Pool
from weft.engine.loop.llm import LLM

LENGTHS = {"8 to 48": (8, 48), "16 to 480": (16, 480), "256": (256, 256)}


def best_of(rounds: int, embed: Callable[[Sequence[str]], Any], texts: Sequence[str]) -> Any:
    """Vectors, and the least seconds of some rounds."""
    embed(texts[:8])
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        vectors = embed(texts)
        times.append(time.perf_counter() - began)
    return np.asarray(vectors, np.float32), min(times)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--shape", choices=SHAPES, default="bert-base")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--quantization", choices=("auto", "int8"), default="auto")
    parser.add_argument("--documents", type=int, default=256, help="of the shortest; longer: fewer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    told = f"{args.shape}, {args.dtype}, {torch.get_num_threads()} threads"
    table = Table(title=told + (", Weft in int8" if args.quantization == "int8" else ""))
    columns = ("words", "documents", "sentence-transformers /s", "Weft /s", "ratio", "least cosine")
    for column in columns:
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        write_model(args.shape, model_dir)
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        theirs = SentenceTransformer(
            folder, device="cpu", model_kwargs={"torch_dtype": getattr(torch, args.dtype)}
        )
        settings = {"dtype": args.dtype, "quantization": args.quantization}
        with LLM(model_dir, **settings, prefix_cache=False, max_running_requests=128) as llm:

            def embed(texts: Sequence[str]) -> list[Any]:
                prompts = [one.ids for one in tokenizer.encode_batch(list(texts))]
                return [one[0] for one in llm.pool(prompts, Pool(output="embedding"))]

            for name, (shortest, longest) in LENGTHS.items():
                count = max(8, args.documents * 28 // (shortest + longest))
                texts = random_texts(count, shortest, longest)
                wanted, their_s = best_of(args.rounds, theirs.encode, texts)
                found, our_s = best_of(args.rounds, embed, texts)
                cosines = (wanted * found).sum(1) / np.linalg.norm(wanted, axis=1)
                table.add_row(
                    name,
                    str(count),
                    f"{count / their_s:.1f}",
                    f"{count / our_s:.1f}",
                    f"{their_s / our_s:.2f}",
                    f"{cosines.min():.6f}",
                )
    Console().print(table)


if __name__ == "__main__":
    main()
