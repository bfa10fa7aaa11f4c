"""Padded steps against the same steps without padding."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from weft.checkpoint.latent_config import LatentConfig
from weft.engine.executor import graphs
from weft.engine.executor.encodings import ALL_BEFORE, StepArrays
from weft.engine.executor.graphs import (
    MAX_RAGGED_TOKENS,
    GraphBucket,
    GraphBuckets,
    decode_buckets,
    ragged_buckets,
    step_buckets,
)
from weft.engine.executor.ragged_columns import RaggedColumns
from weft.engine.model.heads.drafted import DraftedModel, load_drafted
from weft.engine.model.loader import load_model
from weft.engine.model.step import Step
from weft.kernels.ops.attention import library_flash as flash_attention
from weft.kernels.ops.attention.spec import MAX_TREE_ROWS, AttentionMetadata
from weft.kernels.shared import cpu
from weft.testing.draws import MAX_DRAWS
from weft.testing.kernels.near_ties import CLEAR, noting_gaps
from weft.testing.kernels.tree_cases import path_to, random_parents, words_of
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

PAGE_SIZE, PAGES_EACH = 4, 10
VOCAB = 517


def make_arrays(table: np.ndarray, q_lens: list[int], kv_lens: list[int]) -> StepArrays:
    """A step of random tokens; request r has row r of `table`."""
    starts = np.array(kv_lens) - q_lens
    positions = np.concatenate([np.arange(b, e) for b, e in zip(starts, kv_lens, strict=True)])
    owner = np.repeat(np.arange(len(q_lens)), q_lens)
    slots = table[owner, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE
    ends = np.cumsum(q_lens)
    return StepArrays(
        token_ids=np.array([random.randrange(VOCAB) for _ in owner]),
        positions=positions,
        places=slots + positions % PAGE_SIZE,
        slots=np.arange(len(q_lens)),
        cu_q_lens=np.concatenate([[0], ends]).astype(np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        logits_rows=np.array(random.sample(list(ends - 1), random.randint(1, len(ends)))),
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
    )


def with_trees(arrays: StepArrays, places: list[int]) -> RaggedColumns:
    """Makes trees of what some requests bring; a layout with room for `places` more."""
    arrays.ancestors = np.full(len(arrays.token_ids), ALL_BEFORE)
    for begin, end in zip(arrays.cu_q_lens, arrays.cu_q_lens[1:], strict=False):
        if end - begin <= MAX_TREE_ROWS and random.random() < 0.8:
            parents = random_parents(int(end - begin))
            arrays.ancestors[begin:end] = words_of(parents)
            depths = [len(path_to(parents, row)) - 1 for row in range(len(parents))]
            arrays.positions[begin:end] = arrays.positions[begin] + depths
    tokens, count = len(arrays.token_ids), len(arrays.slots)
    return RaggedColumns(tokens + places[0], count + places[1], count + places[2], has_trees=True)


def batch_of(columns: RaggedColumns, arrays: StepArrays, table: np.ndarray) -> Step:
    """Laid out in memory that holds another step's numbers, then read back."""
    host = np.random.randint(0, 255, columns.num_bytes).astype(np.uint8)
    columns.write(host, arrays, len(table) - 1, PAGE_SIZE)
    flat = torch.from_numpy(host)
    views = columns.views(flat)
    group = AttentionMetadata(
        page_table=torch.from_numpy(table).index_select(0, views.rows),
        places=views.slots,
        cu_q_lens=views.cu_q_lens,
        kv_lens=views.kv_lens,
        max_q_len=columns.num_tokens,
        max_kv_len=PAGES_EACH * PAGE_SIZE,
        ancestors=views.ancestors,
    )
    return Step(
        token_ids=views.token_ids,
        positions=views.positions,
        groups=(group,),
        logits_rows=views.logits_rows,
        slots=views.rows,
    )


