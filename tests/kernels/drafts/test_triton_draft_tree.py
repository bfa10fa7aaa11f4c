"""Triton's kernels for trees of drafts, by its interpreter, against single operations."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.draft_tree import triton_nodes as gpu
from weft.kernels.ops.draft_tree.reference import grow_reference, keep_best_reference
from weft.kernels.ops.draft_tree.spec import DraftTrees, Expanded, Nodes
from weft.testing.kernels.gpu_kernels import change_kernels, notices
from weft.testing.kernels.kernel_checks import fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")


def make_trees(width: int, depth: int, requests: int) -> DraftTrees:
    """Some lack pages, some may not be deep; only what lies between turns is told."""
    nothing = torch.zeros(0)
    return DraftTrees(
        width=width,
        depth=depth,
        num_nodes=0,
        starts=torch.randint(1, 50, (requests,)),
        slots=nothing,
        is_whole=torch.rand(requests) < 0.8,
        max_depths=torch.randint(0, depth + 2, (requests,)),
        page_table=nothing,
        cu_q_lens=nothing,
        max_kv_len=0,
    )


def no_nodes(trees: DraftTrees) -> Nodes:
    requests, num_grown = len(trees.starts), trees.num_grown
    return Nodes(
        torch.full((requests, num_grown), -7),
        torch.full((requests, num_grown), float("nan")),
        torch.full((requests, num_grown), -7),
        torch.full((requests, trees.width * (trees.depth - 1)), -7),
    )


def draw_logits(parents: Expanded, requests: int, width: int, vocab_size: int) -> torch.Tensor:
    """Logits of a level, one of them NaN at times, of which float32 can tell the order of a tree's
    children and of the tokens that are almost children.
    """
    while True:
        logits = torch.randn(len(parents.tokens), vocab_size) * random.choice([0.1, 3.0])
        if random.random() < 0.3:
            logits[random.randrange(len(logits)), random.randrange(vocab_size)] = float("nan")
        chances = logits.double().nan_to_num(nan=-torch.inf).log_softmax(-1)
        best = chances.topk(width + 1, -1).values
        scores = (parents.scores[:, None] + best).view(requests, -1).sort(-1).values
        gaps = scores.diff().nan_to_num(torch.inf)
        if min(gaps.min(), best.diff().abs().min()) > 2e-5:
            return logits


@pytest.mark.parametrize(("width", "depth", "vocab_size"), [(4, 6, 5000), (3, 2, 40), (2, 4, 2049)])
def test_levels_and_what_is_kept(width: int, depth: int, vocab_size: int) -> None:
    fresh_seed()
    requests = random.choice([1, 3])
    trees = make_trees(width, depth, requests)
    names = torch.randperm(4 * vocab_size)[:vocab_size]
    nodes, other = no_nodes(trees), no_nodes(trees)
    begin = torch.zeros(requests, dtype=torch.int64)
    scores = torch.where(trees.max_depths >= 1, 0.0, -torch.inf)
    expanded = found = Expanded(begin, scores, begin, begin)
    for level in range(depth):
        logits = draw_logits(expanded, requests, width, vocab_size)
        plain = logits.clone()
        plain[plain.isnan()] = -torch.inf
        expanded = grow_reference(nodes, plain, names, expanded, trees, level)
        found = gpu.grow(other, logits, names, found, trees, level)
        if level + 1 < depth:
            real = expanded.scores > -torch.inf
            torch.testing.assert_close(found.scores, expanded.scores)
            for ours, theirs in zip(found, expanded, strict=True):
                torch.testing.assert_close(ours[real], theirs[real])
            # What is not to be kept may be any token of the vocabulary.
            assert torch.isin(found.tokens, names).all()
            found = expanded
    torch.testing.assert_close(other.scores, nodes.scores)
    real = nodes.scores > -torch.inf
    assert torch.equal(other.tokens[real], nodes.tokens[real])
    assert torch.equal(other.paths[real], nodes.paths[real])
    for count in {1, random.randint(1, nodes.tokens.shape[1]), min(31, nodes.tokens.shape[1])}:
        count = min(31, count)
        for ours, theirs in zip(
            gpu.keep_best(nodes, count), keep_best_reference(nodes, count), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_no_child_is_before_its_parent() -> None:
    """Nor if it is certain and the logit large: scores are sums, which are rounded."""
    fresh_seed()
    width, depth, vocab_size, requests = 4, 6, 64, 8
    trees = replace(
        make_trees(width, depth, requests),
        is_whole=torch.ones(requests, dtype=torch.bool),
        max_depths=torch.full((requests,), depth),
    )
    names, begin = torch.arange(vocab_size), torch.zeros(requests, dtype=torch.int64)
    for grow in (gpu.grow, grow_reference):
        nodes = no_nodes(trees)
        expanded = Expanded(begin, -5 * torch.rand(requests), begin, begin)
        for level in range(depth):
            logits = torch.full((len(expanded.tokens), vocab_size), -40.0)
            certain = torch.randint(0, vocab_size, (len(logits), 1))
            logits.scatter_(1, certain, 10 + 30 * torch.rand(len(logits), 1))
            parents = expanded.scores.view(requests, -1).repeat_interleave(width, dim=1)
            expanded = grow(nodes, logits, names, expanded, trees, level)
            first = 0 if level == 0 else width + width * width * (level - 1)
            assert (nodes.scores[:, first : first + parents.shape[1]] <= parents).all()
        for keep_best in (gpu.keep_best, keep_best_reference):
            _, words = keep_best(nodes, 31)
            for row, word in enumerate(words.tolist(), 1):
                assert all(1 << row <= one < 2 << row for one in word)


def test_of_equal_scores_parents_come_first() -> None:
    """Certain children are as probable as their parents."""
    for keep_best in (gpu.keep_best, keep_best_reference):
        scores = torch.tensor([[0.0, -1.0, 0.0, -torch.inf, -1.0, -1.0]])
        nodes = Nodes(
            torch.tensor([[10, 11, 12, 13, 14, 15]]),
            scores,
            torch.tensor([[0, 0, 1, 1, 2, 2]]),
            torch.tensor([[0, 1]]),
        )
        tokens, words = keep_best(nodes, 6)
        assert tokens[:, 0].tolist() == [10, 12, 11, 14, 15, 13]
        assert words[:, 0].tolist() == [
            0b11,
            0b111,
            0b1001,
            0b11001,
            0b101001,
            0b1000001,
        ]


@pytest.mark.parametrize(
    "change",
    [
        ("mask = column < vocab_size", "mask = column < vocab_size - 700"),
        ("is_child = child < PARENTS * WIDTH", "is_child = child < PARENTS * WIDTH - 1"),
        ("own_rank + 1, 62", "own_rank, 62"),
        ("rank < num_nodes", "rank < num_nodes - 1"),
    ],
)
@pytest.mark.full
def test_a_mutated_kernel_is_noticed(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_kernels(monkeypatch, gpu, tmp_path, change)
    assert notices(lambda: test_levels_and_what_is_kept(4, 6, 5000))
