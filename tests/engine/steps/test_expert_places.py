"""Experts that get other ranks while requests run: texts stay as they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from weft.contract.errors import ConfigError, ExpertsFixed
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.executor.expert_moves import ExpertMoves, digest_there
from weft.engine.loop.llm import LLM
from weft.engine.parallel.expert_places import UNUSED, Placement
from weft.testing.engine.moved_experts import Shuffler, random_placement
from weft.testing.models.choices import check_same
from weft.testing.models.every_family import load_reference
from weft.testing.models.families import FAMILIES, make_family
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.int_models import LAYOUTS, packed_models
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.mxfp4_models import as_mxfp4
from weft.testing.models.nvfp4_models import nvfp4_models
from weft.testing.models.quantised_models import quantised_copy
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

VOCAB = 251
SIZES = {
    "num_pages": 96,
    "page_size": 8,
    "prefill_chunk_tokens": 24,
    "max_step_tokens": 48,
    "max_running_requests": 8,
}
BALANCED = {"tp": 2, "ep": 2, "balance_experts": "order", "redundant_experts": 1}
STOP = StopCriteria(max_tokens=16, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0)


def make_model(folder: Path, seed: int, **fields: Any) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 8}
    sizes = heads | {"moe_intermediate_size": 43, "vocab_size": VOCAB} | fields
    return make_tiny("qwen3_moe", folder, seed, tokenizer=True, **sizes)


def make_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "rank_timeout_s": 60.0} | SIZES | settings)


def random_prompts() -> list[list[int]]:
    return [[random.randrange(3, 250) for _ in range(length)] for length in (5, 90, 33, 47)]


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [sample.token_ids for sample in llm.generate(prompts, GREEDY, STOP)]


def check_shuffled(
    folder: Path, load: Callable[[], Any] | None, changes: int, **settings: Any
) -> None:
    """Texts are those of one rank, until so many layers have got other places under load.

    Args:
        load: Makes the reference by which close choices are known; None: texts are equal.
    """
    prompts = random_prompts()
    with make_llm(folder, **{k: v for k, v in settings.items() if k == "quantization"}) as llm:
        alone = tokens_of(llm, prompts)
    with make_llm(folder, **BALANCED | settings) as llm:
        shuffler = Shuffler(llm)
        while shuffler.num_changes < changes:
            for prompt, found, right in zip(prompts, tokens_of(llm, prompts), alone, strict=True):
                if load is None:
                    assert found == right
                else:
                    check_same(load, prompt, found, right)


def test_texts_stay_while_experts_move_at_random(tmp_path: Path, seed: int) -> None:
    folder = make_model(tmp_path / "model", seed)
    check_shuffled(folder, partial(load_reference, folder), 12)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("spares", [0, 2])
def test_forty_random_placements_of_a_model(
    size: int, spares: int, tmp_path: Path, seed: int
) -> None:
    folder = make_model(tmp_path / "model", seed)
    of_ranks = {"tp": size, "ep": size, "redundant_experts": spares}
    check_shuffled(folder, partial(load_reference, folder), 40, **of_ranks)


EXPERTS = {
    "deepseek-v3": ("n_routed_experts", 12),
    "gpt-oss": ("num_local_experts", 8),
    "qwen2-moe": ("num_experts", 8),
    "llama4": ("num_local_experts", 4),
    "nemotron_h-experts": ("n_routed_experts", 12),
}


@pytest.mark.full
@pytest.mark.parametrize("name", EXPERTS)
def test_forty_random_placements_of_a_family(name: str, tmp_path: Path, seed: int) -> None:
    folder, fields = tmp_path / "model", dict([EXPERTS[name]])
    if name in FAMILIES:
        make_family(name, folder, seed, **fields)
    else:
        kind, own = MOE_FAMILIES[name]
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
        make_reference(kind, folder, seed, **{**own, **heads, **fields})
    check_shuffled(folder, partial(load_reference, folder), 40)


FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    "fp8 blocks": lambda source, path: fp8_copy(source, path, "blocks")[0],
    "fp8 channels": lambda source, path: fp8_copy(source, path, "channel")[0],
    "int8": quantised_copy,
    "int4": lambda source, path: packed_models(source, path, LAYOUTS["compressed-tensors"])[0],
    "int4 in order": lambda source, path: packed_models(source, path, LAYOUTS["gptq"])[0],
    "nvfp4": lambda source, path: nvfp4_models(source, "compressed-tensors")[0],
}


@pytest.mark.full
@pytest.mark.parametrize("quantization", [*FORMATS, "load int8", "load int4"])
def test_forty_random_placements_of_quantised_experts(
    quantization: str, tmp_path: Path, seed: int
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 128}
    sizes |= {"intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_model(tmp_path / "model", seed, **sizes)
    settings: dict[str, Any] = {}
    if quantization in FORMATS:
        folder = FORMATS[quantization](folder, tmp_path / "quantised")
    else:
        settings = {"quantization": quantization.removeprefix("load ")}
    check_shuffled(folder, None, 40, **settings)


@pytest.mark.full
def test_forty_random_placements_of_experts_in_mxfp4(tmp_path: Path, seed: int) -> None:
    _, fields = MOE_FAMILIES["gpt-oss"]
    sizes = {"intermediate_size": 96, "hidden_size": 96, "num_local_experts": 8}
    make_reference("gpt_oss", tmp_path, seed, **{**fields, **sizes})
    as_mxfp4(tmp_path)
    check_shuffled(tmp_path, None, 40)


# -- counts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_model(tmp_path_factory.mktemp("counted") / "model", seed)


def test_counts_are_those_of_the_tokens_routes(model: Path) -> None:
    """Which pages keep, by another way."""
    prompts = random_prompts()
    with make_llm(model, enable_return_routed_experts=True) as llm:
        assert llm.command_experts("start").is_counting
        samples = llm.generate(prompts, GREEDY, STOP, routes_from=0)
        state = llm.command_experts("stop")
        llm.generate(random_prompts(), GREEDY, STOP)
        dumped = llm.command_experts("dump")
        routes = np.concatenate([one for sample in samples for one in sample.routes])
        assert not state.is_counting
        assert dumped.num_steps == state.num_steps > len(samples[0].token_ids)
        assert len(dumped.layers) == routes.shape[1]
        for found in dumped.layers:
            chosen = np.bincount(routes[:, found.layer].ravel(), minlength=8)
            assert found.rows == chosen.tolist()
            assert all(0 < n <= dumped.num_steps for n in found.steps)
        assert llm.command_experts("start").num_steps == 0


def test_a_placement_by_counts_is_put_in_place(model: Path) -> None:
    prompts = random_prompts()
    with make_llm(model, **BALANCED | {"redundant_experts": 2}) as llm:
        with pytest.raises(ExpertsFixed, match="start counting"):
            llm.command_experts("balance")
        llm.command_experts("start")
        before = tokens_of(llm, prompts)
        counted = llm.command_experts("dump")
        balance = llm.command_experts("balance").balance
        assert balance is not None
        after = llm.command_experts("dump")
        for old, new in zip(counted.layers, after.layers, strict=True):
            assert old.rows == new.rows
            assert new.imbalance <= old.imbalance
        changed = sum(
            a.places != b.places for a, b in zip(counted.layers, after.layers, strict=True)
        )
        assert balance.num_placements == changed
        assert (balance.num_failed, balance.problem) == (0, "")
        assert sorted(set(after.layers[0].places) - {UNUSED}) == list(range(8))
        load = partial(load_reference, model)
        for prompt, found, right in zip(prompts, tokens_of(llm, prompts), before, strict=True):
            check_same(load, prompt, found, right)


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A bit of the first expert that rank 0 sends is flipped, so many times."""
    times, send = [1], ExpertMoves._send

    def damage(self: ExpertMoves, layer: int, sends: Any, *others: Any) -> Any:
        result = send(self, layer, sends, *others)
        if sends and times[0]:
            times[0] -= 1
            self._room(layer, sends[0][0])[3].bitwise_xor_(torch.tensor(8, dtype=torch.uint8))
        return result

    monkeypatch.setattr(ExpertMoves, "_send", damage)
    return times


