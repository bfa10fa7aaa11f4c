"""Families that take images against transformers: rows of towers, and tokens of prompts with one to
four images, in chunks, behind cached prefixes, with adapters, drafts and ranks, in FP8, and filled
by another worker.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from weft.contract.messages import Inbox
from weft.contract.request import StopCriteria
from weft.contract.spans import MediaSpan
from weft.engine.executor import embeddings
from weft.engine.executor.encoder_graphs import EncoderGraphs, Pass
from weft.engine.executor.media_warm_up import warm_up_media
from weft.engine.loop.llm import LLM
from weft.engine.model.interface import HasBudgets, MediaEncoder
from weft.engine.model.loader import load_model
from weft.engine.model.step import Step
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import check_choices
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.image_families import (
    FAMILIES,
    ImageFamily,
    Prompt,
    normalised,
    pixels_of,
    text,
)
from weft.testing.models.tiny_qwen_vl import QWEN_FAMILIES

pytestmark = pytest.mark.usefixtures("single_thread")

NEAR_TIE = 3e-5
"""A tower adds its roundings to those of the language model."""
COUNT = 10
STOP = StopCriteria(max_tokens=COUNT, ignore_eos=True)
LANGUAGE_MODEL = ["q_proj", "v_proj", "o_proj", "down_proj"]


class Case:
    """One family's model, and transformers' reading of it."""

    def __init__(self, family: ImageFamily, folder: Path) -> None:
        self.family, self.folder = family, folder
        self.model = load_reference(folder)

    def prompts(self, *counts: int) -> list[Prompt]:
        return [self.family.prompt([self.family.picture() for _ in range(n)]) for n in counts]

    def check(self, prompt: Prompt, tokens: list[int], model: Any = None) -> None:
        """Each token is the model's choice, where float32 can tell."""
        assert len(tokens) == COUNT
        logits = self.family.logits(self.model if model is None else model, prompt, tokens)
        check_choices(logits, tokens, NEAR_TIE)


