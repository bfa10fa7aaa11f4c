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
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModel
from weft.engine.base.tasks import Pool
from weft.engine.loop.llm import LLM

SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "bert-base": ({"model_type": "bert"}, "mean"),
    "minilm-l6": (
        {
            "model_type": "bert",
            "hidden_size": 384,
            "num_hidden_layers": 6,
            "intermediate_size": 1536,
        },
        "mean",
    ),
    "bge-m3": (
        {
            "model_type": "xlm-roberta",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "max_position_embeddings": 8194,
            "type_vocab_size": 1,
        },
        "cls",
    ),
    "qwen3-0.6b": (
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 3072,
            "max_position_embeddings": 4096,
        },
        "lasttoken",
    ),
}
LENGTHS = {"8 to 48": (8, 48), "16 to 480": (16, 480), "256": (256, 256)}
VOCAB = 30_000
PAD = "[PAD]"


def write_model(shape: str, folder: Path) -> None:
    """Writes a model directory: random weights, a tokenizer of words, pooling and normalisation."""
    fields, pooling = SHAPES[shape]
    given = {"vocab_size": VOCAB, "pad_token_id": 0, **fields}
    torch.manual_seed(0)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    AutoModel.from_config(config).save_pretrained(folder)
    words = {PAD: 0} | {f"w{id_}": id_ for id_ in range(1, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    files: dict[str, object] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "padding_side": "left" if pooling == "lasttoken" else "right",
        },
        "modules.json": [
            {"idx": i, "name": str(i), "path": at, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, at) in enumerate(kinds)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": config.hidden_size,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_lasttoken": pooling == "lasttoken",
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    (folder / "2_Normalize").mkdir()


def random_texts(count: int, shortest: int, longest: int) -> list[str]:
    """Texts of so many words, evenly spread."""
    lengths = [random.randint(shortest, longest) for _ in range(count)]
    return [" ".join(f"w{random.randrange(1, VOCAB)}" for _ in range(n)) for n in lengths]


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