def test_the_digest_of_a_device_shows_every_damaged_byte() -> None:
    """Tensors of any length that begin anywhere, as of experts that lie one after another."""
    flat = torch.randint(0, 256, (400,), dtype=torch.uint8)
    begins = sorted(random.sample(range(1, 400), 4))
    pieces = [flat[begin:end] for begin, end in pairwise(begins)]
    digest = digest_there(pieces)
    assert digest_there([piece.clone() for piece in pieces]) == digest
    for at in random.sample(range(begins[0], begins[-1]), min(20, begins[-1] - begins[0])):
        flat[at] ^= 1 << random.randrange(8)
        assert digest_there(pieces) != digest
        digest = digest_there(pieces)


def test_a_copy_that_comes_damaged_leaves_the_old_placement(
    model: Path, damaged: list[int]
) -> None:
    prompts = random_prompts()
    with make_llm(model, **BALANCED) as llm:
        experts = llm.engine.experts
        right, old = tokens_of(llm, prompts), experts.placements
        first, *others = experts.placements
        swapped = Placement(((4, 1, 2, 3, UNUSED), (0, 5, 6, 7, UNUSED)), 8)
        wanted = {first: swapped} | {n: random_placement(old[n]) for n in others}
        experts.begin(wanted)
        load = partial(load_reference, model)
        while experts.job is not None:
            for prompt, found, its in zip(prompts, tokens_of(llm, prompts), right, strict=True):
                check_same(load, prompt, found, its)
        balance = experts.balance
        assert balance is not None
        assert (balance.num_failed, balance.num_placements) == (1, len(others))
        assert f"layer {first}: expert 0 came damaged to rank 1" in balance.problem
        assert experts.placements == wanted | {first: old[first]}
        experts.begin({first: swapped})
        for prompt, found, its in zip(prompts, tokens_of(llm, prompts), right, strict=True):
            check_same(load, prompt, found, its)


