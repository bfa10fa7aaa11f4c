"""Exchanges of ranks that divide pages and have a GPU each, by Triton's interpreter in a process a
rank.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.divided_pages.reference import merged_reference
from weft.testing.kernels.divided_models import VOCAB, run_alone, run_divided
from weft.testing.kernels.page_ranks import DIVIDE, HEADS, PAGES, cases_of, run_ranks
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.needs("triton-interpreter"), pytest.mark.full]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_get_all_queries_and_merge_the_results_of_their_heads(
    size: int, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    found = run_ranks(size, seed, str(tmp_path / "store"))
    for number, case in enumerate(cases_of(size, seed)):
        for rank, of_rank in enumerate(found):
            first = rank // DIVIDE * DIVIDE
            group = slice(first, first + DIVIDE)
            heads = slice((rank - first) * HEADS, (rank - first + 1) * HEADS)
            asked = case.queries[group].transpose(0, 1).flatten(1, 2)
            assert torch.equal(of_rank.queries[number], asked)
            sinks = None if case.sinks is None else case.sinks[rank]
            values, sums = case.values[group, :, heads], case.sums[group, :, heads]
            expected = merged_reference(values, sums, sinks)
            # With nothing anywhere any result is right: no row asks for it.
            is_any = (sums > -1e37).any(dim=0)
            is_any |= torch.full_like(is_any, sinks is not None)
            torch.testing.assert_close(of_rank.merged[number][is_any], expected[is_any])


def test_pages_are_copied_between_ranks(tmp_path: Path) -> None:
    found = run_ranks(4, random.randrange(1 << 30), str(tmp_path / "store"))
    for first in (0, 2):
        pages = {page: (1 + page // DIVIDE) * 10 + first + page % DIVIDE for page in range(PAGES)}
        pages |= {into: pages[source] for source, into in ((2, 7), (3, 1), (4, 6), (5, 8))}
        for page, value in pages.items():
            assert found[first + page % DIVIDE].pages[1 + page // DIVIDE, 0] == value, page


@pytest.mark.parametrize("kind", ["heads", "latents"])
def test_models_of_ranks_that_divide_pages_have_the_logits_of_one_process(
    kind: str, tmp_path: Path
) -> None:
    """By the operations and kernels of a GPU, each rank with a pool of its pages alone."""
    seed = random.randrange(1 << 30)
    folder, sizes = tmp_path / "model", {"num_attention_heads": 4, "num_hidden_layers": 2}
    if kind == "heads":
        make_tiny("llama", folder, seed, vocab_size=VOCAB, num_key_value_heads=1, **sizes)
    else:
        family, fields = MOE_FAMILIES["deepseek-v3"]
        sizes |= {"head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 2}
        make_reference(family, folder, seed, **{**fields, **sizes})
    alone = run_alone(folder, seed)
    together = run_divided(folder, seed, str(tmp_path / "store"))
    for found, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