@torch.inference_mode()
@pytest.mark.parametrize(("has_draft", "has_trees"), [(False, False), (True, False), (False, True)])
def test_padding_changes_nothing(
    has_draft: bool, has_trees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The native operations refuse rows of no request; only a GPU's graphs bring such rows.
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    kind = random.choice(["llama", "qwen3", "qwen3_moe"])
    path = make_tiny(kind, tmp_path / "model", random.randrange(10**6))
    loaded = load_model(path, "float32", "cpu")
    for count in (1, 3, 6):
        model = loaded.model
        if has_draft:
            model = load_drafted(loaded, make_tiny_draft(tmp_path / "draft", path), count, 512)
        pages = np.random.permutation(np.arange(1, 1 + count * PAGES_EACH)).astype(np.int32)
        # The last row is that of no request.
        table = np.concatenate([pages.reshape(count, -1), np.zeros((1, PAGES_EACH), np.int32)])
        shape = model.kv_layout(PAGE_SIZE).pool_shape(1 + count * PAGES_EACH)
        # Where two experts score nearly alike, rounding decides between them: draw anew.
        for _ in range(MAX_DRAWS):
            kept = model.kept.normal_().clone() if isinstance(model, DraftedModel) else None
            kv_lens = [random.randint(1, PAGES_EACH * PAGE_SIZE) for _ in range(count)]
            q_lens = [random.choice([1, random.randint(1, kv_len)]) for kv_len in kv_lens]
            arrays = make_arrays(table, q_lens, kv_lens)
            pool = torch.randn(shape)
            padded_pool = pool.clone()
            tokens = sum(q_lens)
            columns = RaggedColumns(tokens, count, count)
            if has_trees:
                columns = with_trees(arrays, [0, 0, 0])
            with noting_gaps() as gaps:
                exact = model.forward(batch_of(columns, arrays, table), pool)
            if min(gaps, default=1.0) > CLEAR:
                break
        else:
            pytest.fail(f"none of {MAX_DRAWS} steps has clear choices")
        if isinstance(model, DraftedModel):
            kept, model.kept = model.kept, kept
        more = [random.randint(0, 9), random.randint(1, 4), random.randint(0, 5)]
        columns = RaggedColumns(tokens + more[0], count + more[1], count + more[2], 1, has_trees)
        padded = model.forward(batch_of(columns, arrays, table), padded_pool)
        if isinstance(model, DraftedModel):
            torch.testing.assert_close(model.kept[:-1], kept[:-1])
        wanted = len(arrays.logits_rows)
        torch.testing.assert_close(padded[:wanted], exact[:wanted])
        torch.testing.assert_close(padded_pool[1:], pool[1:])


def test_every_step_up_to_the_largest_has_a_bucket() -> None:
    for max_requests, max_tokens in ((1, 16), (6, 96), (256, 8192), (300, 512)):
        buckets = ragged_buckets(max_requests, max_tokens)
        assert len(set(buckets)) == len(buckets)
        assert max(buckets) == GraphBucket(
            min(max_tokens, MAX_RAGGED_TOKENS), max_requests, "ragged"
        )
        assert decode_buckets(max_requests)[-1] == GraphBucket(max_requests, max_requests, "decode")
        waste = [b.tokens / a.tokens for a, b in zip(buckets, buckets[2:], strict=False)]
        assert max(waste, default=1) <= 2


def test_steps_have_room_for_their_prompts(tmp_path: Path) -> None:
    config = load_model(make_tiny("llama", tmp_path, 1), "float32", "cpu").config
    buckets = GraphBuckets(config, step_buckets(config, torch.bfloat16, 64, 2048))
    for _ in range(100):
        decodes, prompts = random.randrange(64), random.randint(1, 64)
        lens = [1] * min(decodes, 64 - prompts) + [random.randint(2, 20) for _ in range(prompts)]
        arrays = make_arrays(np.zeros((len(lens), PAGES_EACH), np.int32), lens, lens)
        assert arrays.first_several == len(lens) - prompts
        bucket = buckets.of(arrays)
        assert bucket is not None
        assert bucket.tokens >= sum(lens)
        assert bucket.columns.max_several >= prompts
        host = np.zeros(bucket.columns.num_bytes, np.uint8)
        bucket.columns.write(host, arrays, 0, PAGE_SIZE)
        first = bucket.columns.views(torch.from_numpy(host)).first_several
        assert first is not None
        assert first.tolist() == [arrays.first_several]


def test_few_rows_of_one_request_have_graphs_of_their_own(tmp_path: Path) -> None:
    config = load_model(make_tiny("llama", tmp_path, 1), "float32", "cpu").config
    sizes = step_buckets(config, torch.bfloat16, 64, 128, has_lora=True)
    buckets = GraphBuckets(config, sizes)
    table = np.zeros((3, PAGES_EACH), np.int32)
    for q_lens, bound in (([2], 1), ([32], 1), ([33], 8), ([16, 16], 8)):
        arrays = make_arrays(table, q_lens, [4 + rows for rows in q_lens])
        for slots in (None, np.zeros(sum(q_lens), np.int32)):
            arrays.adapter_slots = slots
            bucket = buckets.of(arrays)
            assert bucket in sizes
            assert bucket is not None
            assert (bucket.requests, bucket.has_lora) == (bound, slots is not None)


def test_media_beside_other_requests_have_graphs_of_their_own(tmp_path: Path) -> None:
    config = load_model(make_tiny("llama", tmp_path, 1), "float32", "cpu").config
    sizes = step_buckets(config, torch.bfloat16, 64, 1024, has_lora=True, has_media=True)
    buckets = GraphBuckets(config, sizes)
    table = np.zeros((65, 1024 // PAGE_SIZE), np.int32)
    for num_decodes in (1, random.randint(2, 62), 63):
        rows = random.randint(1, 1024 - num_decodes)
        q_lens = [*[1] * num_decodes, rows]
        arrays = make_arrays(table, q_lens, q_lens)
        bucket = buckets.of_media(arrays)
        assert bucket in sizes
        assert bucket is not None
        assert bucket.kind == "media"
        assert bucket.tokens >= num_decodes + rows
        usual = buckets.of(arrays)
        assert usual is not None
        assert usual.kind != "media"
        assert buckets.of_media(replace(arrays, adapter_slots=np.zeros(1, np.int32))) is None
    for q_lens in ([600], [1, 1024], [1] * 64 + [200]):
        assert buckets.of_media(make_arrays(table, q_lens, q_lens)) is None
    plain = step_buckets(config, torch.bfloat16, 64, 1024, has_lora=True)
    assert not any(bucket.kind == "media" for bucket in plain)


@pytest.mark.parametrize(
    ("kind", "window", "is_cold"),
    [("mistral", 3072, True), ("mistral", 3071, False), ("qwen2", 3071, True)],
)
def test_a_long_cold_prompt_within_windows_has_no_graph_of_its_own(
    kind: str, window: int, is_cold: bool, tmp_path: Path
) -> None:
    """The attention that it would be for knows none; in Qwen2 the first layer has none."""
    sizes = {"head_dim": 128, "num_attention_heads": 64, "max_position_embeddings": 4096}
    windows = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 1}
    config = load_model(make_tiny(kind, tmp_path, 1, **sizes, **windows), "float32", "cpu").config
    buckets = GraphBuckets(config, step_buckets(config, torch.bfloat16, 8, 4096))
    arrays = make_arrays(np.zeros((1, 3072 // PAGE_SIZE), np.int32), [3072], [3072])
    bucket = buckets.of(arrays)
    assert bucket is not None
    assert bucket.kind == ("cold" if is_cold else "ragged")


@pytest.mark.parametrize("has_heads", [True, False])
def test_chunks_of_latents_behind_many_positions_have_no_graph(
    has_heads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where their rows are many enough for heads of those positions, which a graph cannot count,
    and the heads have sizes for that (those of MiniCPM 3 have not).
    """
    monkeypatch.setattr(flash_attention, "supports", lambda dtype, dim, tokens: tokens >= 2048)
    config = load_model(make_tiny("llama", tmp_path, 1), "float32", "cpu").config
    nope_dim, rope_dim, value_dim = (128, 64, 128) if has_heads else (64, 32, 64)
    sizes = LatentConfig(
        q_rank=None, kv_rank=32, nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim
    )
    config = replace(config, latent=sizes, head_dim=nope_dim + rope_dim)
    buckets = GraphBuckets(config, step_buckets(config, torch.bfloat16, 8, 4096))
    table = np.zeros((3, 8192 // PAGE_SIZE), np.int32)
    for q_lens, kv_lens, kind in (
        ([1, 2100], [4000, 2100], "prompts"),
        ([1, 2100, 40], [4000, 6000, 40], None),
        ([1, 1500], [4000, 6000], "ragged"),
        ([1, 2100, 40], [4000, 2100, 8000], "ragged"),
    ):
        arrays = make_arrays(table, q_lens, kv_lens)
        bucket = buckets.of(arrays)
        assert (bucket and bucket.kind) == (kind if has_heads else "ragged")
        own = [(kv - q) * (q > 1) for q, kv in zip(q_lens, kv_lens, strict=True)]
        if kind is None:
            assert arrays.num_earlier == sum(own)
            # The host does not know where a request with drafts begins.
            arrays.owners = np.array([1])
        assert kind == "ragged" or arrays.num_earlier is None


def test_prompts_with_adapters_have_no_graph_that_reads_rows_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an adapter makes of its own rows may be infinite, and stays among them."""
    monkeypatch.setattr(graphs, "is_faster_when_cold", lambda dtype, dim, tokens: tokens >= 48)
    config = load_model(make_tiny("llama", tmp_path, 1), "float32", "cpu").config
    sizes = step_buckets(config, torch.bfloat16, 8, 128, has_lora=True)
    buckets = GraphBuckets(config, sizes)
    table = np.zeros((3, PAGES_EACH), np.int32)
    for q_lens, kv_lens, kind in (
        ([1, 20, 30], [9, 20, 30], "prompts"),
        ([1, 20, 30], [9, 20, 31], "ragged"),
        ([1, 3, 20], [9, 3, 20], "ragged"),
    ):
        arrays = make_arrays(table, q_lens, kv_lens)
        bucket = buckets.of(arrays)
        assert bucket is not None
        assert (bucket.kind, bucket.has_lora) == (kind, False)
        arrays.adapter_slots = np.zeros(sum(q_lens), np.int32)
        assert buckets.of(arrays) == bucket._replace(kind="ragged", has_lora=True)
        assert buckets.of(arrays) in sizes


@pytest.mark.parametrize("max_requests", [1, 8, 64, 256])
def test_steps_with_drafts_have_buckets(max_requests: int, tmp_path: Path) -> None:
    """All rows of a request with drafts want logits, whatever else a step brings."""
    config = load_model(make_tiny("llama", tmp_path, 1), "float32", "cpu").config
    max_drafts = 5
    buckets = GraphBuckets(
        config, step_buckets(config, torch.bfloat16, max_requests, 4096, max_drafts=max_drafts)
    )
    table = np.zeros((max_requests, PAGES_EACH), np.int32)
    for requests in sorted({1, min(8, max_requests), max_requests}):
        for drafts in range(1, 1 + max_drafts):
            q_lens = [1 + drafts] * requests
            arrays = make_arrays(table, q_lens, [20] * requests)
            arrays.logits_rows = np.arange(sum(q_lens))
            arrays.verify_rows = arrays.logits_rows.reshape(requests, 1 + drafts)
            bucket = buckets.of(arrays)
            assert bucket is not None
            assert bucket.kind == "verify"
            assert sum(q_lens) <= bucket.tokens < 2 * sum(q_lens) or requests == 1
            assert bucket.requests >= requests
            assert bucket.drafts >= drafts
            assert bucket.columns.max_logits >= sum(q_lens)
        for length in (1, 3, 30) if requests > 1 else ():
            # One of them is a prompt, be it short.
            prompt = make_arrays(table, [*q_lens[1:], length], [*([20] * (requests - 1)), 40])
            prompt.logits_rows = np.arange(sum(q_lens[1:]) + 1)
            prompt.verify_rows = np.arange(sum(q_lens[1:])).reshape(requests - 1, -1)
            bucket = buckets.of(prompt)
            assert bucket is not None
            assert bucket.kind == "ragged"
            assert bucket.requests >= requests
            assert bucket.columns.max_logits >= len(prompt.logits_rows)
    plain = GraphBuckets(config, step_buckets(config, torch.bfloat16, max_requests, 4096))
    arrays = make_arrays(table, [2] * max_requests, [20] * max_requests)
    arrays.logits_rows = np.arange(2 * max_requests)
    arrays.verify_rows = arrays.logits_rows.reshape(max_requests, 2)
    assert plain.of(arrays) is None


@pytest.mark.parametrize("max_requests", [1, 3, 64])
def test_steps_with_trees_have_buckets_where_they_are_asked_for(
    max_requests: int, tmp_path: Path
) -> None:
    config = load_model(make_tiny("llama", tmp_path, 1), "float32", "cpu").config
    without = step_buckets(config, torch.bfloat16, max_requests, 512, max_drafts=31)
    buckets = step_buckets(
        config, torch.bfloat16, max_requests, 512, max_drafts=31, tree_rows=(8, 32)
    )
    assert [bucket for bucket in buckets if bucket.kind != "tree"] == without
    found, table = GraphBuckets(config, buckets), np.zeros((max_requests, PAGES_EACH), np.int32)
    for requests in (1, 2, 3, 4, 5):
        for rows in (2, 8, 9, 32):
            if requests > max_requests:
                continue
            arrays = make_arrays(table, [rows] * requests, [40] * requests)
            arrays.logits_rows = np.arange(rows * requests)
            chain = found.of(arrays)
            assert chain is not None
            assert not chain.columns.has_trees
            arrays.ancestors = np.full(rows * requests, ALL_BEFORE)
            bucket = found.of(arrays)
            assert (bucket is not None) == (requests <= 4)
            if bucket is not None:
                assert bucket.columns.has_trees
                assert bucket.drafts + 1 == (8 if rows <= 8 else 32)
                assert bucket.requests in (requests, requests + 1)
                assert bucket.columns.max_logits == bucket.tokens >= rows * requests


def test_requests_that_may_bring_several_rows_begin_at_one_that_exists() -> None:
    """Where engines share steps, one of decodes alone may take a graph for prompts."""
    table = np.arange(1, 41).reshape(4, 10)
    for q_lens, first in (([1, 1, 1, 1], 3), ([1, 1, 1], 3), ([1, 5, 1], 1)):
        arrays = make_arrays(table, q_lens, [length + 4 for length in q_lens])
        columns = RaggedColumns(16, 4, 4)
        host = np.zeros(columns.num_bytes, np.uint8)
        columns.write(host, arrays, 4, PAGE_SIZE)
        several = columns.views(torch.from_numpy(host)).first_several
        assert several is not None
        assert several.tolist() == [first]


def test_engines_share_a_bucket_that_has_room_for_the_steps_of_each(tmp_path: Path) -> None:
    config = load_model(make_tiny("llama", tmp_path / "tiny", 0)).config
    listed = step_buckets(config, torch.bfloat16, 40, 700, max_drafts=3)
    buckets = GraphBuckets(config, listed)
    assert buckets.sizes == sorted(bucket for bucket in listed if not bucket.has_lora)
    some = [bucket.plain for bucket in buckets.sizes]
    decodes = [bucket for bucket in some if bucket.kind == "decode"]
    for _ in range(300):
        wanted = random.choices(some, k=random.randint(1, 4))
        found = buckets.common(wanted)
        assert found == buckets.common([*wanted, wanted[0]])
        assert found is not None
        for bucket in wanted:
            assert found.tokens >= bucket.tokens
            assert found.requests >= bucket.requests
            assert found.columns.max_logits >= bucket.columns.max_logits
            if bucket.kind in ("ragged", "verify"):
                assert found.columns.max_several >= bucket.columns.max_several
        assert found.kind == "ragged" or set(wanted) == {found} or found in decodes
    assert buckets.common(decodes) == decodes[-1]
    verify = random.choice([bucket for bucket in some if bucket.kind == "verify"])
    assert buckets.common([verify, verify]) == verify


def test_a_step_takes_the_bucket_that_was_agreed_on(tmp_path: Path) -> None:
    config = load_model(make_tiny("llama", tmp_path / "tiny", 0)).config
    buckets = GraphBuckets(config, step_buckets(config, torch.float32, 40, 700))
    table = np.arange(1, 31).reshape(3, 10)
    arrays = make_arrays(table, [1, 9, 5], [7, 9, 5])
    own = buckets.of(arrays)
    assert own is not None
    for agreed in (None, *(b for b in buckets.sizes if b.kind == "ragged" and b.tokens > 64)):
        with buckets.agreed(agreed):
            found = buckets.of(arrays)
            assert found is None if agreed is None else found is not None
            assert found is None or found.plain == agreed
            adapted = buckets.of(replace(arrays, adapter_slots=np.zeros(15, np.int32)))
            assert adapted == (agreed and agreed._replace(has_lora=True))
    assert buckets.of(arrays) == own
