"""EAGLE heads against a plain float64 reading of their definition."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.draft_head import load_draft_head
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.model.heads.eagle import EagleHead
from weft.engine.model.heads.place import HeadPlace
from weft.engine.model.loader import load_model
from weft.engine.requests.request import HeldPages
from weft.engine.scheduler.plan import VerifyItem
from weft.kernels.shared import cpu
from weft.pages.memory.page_table import PageTable
from weft.testing.engine.eagle3_cases import NEAR_TIE
from weft.testing.models.choices import where_experts_are_sure
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.reference_models import make_reference
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_drafts import NaiveEagle, NaiveHead, make_tiny_draft, make_tiny_eagle
from weft.testing.models.tiny_models import make_tiny

SLOTS = 8
LATENTS = {**MOE_FAMILIES["deepseek-v3"][1], "num_hidden_layers": 4, "first_k_dense_replace": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
"""Of heads whose K and V are a plane of their own, beside latents."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 7}, {}),
    "llama-torch": ("llama", {"num_hidden_layers": 7}, {}),
    "llama-tied": ("llama", {"num_hidden_layers": 3, "tie_word_embeddings": True}, {}),
    "llama-own": ("llama", {"num_hidden_layers": 5}, {"shares": False}),
    "llama-normed": ("llama", {"num_hidden_layers": 4}, {"norm_before_residual": True}),
    "llama-normed-torch": ("llama", {"num_hidden_layers": 4}, {"norm_before_residual": True}),
    "llama-published": ("llama", {"num_hidden_layers": 4}, {"lm_head": True}),
    "qwen3": (
        "qwen3",
        {"num_hidden_layers": 4},
        {"eagle_aux_hidden_state_layer_ids": [0, 3, 2]},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_hidden_layers": 5, "mlp_only_layers": [1]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
    ),
    "latents": ("deepseek_v3", LATENTS, HEADS),
}
EAGLE_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle-llama": ("llama", {}, {}),
    "eagle-llama-torch": ("llama", {"num_hidden_layers": 2}, {"fc_bias": False}),
    "eagle-tied": ("llama", {"tie_word_embeddings": True}, {"qkv_bias": True}),
    "eagle-qwen3-own": ("qwen3", {"num_hidden_layers": 2}, {"shares": False}),
    "eagle-latents": ("deepseek_v3", LATENTS, HEADS),
    "eagle-qwen3-moe": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}, {}),
}
"""EAGLE-1 and EAGLE-2 heads."""


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


