"""Draft heads over several ranks and stages: texts are the model's alone, drafts are the head's."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.drafters import KnownDrafter, texts_of
from weft.testing.engine.eagle3_cases import NUM_CHECKED, WatchedHead, check_chains
from weft.testing.models.choices import check_same
from weft.testing.models.every_family import load_reference
from weft.testing.models.tiny_drafts import make_tiny_draft, make_tiny_eagle
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_mtp import KINDS, make_tiny_mtp

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, VOCAB = 8, 250
PARAMS = SamplingParams(temperature=1.0, seed=5)
EXPERTS = {"glm": "n_routed_experts", "deepseek": "n_routed_experts", "ernie": "moe_num_experts"}
"""The field that counts a model's experts, of which its MTP head has as many."""
STOP = StopCriteria(max_tokens=3 * PAGE, ignore_eos=True)


def llm(folder: Path, **settings: object) -> LLM:
    sizes = {"page_size": PAGE, "prefill_chunk_tokens": 2 * PAGE, "num_threads": 1}
    return LLM(folder, dtype="float32", **sizes, **settings)


def random_prompts() -> list[list[int]]:
    shared = [random.randrange(3, VOCAB) for _ in range(3 * PAGE + 3)]
    return [
        shared[: random.randint(1, len(shared))]
        + [random.randrange(3, VOCAB) for _ in range(random.randint(1, 2 * PAGE))]
        for _ in range(5)
    ]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("eagle3", {"tp": 2}),
        ("eagle3", {"pp": 2}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("eagle3", {"tp": 4}),
                ("eagle3", {"tp": 2, "ep": 2}),
                ("eagle", {"tp": 2}),
                ("eagle", {"tp": 4, "ep": 4}),
                *((kind, {"tp": 2}) for kind in KINDS),
                *((kind, {"tp": 2, "ep": 2}) for kind in EXPERTS),
                *((kind, {"pp": 3}) for kind in ("eagle3", "eagle")),
                *((kind, {"pp": 2}) for kind in ("eagle", *KINDS)),
            ]
        ),
    ],
)
def test_texts_are_the_models_and_drafts_the_heads(
    kind: str, ranks: dict[str, int], tmp_path: Path, seed: int
) -> None:
    """With prefix hits and too few pages, so that requests are resumed."""
    folder, draft_dir, naive = tmp_path / "model", None, None
    ep = ranks.get("ep", 1)
    if kind in ("eagle3", "eagle"):
        sizes = {"num_attention_heads": 8, "num_hidden_layers": 4}
        if ep > 1:
            sizes |= {"num_experts": 8, "head_dim": 32}
        make_tiny("llama" if ep == 1 else "qwen3_moe", folder, seed, **sizes)
        make = make_tiny_draft if kind == "eagle3" else make_tiny_eagle
        draft_dir = make(tmp_path / "head", folder, seed + 1)
    else:
        experts = {} if ep == 1 else {EXPERTS[kind]: 12}
        naive = make_tiny_mtp(kind, folder, seed, **experts)
    prompts, drafter = random_prompts(), "mtp" if naive else kind
    load = partial(load_reference, folder)
    with llm(folder) as plain:
        expected = plain.generate_all(prompts, PARAMS, STOP)
    # Poisoning waits for all steps under way. With two stages, that would leave but one under way;
    # with three, it comes between a step and the draw of its tokens.
    is_poisoned = ranks.get("pp") != 2
    settings = {"draft_dir": draft_dir, "num_pages": 24, "poison_free_pages": is_poisoned}
    with llm(folder, drafter=drafter, **ranks, **settings) as drafting:
        known = KnownDrafter(texts_of(prompts, expected, 5), VOCAB, 0.6)
        watched = WatchedHead(drafting.engine, known)
        for _ in range(2):  # The second time on a warm cache.
            groups = drafting.generate_all(prompts, PARAMS, STOP)
            for prompt, (found,), (wanted,) in zip(prompts, groups, expected, strict=True):
                check_same(load, prompt, found.token_ids, wanted.token_ids, PARAMS)
        counters = drafting.engine.counters()
    assert counters["accepted_tokens"] > 0
    if draft_dir is not None:
        check_chains(watched, folder, draft_dir)
        return
    assert naive is not None
    chains = [(tokens, chain) for tokens, chain in watched.chains if chain]
    for tokens, chain in random.sample(chains, min(len(chains), NUM_CHECKED // 2)):
        assert naive.agrees(tokens, chain), (tokens, chain)