def load_reference(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def param(name: str) -> Any:
    """Experts have nothing to do with images. Qwen2-VL has a test of its own, and Llama 4 that of
    its files (test_forms_of_families.py).
    """
    is_full = name.endswith("moe") or name in ("llama4", "qwen2_vl")
    return pytest.param(name, marks=[pytest.mark.full] if is_full else [])


@pytest.fixture(scope="module", params=[param(name) for name in (*FAMILIES, *QWEN_FAMILIES)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    family = {**FAMILIES, **QWEN_FAMILIES}[request.param]()
    return Case(family, family.make(tmp_path_factory.mktemp("family") / "model", seed))


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, dtype="float32", **{"num_pages": 400, **settings})


def run(llm: LLM, *prompts: Prompt, **options: Any) -> list[Any]:
    llm.put([one for prompt in prompts for one in prompt.media])
    ids, spans = [prompt.ids for prompt in prompts], [prompt.spans for prompt in prompts]
    return llm.generate(ids, stop=STOP, spans=spans, **options)


def test_rows_are_those_of_transformers(case: Case) -> None:
    """Pictures of several sizes together, and each alone."""
    encoder = load_model(case.folder, "float32", images=True).encoder
    assert encoder is not None
    media = [case.family.picture() for _ in range(4)]
    wanted = case.family.rows(case.model, [normalised(one) for one in media])
    together = encoder.encode([pixels_of(one) for one in media])
    assert len(together) == sum(encoder.rows_of(one.shape) for one in media)
    for one, rows in zip(media, wanted, strict=True):
        found, together = together[: len(rows)], together[len(rows) :]
        assert float((found - rows).abs().max() / rows.abs().max()) < 1e-5
        assert torch.equal(encoder.encode([pixels_of(one)]), found)


def rerun(run: Pass) -> Pass:
    """In place of a capture where there are no CUDA graphs."""
    return run


def test_passes_of_fixed_sizes_make_equal_rows(case: Case) -> None:
    """Batches one after another in the same memory: none sees what an earlier one left."""
    encoder = load_model(case.folder, "float32", images=True).encoder
    assert isinstance(encoder, HasBudgets)
    largest = max(encoder.cost_of(case.family.picture().shape) for _ in range(9))
    graphs = EncoderGraphs(encoder.budgets(max(600, 4 * largest)), rerun)
    for count in (3, 1, 4, 1, 2):
        media = [pixels_of(case.family.picture()) for _ in range(count)]
        found = graphs.encode(media)
        wanted = encoder.encode(media)
        if sum(encoder.cost_of(one.shape) for one in media) <= max(600, 4 * largest):
            assert found is not None
            assert torch.equal(found, wanted)
        else:
            assert found is None
    assert graphs.encode([pixels_of(case.family.picture())] * 400) is None


def test_engines_encode_by_passes_of_fixed_sizes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding, and pictures that no pass has room for."""

    def capture(encoder: MediaEncoder, max_cost: int, *rest: object) -> EncoderGraphs:
        assert isinstance(encoder, HasBudgets)
        return EncoderGraphs(encoder.budgets(max_cost), rerun)

    monkeypatch.setattr(embeddings, "capture_encoder", capture)
    prompts = case.prompts(1, 4)
    costs = list[int]()
    with engine(case.folder, max_step_patches=random.choice((1, 100, 500))) as llm:
        media = llm.engine.parts.local.media
        assert media is not None
        media.capture()
        encode = media.encoder.encode

        def seen(pictures: list[torch.Tensor]) -> torch.Tensor:
            costs.append(sum(media.encoder.cost_of(one.shape) for one in pictures))
            return encode(pictures)

        monkeypatch.setattr(media.encoder, "encode", seen)
        for prompt, sample in zip(prompts, run(llm, *prompts), strict=True):
            case.check(prompt, sample.token_ids)
        assert all(cost > media.max_cost for cost in costs)


class Seen:
    """What the executor of an engine computes for prompts with media: kinds of steps with rows of
    media, and of calls of the tower.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executor = llm.engine.parts.local
        media = self.executor.media
        assert media is not None
        self.media, self.kinds = media, set[tuple[object, ...]]()
        encode, forward = media.encoder.encode, self.executor._model.forward

        def seen_encode(pictures: list[torch.Tensor]) -> torch.Tensor:
            num_patches = sum(media.encoder.cost_of(one.shape) for one in pictures)
            self.kinds.add(("tower", len(pictures) > 1))
            self.kinds.add(("patches", num_patches % 16 == 0))
            return encode(pictures)

        def seen_forward(step: Step, pool: torch.Tensor) -> torch.Tensor:
            if step.inserted is not None or step.axes is not None:
                group = step.groups[0]
                before = group.kv_lens[-1] - group.cu_q_lens[-1] + group.cu_q_lens[-2]
                has = (step.inserted, step.axes, group.key_ends)
                width = group.page_table.shape[1]
                self.kinds.add(
                    ("rows", *(one is not None for one in has), len(step.token_ids) % 16 == 0)
                )
                self.kinds.add(("adapters", step.lora is not None))
                has_others = len(group.kv_lens) > 1
                self.kinds.add(("before", bool(before), has_others))
                self.kinds.add(("table", has_others, width == 1, width % 16 == 0))
            return forward(step, pool)

        monkeypatch.setattr(media.encoder, "encode", seen_encode)
        monkeypatch.setattr(self.executor._model, "forward", seen_forward)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            name, marks=[] if name in ("gemma3", "qwen3_vl", "qwen3_5") else [pytest.mark.full]
        )
        for name in (*FAMILIES, *QWEN_FAMILIES)
    ],
    indirect=True,
)
def test_a_warm_up_computes_what_first_images_need(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine on a GPU does this at its start. Every kind of step that a prompt with images then
    takes has been computed, and answers are as ever.
    """
    settings = {"max_step_tokens": 512, "prefill_chunk_tokens": 96, "max_context_tokens": 2048}
    with engine(case.folder, **settings, enable_lora=True) as llm:
        seen = Seen(llm, monkeypatch)
        warm_up_media(seen.executor, seen.media, 8, 512, 2048, has_steps=True)
        warmed, seen.kinds = seen.kinds, set()
        prompts = case.prompts(1, 4)
        for prompt, found in zip(prompts, run(llm, *prompts), strict=True):
            case.check(prompt, found.token_ids)
    assert ("adapters", True) in warmed
    kinds = {"tower", "patches", "rows", "adapters", "before", "table"}
    assert {kind[0] for kind in seen.kinds} == kinds
    assert seen.kinds <= warmed


@pytest.mark.parametrize("chunk", [256, 16])
def test_tokens_are_those_of_transformers(case: Case, chunk: int) -> None:
    """In a batch, with little memory for rows, and chunks that hold whole prompts or not even the
    tokens of one image.
    """
    prompts = case.prompts(1, 2, 4)
    with engine(case.folder, prefill_chunk_tokens=chunk, media_rows=64) as llm:
        for prompt, sample in zip(prompts, run(llm, *prompts), strict=True):
            case.check(prompt, sample.token_ids)


def test_cached_prefixes_may_end_within_an_image(case: Case) -> None:
    """The page in which the text behind an image differs, and those of the image before it."""
    (seen,) = case.prompts(2)
    last = seen.spans[-1]
    other_tokens = [token for token in (3, 4, 5) if token != seen.ids[last.end]]
    again, after = (
        Prompt([*seen.ids[: last.end], token, *text(), *text()], seen.spans, seen.media)
        for token in other_tokens[:2]
    )
    other = case.family.picture()
    while other.shape != seen.media[-1].shape:
        other = case.family.picture()
    changed = [
        span
        if span.digest != last.digest
        else MediaSpan(
            position=span.position, length=span.length, digest=other.digest, offset=span.offset
        )
        for span in seen.spans
    ]
    first = next(span.position for span in changed if span.digest == other.digest)
    swapped = Prompt(seen.ids, changed, [*seen.media[:-1], other])
    with engine(case.folder, page_size=8) as llm:
        for prompt, most in ((seen, 0), (again, last.end), (after, last.end), (swapped, first)):
            (sample,) = run(llm, prompt)
            case.check(prompt, sample.token_ids)
            matched = sample.timeline.matched_tokens
            assert matched <= most
            # States are kept where a prompt has left another before.
            if prompt is after or not case.family.has_states:
                assert most - 8 <= matched


def make_adapter(case: Case, folder: Path) -> Any:
    """Writes an adapter of the language model; transformers' model with it."""
    from peft import LoraConfig, get_peft_model

    others = ".*(vision|visual|shared_expert).*"
    settings = {"r": 5, "target_modules": LANGUAGE_MODEL, "exclude_modules": others}
    model = get_peft_model(load_reference(case.folder), LoraConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return model.base_model.model


def test_adapters_and_images(case: Case, tmp_path: Path) -> None:
    model = make_adapter(case, tmp_path / "adapter")
    prompts = case.prompts(1, 2)
    with engine(case.folder, enable_lora=True, prefill_chunk_tokens=32) as llm:
        digest = llm.load_adapter(tmp_path / "adapter")
        samples = run(llm, *prompts, adapters=[digest, b""])
    case.check(prompts[0], samples[0].token_ids, model)
    case.check(prompts[1], samples[1].token_ids)


def check_drafts(case: Case, llm: LLM, adapters: list[bytes], models: list[Any]) -> None:
    """Drafts are found in the prompts' texts, where an answer repeats some of them."""
    for _ in range(30):
        again = text(12) * 3
        prompts = []
        for count in range(1, len(models) + 1):
            made = case.family.prompt([case.family.picture() for _ in range(count)], again)
            prompts.append(Prompt([*made.ids, *again], made.spans, made.media))
        samples = run(llm, *prompts, adapters=adapters)
        for prompt, sample, model in zip(prompts, samples, models, strict=True):
            case.check(prompt, sample.token_ids, model)
        if llm.engine.counters()["drafted_tokens"]:
            return
    pytest.fail("nothing was drafted")


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    # Qwen2.5-VL's heads cannot be halved, and answers of Qwen3.5 repeat nothing.
    [*FAMILIES, *(n for n in QWEN_FAMILIES if not n.startswith(("qwen2_5", "qwen3_5")))],
    indirect=True,
)
def test_ranks_drafts_and_adapters_at_once(case: Case, tmp_path: Path) -> None:
    model = make_adapter(case, tmp_path / "adapter")
    limits = {"tp": 2, "rank_timeout_s": 60.0, "check_ranks": True, "prefill_chunk_tokens": 64}
    drafts = {"drafter": "ngram", "draft_gate": "fixed"}
    with engine(case.folder, enable_lora=True, **limits, **drafts) as llm:
        digest = llm.load_adapter(tmp_path / "adapter")
        check_drafts(case, llm, [digest, b"", digest], [model, case.model, model])


def test_a_quantised_language_model(case: Case, tmp_path: Path) -> None:
    folder, floats = fp8_copy(case.folder, tmp_path / "fp8", "channel")
    shutil.copy(case.folder / "preprocessor_config.json", folder)
    (prompt,) = case.prompts(2)
    with engine(folder) as llm:
        (sample,) = run(llm, prompt)
    case.check(prompt, sample.token_ids, load_reference(floats))


@pytest.mark.parametrize(
    "has_tower", [False, pytest.param(True, marks=pytest.mark.full)], ids=["no tower", "tower"]
)
def test_a_prefill_worker_fills_pages_of_images(case: Case, has_tower: bool) -> None:
    """The owner computes the rest, also where the last page ends within an image."""
    clock = ManualClock()
    owner = make_engine(case.folder, "decode", clock, language_model_only=not has_tower)
    filler = make_engine(case.folder, "prefill", clock)
    pair = EnginePair(owner, [filler], clock)
    try:
        for count in (1, 2):
            # Some whole pages come before the rest.
            pictures = [case.family.picture() for _ in range(count)]
            prompt = case.family.prompt(pictures, text() + [7] * 32)
            end = prompt.spans[-1].end
            for ids in (prompt.ids, [*prompt.ids[:end], 5, 6]):
                asked = Prompt(list(ids), prompt.spans, prompt.media)
                before = owner.counters()["fills_done"]
                filler.turn(Inbox(media=list(asked.media)))
                if has_tower:
                    pair.send(media=asked.media)
                name = pair.submit(asked.ids, COUNT, spans=list(asked.spans), cache_salt=str(ids))
                (tokens,) = pair.finish(name)
                case.check(asked, tokens)
                assert owner.counters()["fills_done"] > before
        pair.settle()
    finally:
        pair.close()


@pytest.mark.full
@pytest.mark.parametrize("case", ["gemma3"], indirect=True)
def test_owners_that_free_windows_of_whole_images_need_a_tower(case: Case) -> None:
    """Without one they refuse images, and say at their start what to set."""
    clock = ManualClock()
    settings = {"window_pages": "free", "num_pages": 200}
    filler = make_engine(case.folder, "prefill", clock, **settings)
    owner = make_engine(case.folder, "decode", clock, **settings)
    pair = EnginePair(owner, [filler], clock)
    try:
        for count in (1, 3):
            (asked,) = case.prompts(count)
            filler.turn(Inbox(media=list(asked.media)))
            pair.send(media=asked.media)
            (tokens,) = pair.finish(pair.submit(asked.ids, COUNT, spans=list(asked.spans)))
            case.check(asked, tokens)
        pair.settle()
    finally:
        pair.close()
    assert not any(told.startswith("images are refused") for told in owner.info.notices)
    bare = make_engine(case.folder, "decode", clock, language_model_only=True, **settings)
    try:
        (told,) = (told for told in bare.info.notices if told.startswith("images are refused"))
        assert "set window_pages to keep" in told
        assert not bare.info.encoder_digest
    finally:
        bare.close()
