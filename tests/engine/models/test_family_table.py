"""Every architecture with every feature, for the table that `scripts/family_table.py` makes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ConfigError, ModelError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.every_family import (
    EVERY_FAMILY,
    gaps_of,
    greedy_tokens,
    load_reference,
    write_model,
)
from weft.testing.models.float32_reference import BFLOAT16_ULPS
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.ling import is_ling, to_ling_adapter
from weft.testing.models.lora_reference import PeftModels
from weft.testing.models.tiny_adapters import peft_model

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("single_thread")]

PAGE, NUM_NEW = 8, 16
ATTENTION = (
    ("q_proj", "qkv_proj", "query_key_value", "c_attn"),
    ("k_proj",),
    ("v_proj",),
    ("o_proj", "dense", "attn.out_proj", "attention.out_proj", "attn.c_proj"),
)
"""Projections of attention, by the ends of their names, of which a model has the first."""
Record = Callable[[str, object], None]


class Case(NamedTuple):
    """A model of both."""

    path: Path
    reference: Any
    prompts: list[list[int]]
    tokens: list[list[int]]
    """What the reference goes on with, in float32."""

    @property
    def config(self) -> ModelConfig:
        """The configuration as it is served."""
        return ModelConfig.load(self.path)


@pytest.fixture(params=EVERY_FAMILY, scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Case:
    path = tmp_path_factory.mktemp(request.param) / "model"
    # Longer than what LongRoPE calls the original length: its other factors are served.
    reference = write_model(request.param, path, seed)
    prompts = [[random.randrange(3, 250) for _ in range(count)] for count in (18, 21, 90)]
    prompts.append(prompts[1][:PAGE] * 3)
    tokens = [greedy_tokens(reference, prompt, NUM_NEW) for prompt in prompts]
    return Case(path, reference, prompts, tokens)


@contextmanager
def cell(case: Case, column: str, record: Record, refusal: str = "") -> Iterator[None]:
    """Names the cell that a test fills; with a refusal the body must end in such an error."""
    record("architecture", case.config.architecture)
    record("column", column)
    if not refusal:
        yield
        return
    with pytest.raises((ConfigError, ModelError), match=refusal) as raised:
        yield
    assert refusal in str(raised.value)
    record("refused", refusal)


def answers(case: Case, model: Path | None = None, **settings: Any) -> list[list[int]]:
    """Greedy tokens of an engine, of the prompts asked twice, which must be alike."""
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    defaults = {"dtype": "float32", "page_size": PAGE, "num_pages": 120}
    with LLM(model or case.path, **(defaults | settings)) as llm:
        params = SamplingParams(temperature=0.0)
        return [sample.token_ids for sample in llm.generate(case.prompts, params, stop)]


def test_float32_tokens(case: Case, record_property: Record) -> None:
    with cell(case, "float32 tokens", record_property):
        assert answers(case) == case.tokens


def test_bfloat16_near_ties(case: Case, record_property: Record) -> None:
    """Each token is the choice of float32 with rounded weights, or within a near-tie of it."""
    with cell(case, "bfloat16 near-ties", record_property):
        rounded = copy.deepcopy(case.reference).to(torch.bfloat16).float()
        gaps: list[float] = []
        for prompt, tokens in zip(case.prompts, answers(case, dtype="bfloat16"), strict=True):
            gaps += gaps_of(rounded, prompt, tokens)
        far = sum(gap > BFLOAT16_ULPS for gap in gaps)
        # Where two experts are nearly alike, rounding decides which one is asked.
        assert far <= (0.1 * len(gaps) if case.config.moe is not None else 0), sorted(gaps)[-5:]


def test_chunked_prefill(case: Case, record_property: Record) -> None:
    with cell(case, "chunked prefill", record_property):
        assert answers(case, prefill_chunk_tokens=2 * PAGE) == case.tokens


def test_prefix_hit(case: Case, record_property: Record) -> None:
    with cell(case, "prefix hit", record_property):
        stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        params = SamplingParams(temperature=0.0)
        with LLM(case.path, dtype="float32", page_size=PAGE, num_pages=120) as llm:
            for _ in range(2):
                samples = llm.generate(case.prompts, params, stop)
            assert [sample.token_ids for sample in samples] == case.tokens
            assert llm.engine.counters()["prefix_hit_tokens"] > 0


@pytest.mark.needs("nixl")
def test_prefill_apart_over_nixl(case: Case, record_property: Record) -> None:
    with cell(case, "P/D over NIXL", record_property):
        clock = ManualClock()
        settings = {"transport": "nixl"}
        owner, filler = (
            make_engine(case.path, role, clock, **settings) for role in ("decode", "prefill")
        )
        pair = EnginePair(owner, [filler], clock)
        try:
            asked = [pair.submit(prompt, NUM_NEW) for prompt in case.prompts]
            assert pair.finish(*asked) == case.tokens
            (fill,) = pair.answers[asked[2]].finished[0].timeline.fills
            assert (fill.accepted_tokens, fill.failure) == (89 // PAGE * PAGE, "")
            pair.settle()
        finally:
            pair.close()


def test_ngram_drafts(case: Case, record_property: Record) -> None:
    with cell(case, "n-gram drafts", record_property):
        assert answers(case, drafter="ngram") == case.tokens


def test_lora(case: Case, record_property: Record, tmp_path: Path) -> None:
    """Of attention, for the first prompts of a batch with and without the adapter."""
    with cell(case, "LoRA of attention", record_property):
        models = PeftModels(case.path, tmp_path)
        names = [name for name, _ in case.reference.named_modules()]
        found = ([t for t in ends if any(n.endswith(t) for n in names)] for ends in ATTENTION)
        targets = [ends[0] for ends in found if ends]
        if case.config.latent is not None:
            targets = ["o_proj"]
            record_property("limit", "o_proj alone")
        wanted: list[str] | str = targets
        if hasattr(case.reference.config, "vision_config"):
            wanted = rf".*(language_model|text_model)\..*\.({'|'.join(targets)})"
        if is_ling(case.path):
            model = peft_model(case.path, 7, r=5, target_modules=["o_proj"])
            model.save_pretrained(tmp_path / "adapter")
            digest = models.put(to_ling_adapter(tmp_path / "adapter"), model)
        else:
            digest = models.add(7, r=5, target_modules=wanted)
        settings = {"dtype": "float32", "page_size": PAGE, "num_pages": 64}
        stop = StopCriteria(max_tokens=8, ignore_eos=True)
        with LLM(case.path, enable_lora=True, **settings) as llm:
            assert llm.load_adapter(models.directories[digest]) == digest
            (sample,) = llm.generate(
                case.prompts[1:2], stop=stop, top_logprobs=5, adapters=[digest]
            )
            models.check(digest, case.prompts[1], sample)


def test_quantised_layout(case: Case, record_property: Record, tmp_path: Path) -> None:
    """FP8 with scales of rows; what is one tensor of all experts stays in floats."""
    refusal = "matrices are stored by columns" if case.config.names.has_transposed else ""
    with cell(case, "FP8 by rows", record_property, refusal):
        if not (case.path / "model.safetensors").exists():
            pytest.fail("the model is in several files")
        path, floats = fp8_copy(case.path, tmp_path / "fp8", "channel")
        reference = load_reference(floats)
        expected = [greedy_tokens(reference, prompt, NUM_NEW) for prompt in case.prompts]
        assert answers(case, path) == expected