@pytest.mark.full
def test_experts_get_other_ranks_by_themselves(model: Path) -> None:
    """Out of places that leave one rank with a quarter of the experts."""
    auto = {"balance_experts": "auto", "balance_interval_s": 0.05, "balance_above": 1.0}
    prompts = random_prompts()
    with make_llm(model, **BALANCED | auto | {"redundant_experts": 2}) as llm:
        experts, load = llm.engine.experts, partial(load_reference, model)
        right = tokens_of(llm, prompts)
        uneven = Placement(((0, 1, 2, 3, 4, 5), (6, 7, *[UNUSED] * 4)), 8)
        experts.begin(dict.fromkeys(experts.placements, uneven))
        while experts.job is not None or uneven in experts.placements.values():
            for prompt, found, its in zip(prompts, tokens_of(llm, prompts), right, strict=True):
                check_same(load, prompt, found, its)
        balance = experts.balance
        assert balance is not None
        assert balance.imbalance > 1.0
        assert balance.num_failed == 0


@pytest.mark.full
def test_other_weights_come_to_where_experts_were_at_the_start(
    model: Path, tmp_path: Path, seed: int
) -> None:
    other, prompts = make_model(tmp_path / "other", seed + 1), random_prompts()
    with make_llm(other) as llm:
        right = tokens_of(llm, prompts)
    with make_llm(model, **BALANCED) as llm:
        shuffler = Shuffler(llm)
        while shuffler.num_changes < 6:
            tokens_of(llm, prompts)
        llm.engine.turn = shuffler._turn  # type: ignore[method-assign]
        while llm.engine.experts.job is not None:
            tokens_of(llm, prompts)
        with pytest.raises(ConfigError, match="other places"):
            llm.offer_weights()
        llm.refit(other)
        first = Placement.first(8, 2, 1)
        assert set(llm.engine.experts.placements.values()) == {first}
        load = partial(load_reference, other)
        for prompt, found, its in zip(prompts, tokens_of(llm, prompts), right, strict=True):
            check_same(load, prompt, found, its)


def test_what_does_not_go_together_is_refused(model: Path) -> None:
    for settings, wanted in (
        ({"balance_experts": "auto"}, "ep = 1"),
        ({"redundant_experts": 1}, "balance_experts = off"),
        (BALANCED | {"deterministic": True}, "off with deterministic"),
        (BALANCED | {"enable_lora": True}, "off with enable_lora"),
        (BALANCED | {"redundant_experts": 5}, "at most 4"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            make_llm(model, **settings)
    with make_llm(model) as llm:
        llm.command_experts("start")
        with pytest.raises(ExpertsFixed, match="balance_experts"):
            llm.command_experts("balance")
