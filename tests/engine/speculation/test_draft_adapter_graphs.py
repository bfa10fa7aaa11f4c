"""Draft adapters where drafts are captured: rows of adapter memory, one graph for any mix."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from weft.checkpoint.adapters.files import DRAFT_FOLDER, AdapterFiles, TensorEntry
from weft.checkpoint.eagle3_config import Eagle3Config
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.config import EngineConfig
from weft.engine.base.drafts import tree_shapes
from weft.engine.executor.adapter_rows import LoraPool
from weft.engine.executor.drafts.draft_rows import DraftAdapterFiles
from weft.engine.loop import build as parts
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.model.heads.eagle3 import Eagle3Head, adaptable_shapes
from weft.testing.engine.captured_drafts import capture_chains, capture_trees, num_replays
from weft.testing.engine.draft_adapter_cases import PAGE, VOCAB, DraftAdapterCase, random_prompts
from weft.testing.engine.drafters import KnownDrafter
from weft.testing.engine.eagle3_cases import WatchedHead
from weft.testing.engine.tree_drafters import TreeDrafter, WatchedTrees
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import DRAFT_RANK, make_draft_adapter

pytestmark = pytest.mark.usefixtures("single_thread")

GREEDY = SamplingParams(temperature=0.0)
STOP = StopCriteria(max_tokens=2 * PAGE, ignore_eos=True)


@pytest.fixture
def case(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> DraftAdapterCase:
    """On a CPU adapter memory has no rows for the head; here it has them as on a GPU."""

    def brought(
        config: EngineConfig, drafted: DraftedModel | None, device: torch.device
    ) -> DraftAdapterFiles | None:
        if drafted is None:
            return None
        assert isinstance(drafted.head, Eagle3Head)
        return DraftAdapterFiles(adaptable_shapes(drafted.head.config))

    monkeypatch.setattr(parts, "draft_adapters", brought)
    return DraftAdapterCase(tmp_path, seed)


def pool_of(engine: Engine) -> LoraPool:
    pool = engine.parts.local._lora
    assert pool is not None
    return pool


@pytest.mark.parametrize("width", [1, 3], ids=["chains", "trees"])
def test_a_graph_drafts_for_any_mix_of_adapters(case: DraftAdapterCase, width: int) -> None:
    """Adapters lose their places to others; the text is what it is without drafts."""
    prompts = random_prompts(12)
    names = ["", *(str(adapter) for adapter in case.adapters)] * 3
    with case.llm() as plain:
        digests = {"": b""} | {str(path): plain.load_adapter(path) for path in case.adapters}
        adapters = [digests[name] for name in names]
        expected = [s.token_ids for s in plain.generate(prompts, GREEDY, STOP, adapters=adapters)]
    texts = {(tuple(p), GREEDY.seed): p + e for p, e in zip(prompts, expected, strict=True)}
    watched: WatchedHead | WatchedTrees
    with case.drafting(draft_width=width) as drafting:
        engine, shapes = drafting.engine, tree_shapes(width)
        graphs = capture_chains(engine, 5) if width == 1 else capture_trees(engine, shapes, 4)
        for path in case.adapters:
            drafting.load_adapter(path)
        if width == 1:
            watched = WatchedHead(engine, KnownDrafter(texts, VOCAB, 0.6))
        else:
            watched = WatchedTrees(engine, TreeDrafter(texts, VOCAB, 0.6), shapes)
        for _ in range(2):  # The second time on a warm cache.
            samples = drafting.generate(prompts, GREEDY, STOP, adapters=adapters)
            assert [sample.token_ids for sample in samples] == expected
        assert num_replays(graphs, has_lora=True) > 10
        before = [num_replays(graphs, has_lora=has_lora) for has_lora in (False, True)]
        drafting.generate(prompts[::4], GREEDY, STOP)
        after = [num_replays(graphs, has_lora=has_lora) for has_lora in (False, True)]
        assert after[0] > before[0]
        assert after[1] == before[1]
    case.check(watched, dict(zip(map(tuple, prompts), names, strict=True)))


def test_what_does_not_fit_is_left_out(
    case: DraftAdapterCase, caplog: pytest.LogCaptureFixture
) -> None:
    """The adapter itself is served, and others have its slot after it."""
    file = case.adapters[0] / DRAFT_FOLDER / "adapter_model.safetensors"
    name = "base_model.model.midlayer.mlp.up_proj.lora_B.weight"
    save_file({**load_file(file), name: torch.zeros(5, DRAFT_RANK)}, file)
    with case.drafting(max_loras=1) as drafting:
        for index, is_there in ((0, False), (2, True), (1, False)):
            digest = drafting.load_adapter(case.adapters[index])
            drafting.generate(random_prompts(3), GREEDY, STOP, adapters=[digest] * 3)
            assert pool_of(drafting.engine).has_drafts.tolist() == [False, is_there]
    assert "up_proj" in caplog.text


def test_a_rank_that_there_is_no_room_for_is_left_out(
    case: DraftAdapterCase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_adapter(tmp_path / "small", case.config, 5, rank=2)
    make_draft_adapter(path / DRAFT_FOLDER, case.draft_dir, 5)
    for most, is_there in ((DRAFT_RANK - 1, False), (DRAFT_RANK, True)):
        with case.drafting(max_lora_rank=most) as drafting:
            digest = drafting.load_adapter(path)
            drafting.generate(random_prompts(1), GREEDY, STOP, adapters=[digest])
            assert pool_of(drafting.engine).has_drafts.any() == is_there
            adapters = drafting.engine.parts.adapters
            assert adapters is not None
            assert [state.rank for state in adapters.states()] == [2]
    assert f"rank {DRAFT_RANK}, at most {DRAFT_RANK - 1}" in caplog.text


def brings(llm: LLM, adapters: list[bytes]) -> list[bool]:
    """Of adapters on the device, by slot, after requests with these: it brought drafts."""
    llm.generate(random_prompts(len(adapters)), GREEDY, STOP, adapters=adapters)
    return [bool(there) for there in pool_of(llm.engine).has_drafts[1:]]


@pytest.fixture
def small(case: DraftAdapterCase, tmp_path: Path) -> Path:
    """An adapter of one row of each kind, without drafts."""
    return make_adapter(tmp_path / "small", case.config, 5, rank=8)


def test_what_is_left_out_for_its_rank_is_not_read(
    case: DraftAdapterCase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Adapters wait for it: a large one would hold up all of them."""
    shapes = adaptable_shapes(Eagle3Config.load(case.draft_dir))
    files = DraftAdapterFiles(shapes)
    folder = make_draft_adapter(tmp_path / "draft", case.draft_dir, 5, rank=64)
    reads: list[int] = []
    read = AdapterFiles.read

    def watched(self: AdapterFiles, entry: TensorEntry) -> bytearray:
        reads.append(entry.end - entry.start)
        return read(self, entry)

    monkeypatch.setattr(AdapterFiles, "read", watched)
    assert not files.read(folder, 63)
    assert not reads
    assert "rank 64, at most 63" in caplog.text
    with FlopCounterMode(display=False) as counter:
        pairs = files.read(folder, 64)
    assert {pair.rank for pair in pairs.values()} == {64}
    assert len(reads) == 2 * len(shapes)
    assert counter.get_total_flops() == 0, "products are for whoever needs them"


