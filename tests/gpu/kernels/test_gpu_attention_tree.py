"""Trees of rows on a GPU: the kernels at real sizes against float64, and captured steps."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from weft.engine.executor.encodings import ALL_BEFORE, StepArrays
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.ragged_columns import RaggedColumns
from weft.engine.model.loader import load_model
from weft.kernels.ops.attention import paged_attention
from weft.testing.kernels import tree_cases
from weft.testing.kernels.attention_cases import LAYER, Geometry, hide_first, in_parts
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import fresh_seed
from weft.testing.kernels.tree_cases import (
    TreeCase,
    Work,
    assert_trees,
    hide_unseen,
    make_tree_case,
    path_to,
    random_parents,
    words_of,
)
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

CUDA, PAGE, VOCAB = "cuda", 16, 517
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LLAMA = Geometry(32, 8, 128, 16)
CASES = [
    *((LLAMA, dtype) for dtype in DTYPES),
    (Geometry(9, 3, 64, 16), torch.bfloat16),
    (Geometry(28, 4, 128, 32), torch.bfloat16),
    (Geometry(32, 4, 96, 64), torch.float32),
    (Geometry(4, 1, 256, 16), torch.bfloat16),
]
"""Few: each compiles kernels of its own."""


def attend(
    tree: TreeCase, window: int | None = None, first_position: int = 0, bound: int = 0
) -> torch.Tensor:
    """The front, in memory that held NaN before."""
    case = tree.case
    poison = torch.full_like(case.q, float("nan"))
    del poison
    return in_parts(paged_attention)(
        case.q,
        case.pool,
        LAYER,
        case.page_table,
        case.cu_q_lens,
        case.kv_lens,
        case.scale,
        max(case.max_q_len, bound),
        case.max_kv_len,
        first_position=first_position,
        window=window,
        ancestors=tree.ancestors,
        earlier_rows=tree.earlier,
    )


def check(
    tree: TreeCase, window: int | None = None, first_position: int = 0, bound: int = 0
) -> None:
    assert_trees(attend(tree, window, first_position, bound), tree, window, first_position)


def some_trees(longest: int) -> list[Work]:
    work = [
        Work(32, 32 + random.randrange(longest), is_tree=True),
        Work(random.randrange(2, 32), longest, is_tree=True),
        Work(16, 700, is_tree=True),
        Work(7, 7, is_tree=True),
        Work(1, 600),
        Work(12, 130),
        Work(1, 1),
        Work(0, 9),
    ]
    random.shuffle(work)
    return work


@pytest.mark.parametrize(("geometry", "dtype"), CASES)
def test_trees(geometry: Geometry, dtype: torch.dtype) -> None:
    """Alone, or under a bound that is larger than what is there."""
    fresh_seed()
    check(make_tree_case(geometry, some_trees(1500), dtype, CUDA))
    few = [Work(n, 300, is_tree=True) for n in (3, 1, 6)]
    check(make_tree_case(geometry, few, dtype, CUDA), bound=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trees_beside_a_prompt(dtype: torch.dtype) -> None:
    fresh_seed()
    check(make_tree_case(LLAMA, [*some_trees(800), Work(90, 400)], dtype, CUDA))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_one_tree_behind_a_long_context(rows: int, dtype: torch.dtype) -> None:
    fresh_seed()
    work = [Work(rows, 9000 + random.randrange(100), is_tree=True)]
    check(make_tree_case(LLAMA, work, dtype, CUDA))


@pytest.mark.parametrize(("window", "dtype"), [(33, torch.bfloat16), (600, torch.float32)])
def test_windows_count_from_positions(window: int, dtype: torch.dtype) -> None:
    fresh_seed()
    for more in ([], [Work(200, 900)]):
        tree = make_tree_case(LLAMA, [*some_trees(1500), *more], dtype, CUDA)
        hide_unseen(tree, window)
        check(tree, window)


@pytest.mark.parametrize(("geometry", "dtype"), CASES[:4])
def test_a_tree_goes_on_from_earlier_rows(geometry: Geometry, dtype: torch.dtype) -> None:
    fresh_seed()
    for earlier in (1, 5, 28):
        work = [Work(n, earlier + n + random.randrange(1, 900), True, earlier) for n in (4, 1, 3)]
        tree = make_tree_case(geometry, work, dtype, CUDA)
        hide_first(tree.case, 1)
        check(tree, None, 1)


@pytest.mark.parametrize(("geometry", "dtype"), CASES[1:5])
def test_long_chains(geometry: Geometry, dtype: torch.dtype) -> None:
    """Without words: 9 to 32 rows of a few requests take the same kernel in half precision."""
    fresh_seed()
    work = [Work(32, 900), Work(9, 9), Work(1, 300), Work(20, 2500), Work(0, 4)]
    check(make_tree_case(geometry, work, dtype, CUDA)._replace(ancestors=None))


def test_the_check_sees_a_dropped_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    monkeypatch.setattr(tree_cases, "random_parents", lambda count: [-1] + [0] * (count - 1))
    tree = make_tree_case(LLAMA, [Work(32, 500, is_tree=True)], torch.bfloat16, CUDA)
    case, out = tree.case, torch.empty(32, 32 * 128, dtype=torch.bfloat16, device=CUDA)
    change = ("words[:, None] >> (of_tree & 31)[None, :]", "-1 - 0 * of_tree[None, :]")
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, 32, 500)
    with kernel_module("attention.triton_decode", tmp_path, change) as module:
        in_parts(partial(module.decode_attention, out))(
            case.q, case.pool, LAYER, *lengths, is_uniform=False, max_rows=32,
            ancestors=tree.ancestors,
        )  # fmt: skip
    with pytest.raises(AssertionError):
        assert_trees(out, tree)


class Steps:
    """A tiny model on the device, and the steps of requests that bring trees behind prompts."""

    def __init__(self, kind: str, folder: Path, *, cuda_graphs: bool) -> None:
        self.seed = random.randrange(1 << 30)
        print(f"seed {self.seed}")
        random.seed(self.seed)
        path = make_tiny(
            kind, folder, self.seed, num_hidden_layers=3, head_dim=64, vocab_size=VOCAB
        )
        self.peer = load_model(path, "float32", "cpu").model
        model = load_model(path, "float32", CUDA).model
        self.executor = LocalExecutor(
            model,
            model.kv_layout(PAGE),
            100,
            6,
            20 * PAGE,
            torch.device(CUDA),
            max_step_tokens=128,
            cuda_graphs=cuda_graphs,
            max_drafts=1,
            tree_rows=(8, 32),
        )
        self.prompts = [[random.randrange(VOCAB) for _ in range(n)] for n in (40, 77, 16)]
        self.pages = np.random.permutation(np.arange(1, 31)).reshape(3, 10)
        for slot, pages in enumerate(self.pages.tolist()):
            self.executor.page_table.extend(slot, pages)

    def arrays(self, slots: list[int], starts: list[int], tokens: list[list[int]]) -> StepArrays:
        """Of chains."""
        q_lens = [len(new) for new in tokens]
        positions = np.concatenate(
            [np.arange(a, a + n) for a, n in zip(starts, q_lens, strict=True)]
        )
        pages = self.pages[np.repeat(slots, q_lens), positions // PAGE]
        return StepArrays(
            token_ids=np.array([token for new in tokens for token in new]),
            positions=positions,
            places=pages * PAGE + positions % PAGE,
            slots=np.array(slots),
            cu_q_lens=np.cumsum([0, *q_lens]).astype(np.int32),
            kv_lens=np.add(starts, q_lens).astype(np.int32),
            logits_rows=np.arange(sum(q_lens)),
            max_q_len=max(q_lens),
            max_kv_len=int(np.add(starts, q_lens).max()),
        )

    def prefill(self) -> None:
        """Writes all prompts."""
        for slot, prompt in enumerate(self.prompts):
            arrays = self.arrays([slot], [0], [prompt])
            arrays.logits_rows = arrays.logits_rows[-1:]
            self.executor.run(arrays)

    def tree_step(self, sizes: list[int]) -> tuple[StepArrays, list[list[int]]]:
        """Of the first requests, and their trees."""
        trees = [random_parents(size) for size in sizes]
        tokens = [[random.randrange(VOCAB) for _ in tree] for tree in trees]
        slots = list(range(len(sizes)))
        arrays = self.arrays(slots, [len(self.prompts[slot]) for slot in slots], tokens)
        arrays.ancestors = np.array([word for tree in trees for word in words_of(tree)])
        for begin, parents in zip(arrays.cu_q_lens.tolist(), trees, strict=False):
            depths = [len(path_to(parents, row)) - 1 for row in range(len(parents))]
            arrays.positions[begin : begin + len(parents)] = arrays.positions[begin] + depths
        return arrays, trees

    def check(self, logits: torch.Tensor, arrays: StepArrays, trees: list[list[int]]) -> None:
        """Each path is as the same chain behind its prompt, on a CPU."""
        plain = PagedDriver(self.peer, 40, PAGE, self.seed)
        pages = list(range(30))
        for slot, parents in enumerate(trees):
            begin = int(arrays.cu_q_lens[slot])
            for leaf in set(range(len(parents))) - set(parents):
                path = path_to(parents, leaf)
                tokens = arrays.token_ids[begin + np.array(path)].tolist()
                prompt = self.prompts[slot]
                wanted = plain.step(
                    [(PagedRequest(pages=list(pages)), prompt + tokens)],
                    range(len(prompt), len(prompt) + len(path)),
                )
                found = logits[begin + torch.tensor(path, device=logits.device)].cpu()
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "cuda_graphs"), [("llama", True), ("qwen3_moe", True), ("qwen3", False)]
)
def test_each_path_is_as_the_same_chain(kind: str, cuda_graphs: bool, tmp_path: Path) -> None:
    steps = Steps(kind, tmp_path, cuda_graphs=cuda_graphs)
    steps.prefill()
    for sizes in ([32], [7], [16, 9], [1, 25, 14], [5]):
        arrays, trees = steps.tree_step(sizes)
        if steps.executor.graphs is not None:
            bucket = steps.executor.graphs.bucket_of(arrays)
            assert bucket is not None
            assert bucket.kind == "tree"
        logits = steps.executor.run(arrays)
        assert logits is not None
        steps.check(logits, arrays, trees)


@pytest.mark.parametrize("sizes", [[32], [12, 16]])
def test_a_captured_step_follows_what_the_device_wrote(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions and words that the host does not know when it sends the step."""
    steps = Steps("llama", tmp_path, cuda_graphs=True)
    steps.prefill()
    inputs = steps.executor.inputs
    assert inputs is not None
    arrays, trees = steps.tree_step(sizes)
    positions, words = arrays.positions, arrays.ancestors
    assert words is not None
    arrays.positions, arrays.ancestors = np.zeros_like(positions), np.full_like(words, ALL_BEFORE)
    send = inputs.send_ragged

    def send_and_write(step: StepArrays, columns: RaggedColumns) -> None:
        send(step, columns)
        assert inputs.step is not None
        assert inputs.step.ancestors is not None
        inputs.step.positions[: len(words)] = torch.from_numpy(positions).to(CUDA)
        inputs.step.ancestors[: len(words)] = torch.from_numpy(words).to(CUDA)

    monkeypatch.setattr(inputs, "send_ragged", send_and_write)
    logits = steps.executor.run(arrays)
    assert logits is not None
    steps.check(logits, arrays, trees)
