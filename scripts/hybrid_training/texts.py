"""The texts on disk: shards of turns, and the token ids that are trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .writing import Turn, is_held_out

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""Special tokens, with ids 0, 1 and 2."""
START_ID = 1
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Chat template in Jinja."""
_SAMPLE = 40_000
"""Turns that the tokenizer is trained on."""
_ENCODED = 4096
"""Texts that are encoded at once."""
_SPLITS = ("train", "held-out")
IdArray = npt.NDArray[np.uint16]


def save_turns(path: Path, turns: Sequence[Turn]) -> None:
    """Writes a shard, a JSON list a line; it appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for turn in turns:
            file.write(json.dumps(list(turn), ensure_ascii=False) + "\n")
    os.replace(part, path)


def load_turns(folder: Path) -> list[Turn]:
    """The turns of all shards, in the order of the shards' names."""
    paths = sorted(folder.glob("*.jsonl"))
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    return [Turn(*json.loads(line)) for line in lines]


def as_text(turn: Turn) -> str:
    """A turn as the model is to see it; an answer that was cut has no end."""
    text = f"{START}user\n{turn.prompt}{STOP}\n{START}assistant\n{turn.answer}"
    return f"{text}{STOP}\n" if turn.is_whole else text


def train_tokenizer(turns: Sequence[Turn], vocab_size: int) -> Tokenizer:
    """A byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [f"{turn.prompt}\n{turn.answer}" for turn in turns[:_SAMPLE]],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END, START, STOP],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def prepare(turns: Sequence[Turn], vocab_size: int, folder: Path) -> dict[str, int]:
    """Writes tokenizer.json and, for each split, ids and the ends of texts as .npy files.

    Args:
        turns: All turns.
        vocab_size: Of the tokenizer.
        folder: Is made; a tokenizer that is there is used.

    Returns:
        Tokens of each split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = train_tokenizer(turns, vocab_size)
        tokenizer.save(str(path))
    sizes = {}
    for split in _SPLITS:
        held = split == "held-out"
        own = [as_text(turn) for turn in turns if is_held_out(turn.prompt) == held]
        ids = [
            np.array(found.ids, np.uint16)
            for at in range(0, len(own), _ENCODED)
            for found in tokenizer.encode_batch_fast(own[at : at + _ENCODED])
        ]
        flat = np.concatenate(ids) if ids else np.zeros(0, np.uint16)
        np.save(folder / f"{split}.npy", flat)
        np.save(folder / f"{split}-ends.npy", np.cumsum([len(row) for row in ids], dtype=np.int64))
        sizes[split] = len(flat)
    return sizes


def load_split(folder: Path, split: str) -> list[IdArray]:
    """The texts of a split: ids of each."""
    flat = np.load(folder / f"{split}.npy", allow_pickle=False)
    ends = np.load(folder / f"{split}-ends.npy", allow_pickle=False)
    return np.split(flat, ends[:-1]) if len(ends) else []


def batches(
    texts: Sequence[IdArray], batch: int, length: int, seed: int, start: int
) -> Iterator[torch.Tensor]:
    """Batches without end, from number `start` on: int64 [batch, length + 1].

    Each row begins where a text begins; others follow in random order, and the last one is cut.
    """
    rows = islice(_rows(texts, length + 1, seed), start * batch, None)
    while True:
        picked = [np.concatenate([texts[index] for index in row]) for row in islice(rows, batch)]
        yield torch.from_numpy(np.stack([row[: length + 1] for row in picked]).astype(np.int64))


def _rows(texts: Sequence[IdArray], size: int, seed: int) -> Iterator[list[int]]:
    """Numbers of the texts of each row."""
    sizes = [len(text) for text in texts]
    if sum(sizes) < size:
        raise ValueError(
            f"the texts have {sum(sizes)} tokens, a row takes {size}: write more texts"
        )
    for epoch in count():
        row, filled = [], 0
        for index in np.random.default_rng([seed, epoch]).permutation(len(texts)).tolist():
            row.append(index)
            filled += sizes[index]
            if filled >= size:
                yield row
                row, filled = [], 0


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP,
        "pad_token": END,
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