def test_drafts_on_a_bad_disk_are_left_out(
    case: DraftAdapterCase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    files = DraftAdapterFiles(adaptable_shapes(Eagle3Config.load(case.draft_dir)))
    folder = case.adapters[0] / DRAFT_FOLDER
    assert files.read(folder, DRAFT_RANK)
    monkeypatch.setattr(os, "preadv", fails)
    assert not files.read(folder, DRAFT_RANK)
    assert "Input/output error" in caplog.text


@pytest.mark.parametrize("is_pinned", [False, True], ids=["used", "pinned"])
def test_drafts_take_no_place_from_adapters(
    case: DraftAdapterCase, tmp_path: Path, small: Path, is_pinned: bool
) -> None:
    """As many are on the device at once as without drafts, which are of a larger rank here."""
    with case.drafting(max_loras=4) as drafting:
        digests = []
        for index in range(4):
            path = make_adapter(tmp_path / f"b{index}", case.config, 20 + index, rank=8)
            make_draft_adapter(path / DRAFT_FOLDER, case.draft_dir, index, rank=32)
            digests.append(drafting.load_adapter(path, is_pinned=is_pinned and index < 3))
        assert brings(drafting, digests) == [True] * 4
        if not is_pinned:
            return
        assert any(brings(drafting, [drafting.load_adapter(small)]))
        assert brings(drafting, digests) == [True] * 4


def test_memory_for_adapters_is_theirs_alone(
    case: DraftAdapterCase, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What holds one row of each kind without a head does with it; a part for drafts is beside."""
    with case.llm() as plain:
        before = pool_of(plain.engine).limits
        unit = before.memory_bytes // 4  # Two adapters of rank 16.
        text = plain.generate([[5, 6, 7]], GREEDY, STOP, adapters=[plain.load_adapter(small)])
    for rank, is_there in ((32, True), (33, False)):
        shutil.rmtree(small / DRAFT_FOLDER, ignore_errors=True)
        make_draft_adapter(small / DRAFT_FOLDER, case.draft_dir, 5, rank=rank)
        with case.drafting(lora_memory_bytes=unit) as drafting:
            digest = drafting.load_adapter(small)
            found = drafting.generate([[5, 6, 7]], GREEDY, STOP, adapters=[digest])
            assert [sample.token_ids for sample in found] == [s.token_ids for s in text]
            pool = pool_of(drafting.engine)
            assert pool.has_drafts.any() == is_there
            own = {kind: pool.limits.num_rows[kind] for kind in before.num_rows}
            assert own == {kind: count // 4 for kind, count in before.num_rows.items()}
    assert "rank 33, at most 32" in caplog.text


def own_bytes(case: DraftAdapterCase, adapter: Path) -> int:
    """Of an adapter in host memory, without drafts."""
    with case.llm() as plain:
        plain.load_adapter(adapter)
        adapters = plain.engine.parts.adapters
        assert adapters is not None
        (state,) = adapters.states()
        return state.num_bytes


def test_host_memory_that_holds_an_adapter_is_enough(
    case: DraftAdapterCase, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = case.adapters[0]
    with case.drafting(lora_host_bytes=own_bytes(case, adapter)) as drafting:
        assert not any(brings(drafting, [drafting.load_adapter(adapter)]))
    assert "more than lora_host_bytes" in caplog.text


def test_an_adapter_that_is_read_again_may_bring_other_drafts(
    case: DraftAdapterCase, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are in no digest: whoever reads it again finds what lies there now."""
    folder = small / DRAFT_FOLDER
    both = own_bytes(case, small) + own_bytes(case, case.adapters[1])
    with case.drafting(max_loras=1, lora_host_bytes=both - 1) as drafting:
        digest, other = drafting.load_adapter(small), drafting.load_adapter(case.adapters[1])
        for rank in (DRAFT_RANK, 32, 9, 0):
            assert brings(drafting, [other]) == [False]
            shutil.rmtree(folder, ignore_errors=True)
            if rank:
                make_draft_adapter(folder, case.draft_dir, rank, rank=rank)
            assert brings(drafting, [digest]) == [rank > 0], rank
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
