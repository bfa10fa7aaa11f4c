"""Trees of drafts on a GPU: grown, verified, followed and moved inside graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.engine.base.drafts import DraftShape, tree_shapes
from weft.engine.base.token_trees import TokenTree
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.engine.scheduler.plan import VerifyItem
from weft.kernels.ops import draft_tree, tree_rows
from weft.kernels.ops.draft_tree.spec import DraftTrees, Expanded, Nodes
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.testing.engine.drafters import KnownGraphs, RandomGate, texts_of
from weft.testing.engine.later_drafts import fetched
from weft.testing.engine.tree_drafters import KnownTreeGraphs
from weft.testing.kernels.kernel_checks import fresh_seed
from weft.testing.kernels.tree_cases import path_to, random_parents, words_of
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny, tiny_config

pytestmark = pytest.mark.needs("cuda")

PAGE = 16
VOCAB = 517
SHAPES = tree_shapes(4)
STOP = StopCriteria(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    path = tmp_path_factory.mktemp("t")
    shape = {"num_hidden_layers": 4, "head_dim": 64, "vocab_size": VOCAB}
    return make_tiny("llama", path, seed, tokenizer=True, **shape)


@pytest.fixture(scope="module")
def draft_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("d"), target_dir, random.randrange(1 << 30))


def settings(draft_dir: Path | None = None, **others: object) -> dict[str, object]:
    given: dict[str, object] = {"device": "cuda", "dtype": "float32", "page_size": PAGE}
    given |= {"num_pages": 300, "max_running_requests": 4, "max_step_tokens": 160}
    given |= {"prefill_chunk_tokens": 32, "max_context_tokens": 512}
    if draft_dir is not None:
        given |= {"draft_dir": draft_dir, "drafter": "eagle3", "draft_width": 4}
        given |= {"poison_free_pages": True}
    return given | others


def random_prompts(number: int, most: int = 4 * PAGE) -> list[list[int]]:
    lengths = [random.randint(1, most) for _ in range(number)]
    return [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def choose(engine: Engine, shapes: Sequence[int | DraftShape]) -> None:
    """Lets an engine draft any of these."""
    engine.scheduler.running_plans.gate = RandomGate(shapes)


def settle(engine: Engine) -> None:
    """A step may be left over when all requests have ended; then nothing is held."""
    while engine.has_work:
        engine.turn()
    engine.memory.check_integrity()
    assert engine.memory.counts().used == 0


def test_paths_are_followed_and_moved_as_on_a_cpu() -> None:
    fresh_seed()
    for _ in range(20):
        counts = [32, 1, *(random.randint(1, 32) for _ in range(6))]
        bounds = torch.tensor([0, *counts]).cumsum(0)
        num_rows, slots = int(bounds[-1]), random.sample(range(20), len(counts))
        rows, words = torch.full((len(counts), 32), -1), []
        for index, count in enumerate(counts):
            rows[index, :count] = torch.arange(int(bounds[index]), int(bounds[index + 1]))
            words += words_of(random_parents(count))
        tokens, drawn = torch.randint(0, 3, (2, num_rows))
        drawn[torch.rand(num_rows) < 0.05] = -1
        step = StepRows(
            tokens,
            torch.randint(1, 900, (num_rows,)),
            torch.randperm(64 * PAGE)[:num_rows],
            bounds.to(torch.int32),
            torch.zeros(len(counts), dtype=torch.int32),
            torch.tensor(words),
        )
        owners = torch.tensor(slots).repeat_interleave(torch.tensor(counts))
        verified = Verified(rows, owners)
        known = SlotTokens(torch.zeros((33, 21), dtype=torch.int64), torch.zeros(21).long())
        pool = torch.randn(64, 3, 5, 2, PAGE, 64).to(random.choice([torch.float32, torch.bfloat16]))
        on_gpu = SlotTokens(known.tokens.cuda(), known.starts.cuda())
        *last, paths = tree_rows.accept_trees(drawn, step, verified, known)
        *found, gpu_paths = tree_rows.accept_trees(
            drawn.cuda(),
            StepRows(*(column.cuda() for column in step)),
            Verified(*(column.cuda() for column in verified)),
            on_gpu,
        )
        for ours, theirs in zip(found, last, strict=True):
            assert torch.equal(ours.cpu(), theirs)
        assert torch.equal(gpu_paths.cpu(), paths)
        assert torch.equal(on_gpu.tokens.cpu(), known.tokens)
        assert torch.equal(on_gpu.starts.cpu(), known.starts)
        moved = pool.cuda()
        tree_rows.move_paths(pool, step.places, rows, paths)
        tree_rows.move_paths(moved, step.places.cuda(), rows.cuda(), gpu_paths)
        assert torch.equal(moved.cpu(), pool)


@pytest.mark.parametrize("vocab_size", [517, 32000, 128256])
def test_levels_are_grown_and_kept_as_on_a_cpu(vocab_size: int) -> None:
    fresh_seed()
    width, depth, requests = 4, 6, 3
    nothing = torch.zeros(0)
    cpu = DraftTrees(
        width=width,
        depth=depth,
        num_nodes=31,
        starts=torch.ones(requests, dtype=torch.int64),
        slots=nothing,
        is_whole=torch.tensor([True, True, False]),
        max_depths=torch.tensor([9, 3, 6]),
        page_table=nothing,
        cu_q_lens=nothing,
        max_kv_len=0,
    )
    gpu = DraftTrees(
        **{
            name: value.cuda() if isinstance(value := getattr(cpu, name), torch.Tensor) else value
            for name in cpu.__slots__
        }
    )
    nodes = Nodes(
        *torch.zeros((1, requests, cpu.num_grown), dtype=torch.int64),
        torch.zeros((requests, cpu.num_grown)),
        torch.zeros((requests, cpu.num_grown), dtype=torch.int64),
        torch.zeros((requests, width * (depth - 1)), dtype=torch.int64),
    )
    others = Nodes(*(column.cuda() for column in nodes))
    names = torch.randperm(vocab_size)
    none = torch.zeros(requests, dtype=torch.int64)
    parents = Expanded(none, torch.zeros(requests), none, none)
    for level in range(depth):
        logits = 3 * torch.randn(len(parents.tokens), vocab_size)
        found = draft_tree._grow(
            others,
            logits.cuda(),
            names.cuda(),
            Expanded(*(column.cuda() for column in parents)),
            gpu,
            level,
        )
        parents = draft_tree._grow(nodes, logits, names, parents, cpu, level)
        if level + 1 < depth:
            is_real = parents.scores > -torch.inf
            assert torch.equal(found.tokens.cpu()[is_real], parents.tokens[is_real])
            assert torch.equal(found.paths.cpu()[is_real], parents.paths[is_real])
            assert torch.equal(found.rows.cpu()[is_real], parents.rows[is_real])
    is_real = nodes.scores > -torch.inf
    torch.testing.assert_close(others.scores.cpu(), nodes.scores)
    assert torch.equal(others.tokens.cpu()[is_real], nodes.tokens[is_real])
    # From the same scores: rounding may order others otherwise.
    same = Nodes(*(column.cuda() for column in nodes))
    for ours, theirs in zip(
        draft_tree._keep_best(same, 31), draft_tree._keep_best(nodes, 31), strict=True
    ):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_the_text_is_the_targets_when_the_head_grows_trees(
    target_dir: Path, draft_dir: Path, temperature: float, cuda_graphs: bool
) -> None:
    """Trees, chains and none in turn; twice, the second time on a warm cache."""
    prompts = random_prompts(7)
    params = SamplingParams(temperature=temperature, seed=5)
    with LLM(target_dir, **settings()) as plain:
        expected = plain.generate_all(prompts, params, STOP)
    given = settings(draft_dir, cuda_graphs=cuda_graphs)
    with LLM(target_dir, **given) as drafting:
        engine = drafting.engine
        choose(engine, (0, 3, 5, *SHAPES))
        for _ in range(2):
            groups = drafting.generate_all(prompts, params, STOP)
            assert [g[0].token_ids for g in groups] == [g[0].token_ids for g in expected]
        assert engine.counters()["drafted_tokens"] > 1000
        settle(engine)


@pytest.mark.parametrize("num_pages", [300, 30], ids=["room", "few-pages"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_steps_behind_trees_whose_outcome_the_host_does_not_know(
    target_dir: Path, draft_dir: Path, temperature: float, num_pages: int
) -> None:
    """Trees that hold the text among wrong branches; ends at stop tokens anywhere in them."""
    prompts = random_prompts(9)
    digits = Constraint(kind="regex", text="[0-9]{20,50}")
    params = [
        SamplingParams(
            temperature=temperature, seed=5, constraint=digits if index % 3 == 0 else None
        )
        for index in range(len(prompts))
    ]
    stop = StopCriteria(max_tokens=60, stop_token_ids=tuple(range(0, VOCAB, 50)))
    with LLM(target_dir, **settings(num_pages=num_pages)) as plain:
        expected = plain.generate(prompts, params, stop)
    with LLM(target_dir, **settings(draft_dir, num_pages=num_pages)) as drafting:
        engine = drafting.engine
        assert engine.scheduler.running_plans.drafts_on_device
        texts = texts_of(prompts, [[sample] for sample in expected], 5)
        KnownGraphs(engine, texts, VOCAB, 0.8)
        trees = KnownTreeGraphs(engine, texts, VOCAB, 0.8)
        choose(engine, (0, 3, *SHAPES))
        for _ in range(2):
            found = drafting.generate(prompts, params, stop)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        counters = engine.counters()
        assert trees.num_late > 10
        assert counters["accepted_tokens"] > counters["verified_runs"]
        settle(engine)


def test_pages_are_those_of_a_run_without_drafts(target_dir: Path, draft_dir: Path) -> None:
    """A second request goes on with each text, from what is cached of it."""
    prompts = random_prompts(6, PAGE)
    greedy = SamplingParams(temperature=0.0)
    with LLM(target_dir, **settings()) as plain:
        expected = plain.generate_all(prompts, greedy, STOP)
        longer = [
            [*prompt, *group[0].token_ids, *random_prompts(1)[0]]
            for prompt, group in zip(prompts, expected, strict=True)
        ]
        wanted = plain.generate_all(longer, greedy, STOP)
    with LLM(target_dir, **settings(draft_dir)) as drafting:
        engine = drafting.engine
        KnownTreeGraphs(engine, texts_of(prompts, expected, 0), VOCAB, 0.9)
        choose(engine, SHAPES)
        groups = drafting.generate_all(prompts, greedy, STOP)
        assert [g[0].token_ids for g in groups] == [g[0].token_ids for g in expected]
        choose(engine, (0,))
        before = engine.counters()["prefix_hit_tokens"]
        groups = drafting.generate_all(longer, greedy, STOP)
        assert [g[0].token_ids for g in groups] == [g[0].token_ids for g in wanted]
        num_cached = sum((len(prompt) + STOP.max_tokens - 1) // PAGE * PAGE for prompt in prompts)
        assert engine.counters()["prefix_hit_tokens"] - before >= num_cached


class BothWays:
    """Grows trees by graphs, and looks what single operations grow for the same requests."""

    def __init__(self, drafter: EagleDrafter, known: SlotTokens) -> None:
        self._drafter, self._known = drafter, known
        self.num_trees = self.num_different = 0

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`."""
        trees = fetched(self._drafter, items, self._known)
        others = self._drafter._grow_and_wait(items)
        for item, tree, other in zip(items, trees, others, strict=True):
            if isinstance(tree, TokenTree) and isinstance(other, TokenTree) and item.tree:
                self.num_trees += 1
                assert len(tree) == item.max_drafts
                # Of a graph all levels are grown.
                self.num_different += paths_of(tree) != paths_of(other)
        return trees

    def forget(self, slot: int) -> None:
        """See `Drafter.forget`."""


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    parents = [-1, *tree.parents]
    return {
        tuple(tree[row - 1] for row in path_to(parents, node)[1:])
        for node in range(1, len(parents))
    }


