"""Parts of ranks by themselves: sums and frames in shared memory, and the arithmetic of shares."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import pytest
import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.arrays import Int64Array
from weft.contract.errors import RanksLost
from weft.engine.base.state_rows import StateRows
from weft.engine.executor import orders
from weft.engine.executor.orders import Order
from weft.engine.executor.ranks.frames import (
    NO_PAGES,
    NewPages,
    Step,
    Tokens,
    decode,
    encode_step,
    encode_tokens,
    frame_of_order,
)
from weft.engine.executor.step_input import InsertedRows, StepInput, TurnedRows
from weft.engine.model.loader import class_of
from weft.engine.model.stage import ModelShare
from weft.engine.model.weights.random_weights import RandomWeights
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.plain import PlainScheme
from weft.engine.model.weights.weights import Weights
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shared import SharedGroup, segment_bytes
from weft.engine.sampling.prompt_scores import ScoredRows
from weft.pages.memory.page_table import PageTable
from weft.testing.engine.rank_footprint import footprint_of_rank
from weft.testing.models.tiny_models import tiny_config

DOCS = Path(__file__).resolve().parents[3] / "docs" / "parallel.md"
CPU = torch.device("cpu")


def groups(size: int, limit_s: float = 20.0, *, is_checked: bool = False) -> list[SharedGroup]:
    segment = Segment.create(segment_bytes(size), "test")
    return [
        SharedGroup(segment, rank, size, limit_s, is_checked=is_checked) for rank in range(size)
    ]


def on_all(found: list[SharedGroup], work: Callable[[SharedGroup], Any]) -> list[Any]:
    """Does work on each rank, in a thread of its own; its results."""
    results: list[Any] = [None] * len(found)

    def run(rank: int) -> None:
        results[rank] = work(found[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_added_up_in_the_order_of_the_ranks(dtype: torch.dtype) -> None:
    found = groups(3)
    for rows, width in ((1, 5), (7, 72), (300, 1000)):
        parts = torch.randn(3, rows, width) * 10.0 ** torch.randint(-3, 4, (3, rows, width))
        residual = torch.randn(rows, width).to(dtype)
        sums = on_all(found, lambda group, p=parts, r=residual: group.add_sum(p[group.rank], r))
        right = (((parts[0] + parts[1]) + parts[2]) + residual.float()).to(dtype)
        for one in sums:
            assert torch.equal(one, right)


def test_a_rank_that_does_not_come_is_named_and_ends_the_group() -> None:
    found = groups(2, limit_s=0.2)
    with pytest.raises(RanksLost, match="rank 1 has not come to sum 1 of step 0"):
        found[0].add_sum(torch.zeros(1, 4), torch.zeros(1, 4))
    with pytest.raises(RanksLost):
        found[1].take()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stream_of_other_bits_is_found_at_the_next_sum(dtype: torch.dtype) -> None:
    found, odd = groups(3, is_checked=True), random.randrange(3)
    parts = torch.randn(3, 7, 72)
    residual = torch.randn(7, 72).to(dtype)

    def work(group: SharedGroup) -> str:
        try:
            for number in range(6):
                own = residual.clone()
                if (number, group.rank) == (4, odd):
                    own[random.randrange(7), random.randrange(72)] += 8.0
                group.add_sum(parts[group.rank], own)
        except RanksLost as lost:
            return str(lost)
        return ""

    said = on_all(found, work)
    differs = f"rank {odd} has another stream than rank [0-2] before sum 6 of step 0"
    if odd == 0:
        differs = "rank [0-2] has another stream than rank [0-2] before sum 6 of step 0"
    assert all("sum 6" in text or "before" in text for text in said), said
    assert any(re.match(differs, text) for text in said), said


def test_a_rank_that_waits_for_a_frame_ends_with_the_group() -> None:
    found = groups(2)
    timer = threading.Timer(random.uniform(0.0, 0.03), found[0].stop)
    timer.start()
    with pytest.raises(RanksLost, match="before a step"):
        found[1].take()
    timer.join()


def random_step() -> tuple[StepInput, NewPages]:
    numbers = np.random.default_rng(random.randrange(1 << 30))

    def some(count: int) -> Any:
        return numbers.integers(-1, 1 << 40, count)

    count = random.randrange(1, 40)
    max_starts = some(count)
    writes, table = numbers.integers(0, 99, (3, 4)), numbers.integers(0, 99, (count, 3))
    states = StateRows(some(count), some(count), writes, random.randrange(9), table)
    step = StepInput(
        slots=numbers.integers(0, 8, count),
        starts=random.choice((max_starts, some(count))),
        max_starts=max_starts,
        counts=some(count),
        num_decodes=random.randrange(9),
        num_verified=random.randrange(9),
        draws=some(random.randrange(5)),
        recomputed_rows=some(random.randrange(5)),
        tokens=some(random.choice((0, 3, 90_000))),
        ancestor_masks=random.choice((None, some(4))),
        has_trees=random.random() < 0.5,
        draft_limits=random.choice((None, some(count))),
        pages=random.choice((None, some(count))),
        states=random.choice((None, states)),
        adapters=random.choice((None, numbers.integers(0, 9, count).astype(np.int32))),
        scores=[ScoredRows(1, 2, 0, [5, 6, 7]), ScoredRows(3, 0, 1, [])][: random.randrange(3)],
        inserted=random.choice(
            (None, InsertedRows(some(5), some(5)), InsertedRows(some(5), some(5), some(5)))
        ),
        turned=random.choice((None, TurnedRows(some(4), some(12).reshape(4, 3)))),
    )
    if random.random() < 0.5:
        return step, NO_PAGES
    slots = numbers.permutation(8)[:3]
    firsts, counts = numbers.integers(0, 4, 3), numbers.integers(1, 5, 3)
    return step, NewPages(slots, firsts, firsts + counts, numbers.integers(1, 99, counts.sum()))


def test_frames_come_as_they_were_sent_however_long_they_are() -> None:
    found, sent = groups(3), [random_step() for _ in range(30)]
    tokens = np.arange(50)

    def work(group: SharedGroup) -> list[Int64Array]:
        if group.rank:
            return [group.take() for _ in range(len(sent) + 1)]
        for step, pages in sent:
            group.post(encode_step(step, pages))
        group.post(encode_tokens(tokens))
        return []

    for frames in on_all(found, work)[1:]:
        *steps, last = map(decode, frames)
        for (step, pages), came in zip(sent, steps, strict=True):
            assert isinstance(came, Step)
            assert (came.step.starts is came.step.max_starts) == (step.starts is step.max_starts)
            for field in fields(StepInput):
                right, got = getattr(step, field.name), getattr(came.step, field.name)
                if field.name == "states" and right is not None:
                    got, right = list(got), list(right)
                np.testing.assert_equal(got, right)
                assert getattr(got, "dtype", None) == getattr(right, "dtype", None)
            assert len(came.pages.slots) == len(pages.slots)
            table = PageTable(8, 10, keeps_changes=False)
            came.pages.enter(table)
            begin = 0
            for slot, first, end in zip(*pages[:3], strict=True):
                assert table.num_pages[slot] == end
                own = pages.pages[begin : (begin := begin + end - first)]
                assert table.pages[slot, first:end].tolist() == own.tolist()
        assert isinstance(last, Tokens)
        assert last.tokens.tolist() == tokens.tolist()


class Dump(NamedTuple):
    """An order with a text; one without fields is `Nap`."""

    path: str
    layers: Sequence[int]
    is_full: bool


class Nap(NamedTuple):
    pass


def random_field(of: object) -> object:
    number = random.randrange(1 << 40)
    if of is str:
        return "".join(random.choices("/aé漢", k=number % 7))
    if of is bytes:
        return random.randbytes(number % 9)
    return {int: number, bool: number % 2 == 0}.get(
        of,  # type: ignore[call-overload]
        [random.randrange(1000) for _ in range(number % 9)],
    )


@pytest.mark.parametrize("kind", [*get_args(Order), Dump, Nap])
def test_an_order_comes_as_it_was_sent(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_KINDS", (*get_args(Order), Dump, Nap))
    sent = kind(*map(random_field, get_type_hints(kind).values()))
    came = decode(np.concatenate(frame_of_order(sent)))
    assert type(came) is kind
    assert came == sent
    assert list(map(type, came)) == list(map(type, sent))


class Counting(RandomWeights):
    """Counts the numbers that are read."""

    count = 0

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        self.count += out.numel()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "whole experts"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_footprint_is_what_a_rank_reads(kind: str, size: int) -> None:
    fields: dict[str, Any] = {"num_attention_heads": 8, "attention_bias": kind == "llama"}
    ep = size if kind == "whole experts" else 1
    if kind == "whole experts":
        kind, fields = "qwen3_moe", {**fields, "num_experts": 8, "moe_intermediate_size": 43}
    config = ModelConfig.from_dict(tiny_config(kind, **fields))
    for rank in range(size):
        reader = Counting(CPU)
        share = ModelShare(peers=SimpleNamespace(rank=rank, size=size), ep=ep)
        weights = Weights(reader, PlainScheme(), torch.float32, CPU, share=share)
        model = class_of(config)(config, weights)
        found = footprint_of_rank(config, size, ep)
        assert found.weights == reader.count
    if size == 1:
        layout = model.kv_layout(16)
        assert found.kv * 16 * 4 == layout.page_bytes


MODELS: dict[str, dict[str, Any]] = {
    # hidden, layers, heads, KV heads, inner, vocabulary
    "Mistral-7B": {"kind": "mistral", "sizes": (4096, 32, 32, 8, 14336, 32768)},
    "Llama-3.1-8B": {"kind": "llama", "sizes": (4096, 32, 32, 8, 14336, 128256)},
    "Llama-3.3-70B": {"kind": "llama", "sizes": (8192, 80, 64, 8, 28672, 128256)},
    "Llama-3.1-405B": {"kind": "llama", "sizes": (16384, 126, 128, 8, 53248, 128256)},
    "Qwen2.5-7B": {"kind": "qwen2", "sizes": (3584, 28, 28, 4, 18944, 152064)},
    "Qwen2.5-72B": {"kind": "qwen2", "sizes": (8192, 80, 64, 8, 29568, 152064)},
    "Qwen3-8B": {"kind": "qwen3", "sizes": (4096, 36, 32, 8, 12288, 151936)},
    "Qwen3-32B": {"kind": "qwen3", "sizes": (5120, 64, 64, 8, 25600, 151936)},
    "Qwen3-30B-A3B": {"kind": "qwen3_moe", "sizes": (2048, 48, 32, 4, 768, 151936)},
    "Qwen3-235B-A22B": {"kind": "qwen3_moe", "sizes": (4096, 94, 64, 4, 1536, 151936)},
}
ROW = re.compile(r"\| (?P<name>[A-Z][\w.-]+) \| (?P<cells>[\d., |-]+) \|")


def config_of(kind: str, sizes: tuple[int, ...]) -> ModelConfig:
    hidden, layers, heads, kv_heads, inner, vocabulary = sizes
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": inner}
    return ModelConfig.from_dict(
        tiny_config(
            kind,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=128,
            intermediate_size=inner,
            vocab_size=vocabulary,
            **(experts if kind == "qwen3_moe" else {}),
        )
    )


def test_the_documented_memory_of_well_known_models_is_that_arithmetic() -> None:
    rows = {m["name"]: m["cells"] for m in ROW.finditer(DOCS.read_text())}
    assert set(rows) == set(MODELS)
    for name, model in MODELS.items():
        cells = [cell.strip() for cell in rows[name].split("|")]
        config = config_of(model["kind"], model["sizes"])
        for cell, size in zip(cells, (1, 2, 4, 8), strict=True):
            found = footprint_of_rank(config, size) if config.num_heads % size == 0 else None
            right = "-"
            if found is not None:
                right = f"{2 * found.weights / 1e9:.1f}, {2 * found.kv / 1024:.0f}"
            assert cell == right, (name, size, right)
