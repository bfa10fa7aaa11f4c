"""A step whose rows form a tree through whole models: each path as if it were a chain."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from weft.engine.model.loader import load_model
from weft.kernels.shared import cpu
from weft.testing.kernels.kernel_checks import fresh_seed
from weft.testing.kernels.tree_cases import path_to, random_parents, words_of
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.tiny_models import make_tiny

VOCAB, NUM_PAGES = 517, 64


def tokens_of(count: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(count)]


@torch.inference_mode()
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_each_path_is_as_the_same_chain(
    kind: str, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a decode, a chain of drafts and a prompt whose logits are not all wanted."""
    if not is_native:
        monkeypatch.setattr(cpu, "native_cpu", lambda: None)
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    fresh_seed()
    seed = random.randrange(10**6)
    random.seed(seed)
    print(f"random seed {seed}")
    model = load_model(make_tiny(kind, tmp_path, seed), "float32", "cpu").model
    driver = PagedDriver(model, NUM_PAGES, seed=seed)
    prompts = [tokens_of(random.randrange(1, 40)) for _ in range(4)]
    requests = [PagedRequest() for _ in prompts]
    driver.step(list(zip(requests, prompts, strict=True)))
    trees = [random_parents(32), random_parents(random.randrange(2, 12))]
    brought = [tokens_of(1), *(tokens_of(len(parents)) for parents in trees), tokens_of(60)]
    chain = PagedRequest()
    work = [*zip(requests, brought, strict=True), (chain, tokens_of(9))]
    batch = driver.batch(work, logits_rows=range(1 + sum(map(len, trees))))
    words = [1, *(word for parents in trees for word in words_of(parents)), *[-1] * 69]
    (group,) = batch.groups
    batch.groups = (group._replace(ancestors=torch.tensor(words)),)
    begin = 1
    for parents in trees:
        start = int(batch.positions[begin])
        depths = [len(path_to(parents, row)) - 1 for row in range(len(parents))]
        batch.positions[begin : begin + len(parents)] = start + torch.tensor(depths)
        begin += len(parents)
    found = model.logits(model.forward(batch, driver.pool))
    plain = PagedDriver(model, NUM_PAGES, seed=seed + 1)

    def alone(tokens: list[int], rows: list[int]) -> torch.Tensor:
        return plain.step([(PagedRequest(pages=list(range(12))), tokens)], rows)

    def check(row: int, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(found[row], wanted, rtol=1e-4, atol=1e-4)

    check(0, alone(prompts[0] + brought[0], [len(prompts[0])])[0])
    begin = 1
    for prompt, tokens, parents in zip(prompts[1:3], brought[1:3], trees, strict=True):
        for leaf in set(range(len(parents))) - set(parents):
            path = path_to(parents, leaf)
            rows = [len(prompt) + depth for depth in range(len(path))]
            wanted = alone(prompt + [tokens[row] for row in path], rows)
            for row, logits in zip(path, wanted, strict=True):
                check(begin + row, logits)
        begin += len(parents)
