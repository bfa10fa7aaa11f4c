"""Routes of experts in pages against transformers' routers: whole, in chunks, cached, apart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from weft.contract.errors import ConfigError, InvalidRequest
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import asks_surely, check_same
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import VOCAB, make_reference
from weft.testing.models.reference_routes import reference_routes
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
NUM_NEW = 14
STOP = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": PAGE,
    "num_pages": 120,
    "enable_return_routed_experts": True,
}
BY_DEFAULT = ("qwen2-moe", "many")
"""Every second layer is sparse; numbers of 16 bits."""
MANY = {
    **{"num_experts": 260, "num_experts_per_tok": 2, "moe_intermediate_size": 4},
    **{"num_hidden_layers": 1, "hidden_size": 64},
}
FAMILIES = {**MOE_FAMILIES, "many": ("qwen3_moe", MANY)}
del FAMILIES["llama4"]  # Its reference gives all rows to all experts, and none of their numbers.


class Family(NamedTuple):
    path: Path
    reference: Any
    prompts: list[list[int]]


def marked() -> list[object]:
    return [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.full)
        for name in FAMILIES
    ]


@pytest.fixture(params=marked(), scope="module")
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Family:
    kind, overrides = FAMILIES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    reference = make_reference(kind, path, seed, **overrides)
    prompts = [[random.randrange(3, VOCAB) for _ in range(count)] for count in (5, 21, 60)]
    return Family(path, reference, prompts)


def check(reference: Any, tokens: Sequence[int], found: Sequence[NDArray[Any]], begin: int) -> None:
    """The last token has no routes: it was not an input. Where roundings decide who is asked,
    nothing is compared.
    """
    joined = np.concatenate(found)
    right = reference_routes(reference, tokens[:-1])
    assert len(joined) == len(tokens) - 1 - begin
    without = sorted(set(range(joined.shape[1])) - set(right))
    assert not joined[:, without].any()
    if asks_surely(reference, tokens[:-1]):
        for layer, chosen in right.items():
            assert (joined[:, layer] == chosen[begin:]).all(), layer


def check_texts(
    reference: Any,
    prompts: Sequence[list[int]],
    found: Sequence[GeneratedSample],
    expected: Sequence[GeneratedSample],
) -> None:
    for prompt, one, other in zip(prompts, found, expected, strict=True):
        check_same(lambda: reference, prompt, one.token_ids, other.token_ids)


def test_whole_and_in_chunks_and_from_the_cache(family: Family) -> None:
    for settings in ({}, {"prefill_chunk_tokens": 2 * PAGE, "drafter": "ngram"}):
        with LLM(family.path, **(SETTINGS | settings)) as llm:
            for begin in (0, 3):
                samples = llm.generate(family.prompts, stop=STOP, routes_from=begin)
                for prompt, sample in zip(family.prompts, samples, strict=True):
                    tokens = prompt + sample.token_ids
                    check(family.reference, tokens, sample.routes, begin)
            assert llm.engine.counters()["prefix_hit_tokens"] > 0
    with LLM(family.path, **{**SETTINGS, "enable_return_routed_experts": False}) as llm:
        check_texts(
            family.reference, family.prompts, llm.generate(family.prompts, stop=STOP), samples
        )


def test_prefill_apart(family: Family) -> None:
    clock, settings = ManualClock(), {"enable_return_routed_experts": True}
    owner, filler = (
        make_engine(family.path, role, clock, **settings) for role in ("decode", "prefill")
    )
    pair = EnginePair(owner, [filler], clock)
    try:
        asked = [pair.submit(prompt, NUM_NEW, routes_from=0) for prompt in family.prompts]
        for prompt, key, generated in zip(family.prompts, asked, pair.finish(*asked), strict=True):
            found = pair.answers[key].routes
            check(family.reference, prompt + generated, found, 0)
        (fill,) = pair.answers[asked[-1]].finished[0].timeline.fills
        assert (fill.accepted_tokens, fill.failure) == (59 // PAGE * PAGE, "")
        pair.settle()
    finally:
        pair.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Family:
    kind, overrides = MOE_FAMILIES["qwen2-moe"]
    path = tmp_path_factory.mktemp("small")
    reference = make_reference(kind, path, seed, **overrides)
    return Family(path, reference, [[random.randrange(3, VOCAB) for _ in range(40)]])


def test_samples_share_a_prompt_and_a_tier_keeps_its_routes(small: Family, tmp_path: Path) -> None:
    (prompt,) = small.prompts
    settings = {"host_cache_bytes": 8 << 20, "num_pages": 24, "max_context_tokens": 120}
    drawn = SamplingParams(temperature=1.0, seed=3, n=3)
    with LLM(small.path, **(SETTINGS | settings)) as llm:
        for _ in range(2):
            (group,) = llm.generate_all([prompt], drawn, STOP, routes_from=0)
            for sample in group:
                check(small.reference, prompt + sample.token_ids, sample.routes, 0)
            # Others take the pages, so that the prompt comes back from the host's memory.
            others = [[random.randrange(3, VOCAB) for _ in range(80)] for _ in range(4)]
            llm.generate(others, stop=STOP)
        assert llm.engine.tiers is not None
        (host,) = llm.engine.tiers.report()
        assert host.counters["loaded_pages"] > 0


def test_requests_that_are_preempted_keep_their_routes(small: Family) -> None:
    prompts = [[random.randrange(3, VOCAB) for _ in range(30)] for _ in range(4)]
    settings = {"num_pages": 18, "max_context_tokens": 100}
    stop = StopCriteria(max_tokens=40, ignore_eos=True)
    with LLM(small.path, **(SETTINGS | settings)) as llm:
        for prompt, sample in zip(
            prompts, llm.generate(prompts, stop=stop, routes_from=0), strict=True
        ):
            check(small.reference, prompt + sample.token_ids, sample.routes, 0)
        assert llm.engine.counters()["preemptions"] > 0


RANKS = (
    {"tp": 2},
    {"tp": 2, "ep": 2},
    {"tp": 4},
    {"pp": 2},
    {"pp": 2, "tp": 2},
    {"cp": 2},
)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param(kind, ranks, marks=() if at in (1, 3) and not second else pytest.mark.full)
        for second, kind in enumerate(("qwen2-moe", "deepseek-v3", "gpt-oss"))
        for at, ranks in enumerate(RANKS)
    ],
    ids=str,
)
def test_ranks_and_stages(tmp_path: Path, seed: int, kind: str, ranks: dict[str, int]) -> None:
    name, overrides = MOE_FAMILIES[kind]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if "deepseek" in kind else 4}
    experts = {"n_routed_experts": 12} if "deepseek" in kind else {"num_experts": 8}
    if kind == "gpt-oss":
        experts = {"num_local_experts": 8}
    reference = make_reference(name, tmp_path, seed, **{**overrides, **heads, **experts})
    prompts = [[random.randrange(3, VOCAB) for _ in range(count)] for count in (5, 150, 33)]
    settings = {"prefill_chunk_tokens": 96, "max_step_tokens": 128, "host_cache_bytes": 8 << 20}
    with LLM(tmp_path, **(SETTINGS | settings | ranks)) as llm:
        for begin in (0, 3):  # The second time from the cache.
            samples = llm.generate(prompts, stop=STOP, routes_from=begin)
            for prompt, sample in zip(prompts, samples, strict=True):
                check(reference, prompt + sample.token_ids, sample.routes, begin)
    with LLM(tmp_path, **{**SETTINGS, **settings, "enable_return_routed_experts": False}) as llm:
        check_texts(reference, prompts, llm.generate(prompts, stop=STOP), samples)


def test_what_is_refused(small: Family, tmp_path: Path) -> None:
    (prompt,) = small.prompts
    with LLM(small.path, dtype="float32", page_size=PAGE, num_pages=60) as llm:
        assert llm.engine.parts.local.routes is None
        with pytest.raises(InvalidRequest, match="--enable-return-routed-experts"):
            llm.generate([prompt], stop=STOP, routes_from=0)
    with LLM(small.path, **SETTINGS) as llm:
        with pytest.raises(InvalidRequest, match="prompt of 40 tokens"):
            llm.generate([prompt], stop=STOP, routes_from=41)
        (sample,) = llm.generate([prompt], stop=StopCriteria(max_tokens=1), routes_from=40)
        assert not sample.routes
    dense = make_tiny("llama", tmp_path / "dense")
    with pytest.raises(ConfigError, match="no experts"):
        LLM(dense, **SETTINGS)