def test_graphs_grow_what_single_operations_do(target_dir: Path, draft_dir: Path) -> None:
    with LLM(target_dir, **settings(draft_dir)) as drafting:
        engine = drafting.engine
        drafter = engine.drafter
        assert isinstance(drafter, EagleDrafter)
        both = engine.pipeline._drafter = BothWays(drafter, engine.parts.local.known)
        engine.scheduler.running_plans.drafts_on_device = False
        choose(engine, SHAPES)
        stop = StopCriteria(max_tokens=60, ignore_eos=True)
        for count in (1, 3, 4):
            drafting.generate(random_prompts(count), SamplingParams(temperature=1.0), stop)
    print(f"{both.num_different} of {both.num_trees} trees differ")
    assert both.num_trees > 100
    # The last tokens of a text get trees of fewer levels; and rounding may decide between nodes.
    assert both.num_different <= 0.15 * both.num_trees


def test_requests_with_adapters_and_penalties_beside_others(
    target_dir: Path, draft_dir: Path, tmp_path: Path
) -> None:
    config = tiny_config("llama", num_hidden_layers=4, head_dim=64, vocab_size=VOCAB)
    folder = make_adapter(tmp_path / "a", config, 3)
    prompts = random_prompts(8)
    params = SamplingParams(temperature=1.0, seed=7)
    lora = {"enable_lora": True, "max_loras": 2, "lora_memory_bytes": 8 << 20}

    def run(llm: LLM) -> list[list[int]]:
        adapters = [llm.load_adapter(folder), b""] * 4
        found = llm.generate(prompts, params, STOP, adapters=adapters)
        stern = SamplingParams(temperature=1.0, seed=7, repetition_penalty=1.3)
        found += llm.generate(prompts[:4], stern, STOP, adapters=adapters[:4])
        return [sample.token_ids for sample in found]

    with LLM(target_dir, **settings(**lora)) as plain:
        expected = run(plain)
    with LLM(target_dir, **settings(draft_dir, **lora)) as drafting:
        choose(drafting.engine, (0, 3, *SHAPES))
        assert run(drafting) == expected
        assert drafting.engine.counters()["drafted_tokens"] > 500
        settle(drafting.engine)
