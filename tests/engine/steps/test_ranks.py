"""Several ranks make the text that one makes, and end together."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ConfigError, RanksLost
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.engine.base.config import EngineConfig
from weft.engine.executor.ranks import start
from weft.engine.loop.combinations import check_combination
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.engine.parallel.shards import check_divides
from weft.testing.models.choices import NEAR_TIE, OF_STATES, check_same, where_experts_are_sure
from weft.testing.models.every_family import load_reference
from weft.testing.models.families import FAMILIES, HYBRIDS, HYBRIDS_WITH_IMAGES
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.int_models import LAYOUTS, packed_models
from weft.testing.models.moe_families import MOE_FAMILIES, make_any_family
from weft.testing.models.mxfp4_models import as_mxfp4
from weft.testing.models.nvfp4_models import nvfp4_models
from weft.testing.models.quantised_models import quantised_copy
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

VOCAB, LIMIT_S = 517, 3.0
LATE_S = 60.0
"""Time that a busy machine may take beyond a limit. Without one, ranks wait for ever."""
GREEDY = SamplingParams(temperature=0.0)
SIZES = {"num_attention_heads": 8, "moe_intermediate_size": 44}
CASES = [
    ("qwen3_moe", 2),
    *(
        pytest.param(kind, size, marks=pytest.mark.full)
        for kind in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
        for size in (2, 4)
        if (kind, size) != ("qwen3_moe", 2)
    ),
]


def make_model(kind: str, folder: Path, seed: int, **settings: Any) -> Path:
    return make_tiny(kind, folder, seed, tokenizer=True, vocab_size=VOCAB, **SIZES, **settings)


def make_llm(folder: Path, **settings: Any) -> LLM:
    sizes = {"page_size": 8, "prefill_chunk_tokens": 24, "max_step_tokens": 48, "num_pages": 48}
    sizes |= {"max_running_requests": 8, "rank_timeout_s": 60.0, "poison_free_pages": True}
    drafts = {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 3}
    return LLM(folder, **{"dtype": "float32"} | sizes | drafts | settings)


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    shared = [random.randrange(3, VOCAB) for _ in range(40)]
    return [(shared + [random.randrange(3, VOCAB) for _ in range(n)])[-n:] for n in lengths]


def sampled(rows: int) -> list[SamplingParams]:
    """Greedy, drawn, penalised and constrained ones, and ones that repeat themselves."""
    choice = Constraint(kind="regex", text="[ab]{3,9}c")
    kinds = (
        GREEDY,
        SamplingParams(temperature=0.8, top_k=20, seed=random.randrange(1 << 60)),
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, constraint=choice),
        replace(GREEDY, logit_bias=dict.fromkeys((7, 8, 9), 50.0)),
    )
    return [kinds[row % len(kinds)] for row in range(rows)]


def run(llm: LLM, prompts: list[list[int]], kinds: list[SamplingParams]) -> list[GeneratedSample]:
    stop = StopCriteria(max_tokens=40)
    first = llm.generate(prompts, kinds, stop, top_logprobs=2)
    again = llm.generate(prompts, kinds, stop, prompt_logprobs=1)
    hits = [llm.generate(prompts[1:2], GREEDY, stop)[0] for _ in range(2)]
    return first + again + hits


def mapped_files(before: list[psutil.Process]) -> list[set[str]]:
    """The shared memory and native libraries that each rank but rank 0 has mapped."""
    ranks = [one for one in psutil.Process().children() if one not in before]
    maps = [Path(f"/proc/{one.pid}/maps").read_text().splitlines() for one in ranks]
    return [
        {line.split(maxsplit=5)[-1] for line in lines if "memfd:" in line or ".so" in line}
        for lines in maps
    ]


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_texts_are_those_of_one_rank(kind: str, size: int, tmp_path: Path, seed: int) -> None:
    """With prompts in chunks, prefix hits, drafts, constraints, and too few pages for all.

    What the ranks meet in and run is there when the engine is.
    """
    folder = make_model(kind, tmp_path / "model", seed, attention_bias=kind == "llama")
    prompts = random_prompts((5, 90, 41, 77, 12, 63, 100, 33, 54))
    kinds = sampled(len(prompts))
    with make_llm(folder) as llm:
        alone = run(llm, prompts, kinds)
    others = psutil.Process().children()
    with make_llm(folder, tp=size, check_ranks=True) as llm:
        (notice,) = (text for text in llm.engine.info.notices if "tensor parallel" in text)
        assert f"{size} ranks" in notice
        mapped = mapped_files(others)
        assert len(mapped) == size - 1
        assert all(any("memfd:" in name for name in names) for names in mapped)
        together = run(llm, prompts, kinds)
        assert mapped_files(others) == mapped
        counters = llm.engine.counters()
    for name in ("accepted_tokens", "preemptions", "prefix_hit_tokens"):
        assert counters[name] > 0, (name, counters)
    load = partial(load_reference, folder)
    every = [*kinds, *kinds, GREEDY, GREEDY]
    asked = zip([*prompts, *prompts, *prompts[1:2] * 2], every, strict=True)
    for (prompt, params), one, other in zip(asked, alone, together, strict=True):
        check_same(load, prompt, other.token_ids, one.token_ids, params)
        if other.token_ids != one.token_ids:
            continue
        assert other.finish_reason == one.finish_reason
        with where_experts_are_sure(load, [*prompt, *one.token_ids]):
            for mine, right in zip(
                [*other.logprobs, *other.prompt_logprobs],
                [*one.logprobs, *one.prompt_logprobs],
                strict=True,
            ):
                assert mine.logprob == pytest.approx(right.logprob, abs=1e-3)


def greedy_texts(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    stop = StopCriteria(max_tokens=16, ignore_eos=True)
    with make_llm(folder, num_pages=96, **settings) as llm:
        return [sample.token_ids for sample in llm.generate(prompts, GREEDY, stop)]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "ep"), [("llama", 1), ("qwen3_moe", 1), ("qwen3_moe", 2)])
def test_deterministic_results_are_the_same_bits_in_any_company(
    kind: str, ep: int, dtype: str, tmp_path: Path, seed: int
) -> None:
    """Together, alone, and with prompts in other pieces; with and without adapters."""
    folder = make_model(kind, tmp_path / "model", seed, **({} if ep == 1 else {"num_experts": 8}))
    config = json.loads((folder / "config.json").read_text())
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = make_adapter(tmp_path / "adapter", config, seed, rank=9, targets=attention)
    prompts = random_prompts((70, 1, 9, 33, 5, 50))
    settings: dict[str, Any] = {"drafter": "none", "deterministic": True, "enable_lora": True}
    settings |= {"num_pages": 120, "dtype": dtype, "lora_projections": ("q", "k", "v", "o")}

    def bits(llm: LLM, chosen: list[int]) -> list[Any]:
        named = [llm.load_adapter(adapter), b""]
        stop = StopCriteria(max_tokens=8, ignore_eos=True)
        adapters = [named[number % 2] for number in chosen]
        some = [prompts[number] for number in chosen]
        found = llm.generate(some, None, stop, 3, adapters)
        return [[(t.token_id, t.logprob, t.top) for t in one.logprobs] for one in found]

    everyone = list(range(len(prompts)))
    settings |= {"tp": 2, "ep": ep}
    with make_llm(folder, **settings) as llm:
        together = bits(llm, everyone)
    settings |= {"prefill_chunk_tokens": 8, "max_step_tokens": 16, "prefix_cache": False}
    with make_llm(folder, **settings) as llm:
        assert bits(llm, everyone) == together
        assert [bits(llm, [number])[0] for number in everyone] == together


@pytest.mark.full
@pytest.mark.parametrize("name", [*FAMILIES, *MOE_FAMILIES])
def test_texts_of_other_families_are_those_of_one_rank(
    name: str, tmp_path: Path, seed: int
) -> None:
    folder = tmp_path / "model"
    make_any_family(name, folder, seed)
    config = ModelConfig.load(folder)
    try:
        check_divides(config, 2)
    except ConfigError as error:
        pytest.skip(f"not divided: {error}")
    prompts = [[random.randrange(3, 250) for _ in range(length)] for length in (5, 60, 33)]
    near_tie = OF_STATES if name in (*HYBRIDS, *HYBRIDS_WITH_IMAGES) else NEAR_TIE
    stop, samples = StopCriteria(max_tokens=16, ignore_eos=True), []
    for size in (2, 1):
        with make_llm(folder, num_pages=96, tp=size) as llm:
            samples.append(llm.generate(prompts, GREEDY, stop, top_logprobs=4))
    load = partial(load_reference, folder)
    for prompt, found, expected in zip(prompts, *samples, strict=True):
        check_same(load, prompt, found.token_ids, expected.token_ids, near_tie=near_tie)
        right = dict(expected.logprobs[0].top)
        with where_experts_are_sure(load, prompt):
            for token, logprob in found.logprobs[0].top:
                assert abs(logprob - right.get(token, logprob)) < max(1e-3, 20 * near_tie)


FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    "fp8 blocks": lambda source, path: fp8_copy(source, path, "blocks")[0],
    "fp8 channels": lambda source, path: fp8_copy(source, path, "channel")[0],
    "int8": quantised_copy,
    "gptq": lambda source, path: packed_models(source, path, LAYOUTS["gptq"])[0],
    "nvfp4": lambda source, path: nvfp4_models(source, "modelopt")[0],
}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("quantization", [*FORMATS, "load int8", "load int4"])
def test_texts_of_quantised_weights_are_those_of_one_rank(
    quantization: str, kind: str, tmp_path: Path, seed: int
) -> None:
    if (quantization, kind) == ("gptq", "qwen3_moe"):
        pytest.skip("routers stay in floats there")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    folder = make_tiny(kind, tmp_path / "model", seed, tokenizer=True, vocab_size=VOCAB, **sizes)
    settings: dict[str, Any] = {}
    if quantization in FORMATS:
        folder = FORMATS[quantization](folder, tmp_path / "quantised")
    else:
        settings = {"quantization": quantization.removeprefix("load ")}
    prompts = random_prompts((5, 60, 33))
    alone = greedy_texts(folder, prompts, **settings)
    assert greedy_texts(folder, prompts, tp=2, **settings) == alone


@pytest.mark.full
@pytest.mark.parametrize("inner", [64, 96])
def test_texts_of_experts_in_mxfp4_are_those_of_one_rank(
    inner: int, tmp_path: Path, seed: int
) -> None:
    """Also where a rank's columns begin within a group of 32."""
    _, fields = MOE_FAMILIES["gpt-oss"]
    sizes = {"intermediate_size": inner, "hidden_size": 96}
    make_reference("gpt_oss", tmp_path, seed, **{**fields, **sizes})
    as_mxfp4(tmp_path)
    prompts = [[random.randrange(3, 250) for _ in range(length)] for length in (5, 60, 33)]
    assert greedy_texts(tmp_path, prompts, tp=2) == greedy_texts(tmp_path, prompts)


@pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.full)])
def test_ranks_that_are_late_at_every_step_change_nothing(
    size: int, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by random delays of its own; four ranks share two KV heads."""
    heads = {"num_key_value_heads": 2, "attention_bias": True}
    folder = make_model("llama", tmp_path / "model", seed, **heads)
    prompts, kinds = random_prompts((5, 90, 41, 77)), sampled(4)
    stop = StopCriteria(max_tokens=12, ignore_eos=True)
    with make_llm(folder) as llm:
        alone = llm.generate(prompts, kinds, stop)
    monkeypatch.setattr(start, "MODULE", "weft.testing.engine.odd_rank")
    monkeypatch.setenv("ODD_RANK", "late")
    with make_llm(folder, tp=size, check_ranks=True) as llm:
        together = llm.generate(prompts, kinds, stop)
    load = partial(load_reference, folder)
    for prompt, params, one, other in zip(prompts, kinds, alone, together, strict=True):
        check_same(load, prompt, other.token_ids, one.token_ids, params)


def generate_on_and_on(llm: LLM) -> None:
    while True:
        llm.generate(random_prompts((50, 20)), stop=StopCriteria(max_tokens=60))


@pytest.mark.parametrize(
    "how",
    ["killed", "stopped", *(pytest.param(h, marks=pytest.mark.full) for h in ("fails", "differs"))],
)
def test_a_rank_that_is_lost_ends_the_engine_in_time(
    how: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("llama", tmp_path / "model", seed)
    is_odd = how in ("fails", "differs")
    if is_odd:
        monkeypatch.setattr(start, "MODULE", "weft.testing.engine.odd_rank")
        monkeypatch.setenv("ODD_RANK", "30" if how == "fails" else how)
    limits: dict[str, Any] = {"check_ranks": how == "differs"}
    if how == "stopped":  # A rank that is slow on a busy machine is none that was killed.
        limits["rank_timeout_s"] = LIMIT_S
    before = psutil.Process().children()
    with make_llm(folder, tp=2, **limits) as llm:
        ranks = [one for one in psutil.Process().children() if one not in before]
        lost_at = time.monotonic()

        def strike() -> None:
            nonlocal lost_at
            lost_at = time.monotonic()
            os.kill(ranks[-1].pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)

        timer = threading.Timer(0.5, strike)
        if not is_odd:
            timer.start()
        wanted = {
            "killed": "signal 9",
            "stopped": "has not come",
            "fails": "out of luck",
            "differs": "another stream",
        }[how]
        with pytest.raises(RanksLost, match=f"rank 1.*{wanted}") as lost:
            generate_on_and_on(llm)
        assert "step" in str(lost.value)
        if not is_odd:
            timer.join()
            assert time.monotonic() - lost_at < LIMIT_S + LATE_S
        with pytest.raises(RanksLost):
            llm.engine.turn()
    assert not any(rank.is_running() for rank in ranks)


def test_a_rank_that_does_not_answer_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "START_LIMIT_S", 0.05)  # Less than it takes to import torch.
    monkeypatch.setattr(start, "_EXIT_S", 0.1)
    others = psutil.Process().children()
    with pytest.raises(ConfigError, match="rank 1 does not answer"):
        LLM(make_model("llama", tmp_path / "model", 0), tp=2, num_pages=48)
    assert set(psutil.Process().children()) <= set(others)


def test_what_ranks_cannot_do_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model", 0)
    with pytest.raises(ConfigError, match=r"query heads.*tp = 1, 2, 4, 8"):
        LLM(folder, tp=3)
    with pytest.raises(ConfigError, match=r"check_ranks.*off with tp = 1"):
        LLM(folder, check_ranks=True)
    with pytest.raises(ConfigError, match=r"check_ranks.*off on GPUs"):
        LLM(folder, tp=2, check_ranks=True, device="cuda")
    with pytest.raises(ConfigError, match="drafter = model"):
        LLM(folder, tp=2, drafter="model", draft_dir=folder)
    with pytest.raises(ConfigError, match="draft_width"):
        LLM(folder, tp=2, drafter="eagle3", draft_dir=folder, draft_width=2)
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    with pytest.raises(ConfigError, match="task embed"):
        check_combination(EngineConfig(model_dir=folder, tp=2, device="cuda:0,cuda:1"))
