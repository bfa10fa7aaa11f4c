"""Texts as token ids: a prompt and what the target answered; kept in .npz files."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

KINDS = ("chat", "summary", "code")
_ROUND_TOKENS = 32
"""Batches are cut to multiples of this, so that few shapes occur."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One prompt and its answer."""

    tokens: npt.NDArray[np.uint32]
    num_prompt: int
    """Tokens that are the prompt; the others were written by the target."""
    kind: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side, padded on the right."""

    ids: torch.Tensor
    """int64 [rows, tokens]."""
    weights: torch.Tensor
    """float32 [rows, tokens]: how much the prediction of each token counts; 0 for padding."""


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Writes texts; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=np.concatenate([text.tokens for text in texts]),
            sizes=np.array([len(text.tokens) for text in texts], np.int32),
            prompts=np.array([text.num_prompt for text in texts], np.int32),
            kinds=np.array([KINDS.index(text.kind) for text in texts], np.int8),
        )
    os.replace(part, path)


def load_texts(folder: Path) -> list[Text]:
    """All texts of a folder's .npz files, in the order of the files' names."""
    texts: list[Text] = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as file:
            pieces = np.split(file["tokens"], np.cumsum(file["sizes"])[:-1])
            prompts, kinds = file["prompts"].tolist(), file["kinds"].tolist()
        texts += map(Text, pieces, prompts, [KINDS[kind] for kind in kinds])
    return texts


def count_answers(texts: Sequence[Text], vocab_size: int) -> torch.Tensor:
    """How often each token occurs in the answers, int64 [vocab_size]."""
    answers = np.concatenate([text.tokens[text.num_prompt :] for text in texts])
    return torch.from_numpy(np.bincount(answers, minlength=vocab_size))


def pad(texts: Sequence[Text], prompt_weight: float) -> Batch:
    """A batch of texts; the first tokens, which nothing predicts, count nothing."""
    width = max(len(text.tokens) for text in texts)
    width = -(-width // _ROUND_TOKENS) * _ROUND_TOKENS
    ids = torch.zeros((len(texts), width), dtype=torch.int64)
    weights = torch.zeros((len(texts), width))
    for row, text in enumerate(texts):
        size = len(text.tokens)
        ids[row, :size] = torch.from_numpy(text.tokens.astype(np.int64))
        weights[row, : text.num_prompt] = prompt_weight
        weights[row, text.num_prompt : size] = 1.0
    weights[:, 0] = 0.0
    return Batch(ids, weights)


def plan_epoch(texts: Sequence[Text], batch_tokens: int, seed: int) -> list[list[int]]:
    """Indices of the texts of each batch of one epoch: texts of like length, in random order.

    Args:
        texts: Of at most `batch_tokens` tokens each.
        batch_tokens: Of a batch with its padding at most, but for rounding.
        seed: The same seed gives the same plan.
    """
    rng = random.Random(seed)
    order = sorted(range(len(texts)), key=lambda i: (len(texts[i].tokens) // 16, rng.random()))
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, len(texts[index].tokens))
        if not groups or (len(groups[-1]) + 1) * longest > batch_tokens:
            groups.append([])
            longest = len(texts[index].tokens)
        groups[-1].append(index)
    rng.shuffle(groups)
    return groups


def batches(
    texts: Sequence[Text], batch_tokens: int, prompt_weight: float, seed: int, start: int
) -> Iterator[Batch]:
    """Batches without end, from number `start` on: those that an uninterrupted run would see."""
    epoch, skipped = 0, start
    while True:
        groups = plan_epoch(texts, batch_tokens, seed * 1_000_003 + epoch)
        for group in groups[skipped:]:
            yield pad([texts[index] for index in group], prompt_weight)
        skipped = max(skipped - len(groups), 0)
        epoch += 1