class Setup:
    """A target with a head, and what both are according to others."""

    def __init__(
        self, folder: Path, kind: str, target: Any, draft: Any, *, is_eagle3: bool
    ) -> None:
        from transformers import AutoModelForCausalLM

        seed = random.randrange(1 << 30)
        print(f"seed {seed}")
        random.seed(seed)
        self.target_dir = folder / "target"
        if kind == "deepseek_v3":
            make_reference(kind, self.target_dir, seed, **target)
        else:
            make_tiny(kind, self.target_dir, seed, **target)
        make = make_tiny_draft if is_eagle3 else make_tiny_eagle
        self.draft_dir = make(folder / "draft", self.target_dir, seed + 1, **draft)
        loaded = load_model(self.target_dir, "float32").model
        assert isinstance(loaded, DecoderOnlyLM)
        self.target = loaded
        alone = load_model(self.target_dir, "float32").model
        assert isinstance(alone, DecoderOnlyLM)
        self.alone = alone
        """The target, which does not know of the head."""
        self.head = load_draft_head(self.draft_dir, self.target)
        self.model = DraftedModel(self.target, self.head, SLOTS, 512)
        self.reference = AutoModelForCausalLM.from_pretrained(self.target_dir, dtype=torch.float32)
        naive = NaiveHead if is_eagle3 else NaiveEagle
        self.naive = naive(
            self.draft_dir,
            self.reference.get_input_embeddings().weight.detach(),
            self.reference.get_output_embeddings().weight.detach(),
        )
        layers = self.target.config.num_layers
        named = draft.get("eagle_aux_hidden_state_layer_ids")
        left = draft.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        self.aux_layers = named or (2, layers // 2, layers - 3)
        if left:
            self.aux_layers = [layer + 1 for layer in left]
        if not is_eagle3:
            self.aux_layers = (layers,)  # As it leaves the last layer, normalised.

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """[n, hidden] float64: what the head makes of transformers' hidden states."""
        with torch.inference_mode():
            out = self.reference(torch.tensor([tokens]), output_hidden_states=True)
        streams = [out.hidden_states[layer][0] for layer in self.aux_layers]
        return self.naive.fuse(torch.cat(streams, dim=-1))

    def tokens(self, count: int) -> list[int]:
        return [random.randrange(3, self.target.config.vocab_size) for _ in range(count)]


@pytest.fixture(params=[*CASES, *EAGLE_CASES], scope="module")
def setup(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setup]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param.endswith("-torch"):  # No native operations.
            patch.setattr(cpu, "native_cpu", lambda: None)
            patch.setattr(cpu, "native_cpu_for", lambda x: None)
        is_eagle3 = request.param in CASES
        case = (CASES if is_eagle3 else EAGLE_CASES)[request.param]
        yield Setup(tmp_path_factory.mktemp(request.param), *case, is_eagle3=is_eagle3)


def assert_near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    assert ours.shape == exact.shape
    error = (ours.double() - exact).abs().max() / exact.abs().max()
    assert error < 1e-4, float(error)


def stored(
    driver: PagedDriver, request: PagedRequest, place: HeadPlace
) -> tuple[torch.Tensor, ...]:
    """K and V [n, kv_heads, dim] of a request's positions from 1 on."""
    pool, layer = place.of(driver.pool)
    positions = torch.arange(1, request.num_cached)
    pages = torch.tensor(request.pages)[positions // driver.page_size]
    # [n, kv_heads, 2, dim]
    kv = pool[pages, :, layer, :, positions % driver.page_size]
    return kv[:, :, 0], kv[:, :, 1]


def check_entries(
    setup: Setup, driver: PagedDriver, request: PagedRequest, tokens: list[int]
) -> None:
    assert request.num_cached == len(tokens)
    exact = setup.naive.entries(setup.states(tokens)[:-1], tokens[1:])
    with where_experts_are_sure(lambda: setup.reference, tokens):
        for ours, expected in zip(stored(driver, request, setup.head.place), exact, strict=True):
            assert_near(ours, expected)


def check_chain(setup: Setup, text: list[int], chain: Sequence[int], count: int) -> None:
    """These are the most likely drafts behind a text, as far as float32 can tell."""
    assert len(chain) == count
    with where_experts_are_sure(lambda: setup.reference, text):
        assert setup.naive.lack(setup.states(text)[:-1], text, list(chain)) <= NEAR_TIE


def feed(driver: PagedDriver, texts: Sequence[list[int]], first_slot: int) -> list[PagedRequest]:
    """Runs texts to their end in random pieces, several in a step, with and without logits."""
    requests = [PagedRequest(slot=first_slot + index) for index in range(len(texts))]
    while True:
        open_ = [i for i, r in enumerate(requests) if r.num_cached < len(texts[i])]
        if not open_:
            return requests
        work = []
        for i in random.sample(open_, random.randint(1, len(open_))):
            rest = texts[i][requests[i].num_cached :]
            work.append((requests[i], rest[: random.choice((1, 2, 9, 30))]))
        count = sum(len(tokens) for _, tokens in work)
        driver.step(work, random.choice((None, [], list(range(count)), [count - 1])))


def test_entries_of_prompts_in_any_pieces(setup: Setup) -> None:
    driver = PagedDriver(setup.model, num_pages=64)
    texts = [setup.tokens(count) for count in (2, 8, 9, 40, 75)]
    for text, request in zip(texts, feed(driver, texts, 1), strict=True):
        check_entries(setup, driver, request, text)
    whole = PagedRequest(slot=0)
    driver.step([(whole, texts[-1])], [])
    check_entries(setup, driver, whole, texts[-1])
    single = PagedRequest(slot=3)
    for token in texts[2]:
        driver.step([(single, [token])])
    check_entries(setup, driver, single, texts[2])


def drafter_of(setup: Setup, driver: PagedDriver) -> EagleDrafter:
    table = PageTable(SLOTS, 64, keeps_changes=False)
    return EagleDrafter(setup.model, driver.pool, table, driver.page_size)


def wish(driver: PagedDriver, request: PagedRequest, tokens: list[int], count: int) -> VerifyItem:
    """The last of `tokens` is not in the pages yet; there is room for `count` more."""
    assert request.num_cached == len(tokens) - 1
    while len(request.pages) * driver.page_size < len(tokens) + count:
        request.pages.append(driver._free_pages.pop())
    owner: Any = SimpleNamespace(slot=request.slot, tokens=tokens, held=HeldPages(request.pages))
    return VerifyItem(owner, len(tokens) - 1, count)


def test_drafts_are_the_most_likely_chains(setup: Setup) -> None:
    driver = PagedDriver(setup.model, num_pages=64)
    drafter = drafter_of(setup, driver)
    assert drafter.draft([]) == []
    texts = [setup.tokens(count) for count in (2, 9, 17, 60)]
    requests = feed(driver, [text[:-1] for text in texts], 2)
    wishes = [
        wish(driver, request, text, count)
        for request, text, count in zip(requests, texts, (3, 6, 0, 5), strict=True)
    ]
    for text, item, chain in zip(texts, wishes, drafter.draft(wishes), strict=True):
        check_chain(setup, text, chain, item.max_drafts)
    # Alone as in a batch.
    (alone,) = drafter.draft([wishes[1]])
    check_chain(setup, texts[1], alone, 6)


def test_drafts_go_on_from_the_last_accepted_token(setup: Setup) -> None:
    driver = PagedDriver(setup.model, num_pages=64)
    drafter = drafter_of(setup, driver)
    texts = [setup.tokens(count) for count in (12, 25)]
    requests = feed(driver, [text[:-1] for text in texts], 4)
    for _ in range(3):
        wishes = [wish(driver, r, t, 4) for r, t in zip(requests, texts, strict=True)]
        chains = drafter.draft(wishes)
        driver.step(
            [(r, [t[-1], *c]) for r, t, c in zip(requests, texts, chains, strict=True)],
            range(10),
        )
        num_accepted = [random.randint(0, 4) for _ in texts]
        rows = [5 * index + count for index, count in enumerate(num_accepted)]
        slots = [request.slot for request in requests]
        setup.model.keep_accepted(torch.tensor(rows), torch.tensor(slots))
        for index, count in enumerate(num_accepted):
            texts[index] += [*chains[index][:count], setup.tokens(1)[0]]
            requests[index].num_cached = len(texts[index]) - 1
    wishes = [wish(driver, r, t, 4) for r, t in zip(requests, texts, strict=True)]
    for request, text, chain in zip(requests, texts, drafter.draft(wishes), strict=True):
        check_entries(setup, driver, request, text[:-1])
        check_chain(setup, text, chain, 4)


def test_a_step_that_begins_one_token_early_needs_nothing_that_was_kept(setup: Setup) -> None:
    driver = PagedDriver(setup.model, num_pages=64)
    text = setup.tokens(41)
    (request,) = feed(driver, [text[:24]], 5)
    setup.model.kept.fill_(random.random())
    null_page = driver._free_pages.pop()
    request.num_cached, request.slot = 23, 6
    batch = driver.batch([(request, text[23:40])])
    batch.groups[0].places[0] = null_page * driver.page_size
    with torch.inference_mode():
        setup.model.forward(batch, driver.pool)
    check_entries(setup, driver, request, text[:40])
    item = wish(driver, request, text, 4)
    (chain,) = drafter_of(setup, driver).draft([item])
    check_chain(setup, text, chain, 4)


def test_the_target_is_what_it_is_without_a_draft(setup: Setup) -> None:
    texts = [setup.tokens(count) for count in (1, 8, 50)]
    logits, caches = [], []
    for model in (setup.alone, setup.model):
        driver = PagedDriver(model, num_pages=32)
        requests = [PagedRequest(slot=slot) for slot in range(3)]
        work = list(zip(requests, texts, strict=True))
        steps = [driver.step(work), driver.step([(r, t[:1]) for r, t in work]),
                 driver.step([(r, t[:5]) for r, t in work], range(5))]  # fmt: skip
        logits.append(torch.cat(steps))
        if setup.head.place.plane is None:
            caches.append(driver.pool[:, :, : setup.head.place.layer])
        else:
            size = setup.alone.kv_layout(driver.page_size).page_bytes // 4
            caches.append(driver.pool.flatten(1)[:, :size])
    caches = [cache.nan_to_num(7.0) for cache in caches]
    if isinstance(setup.head, EagleHead):
        # It has the whole last layer run, and not the rows alone that are drawn from.
        assert torch.allclose(*logits, atol=1e-5)
        assert torch.allclose(*caches, atol=1e-5)
    else:
        assert torch.equal(*logits)
        assert torch.equal(*caches)
