"""Draft adapters where drafts are captured: rows of adapter memory, one graph for any mix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from captured_drafts import capture_chains, capture_trees, num_replays
from draft_adapter_cases import PAGE, VOCAB, DraftAdapterCase, random_prompts
from drafters import KnownDrafter
from eagle3_cases import WatchedHead
from safetensors.torch import load_file, save_file
from tiny_adapters import make_adapter
from tiny_drafts import DRAFT_RANK, make_draft_adapter
from tree_drafters import TreeDrafter, WatchedTrees
from weft.engine import parts
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.lora.files import DRAFT_FOLDER
from weft.engine.lora.pool import LoraPool
from weft.engine.models.eagle3 import Eagle3Head, adaptable_shapes
from weft.engine.request import SamplingParams, StopCriteria
from weft.engine.speculative.draft_rows import DraftAdapterFiles
from weft.engine.speculative.drafted import DraftedModel
from weft.engine.speculative.gate import tree_shapes

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

    monkeypatch.setattr(parts, "_draft_adapters", brought)
    return DraftAdapterCase(tmp_path, seed)


def pool_of(engine: Engine) -> LoraPool:
    pool = engine.pipeline._runner._lora
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
