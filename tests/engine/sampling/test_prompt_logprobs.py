"""Log-probabilities of a prompt's tokens equal transformers', whatever is cached or runs beside."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from weft.contract.errors import ContextTooLong, InvalidRequest
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria, TokenLogprob
from weft.contract.submits import Cancel, SampleProgress, Submit
from weft.engine.loop.llm import LLM
from weft.testing.engine.constrained import Desk, Outcome
from weft.testing.models.choices import where_experts_are_sure
from weft.testing.models.tiny_adapters import make_adapter, vocabulary_tensors, write_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("single_thread", "overlap")

PAGE, CHUNK, VOCAB = 8, 24, 517
LENGTHS = (1, 2, PAGE, PAGE + 1, CHUNK, 2 * CHUNK + 1, 150)
STOP = StopCriteria(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return make_tiny(request.param, folder, seed, vocab_size=VOCAB, num_hidden_layers=4)


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """With a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    settings = {"tokenizer": True, "vocab_size": VOCAB, "num_hidden_layers": 4}
    return make_tiny("llama", folder, seed, **settings)


def load(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def make_llm(model_dir: Path, **settings: Any) -> LLM:
    sizes = {"page_size": PAGE, "prefill_chunk_tokens": CHUNK, "max_step_tokens": 2 * CHUNK}
    sizes |= {"max_running_requests": 16}
    return LLM(model_dir, **{"dtype": "float32", "num_pages": 400} | sizes | settings)


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def check(model: Any, prompt: list[int], found: Sequence[TokenLogprob], num_top: int) -> None:
    assert [entry.token_id for entry in found] == prompt[1:]
    with where_experts_are_sure(lambda: model, prompt):
        check_values(model, prompt, found, num_top)


@torch.no_grad()
def check_values(
    model: Any, prompt: list[int], found: Sequence[TokenLogprob], num_top: int
) -> None:
    wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for entry, row in zip(found, wanted, strict=False):
        assert abs(entry.logprob - float(row[entry.token_id])) < 2e-4
        values = row.topk(num_top).values if num_top else row[:0]
        assert torch.allclose(
            torch.tensor([value for _, value in entry.top]), values, rtol=0, atol=2e-4
        )
        for token, value in entry.top:
            assert abs(float(row[token]) - value) < 2e-4


@pytest.mark.each_of("overlap", "num_top")
@pytest.mark.parametrize("num_top", [0, 3])
def test_they_equal_transformers_also_where_all_is_cached(model_dir: Path, num_top: int) -> None:
    prompts = [random_prompt(length) for length in LENGTHS]
    model = load(model_dir)
    with make_llm(model_dir) as llm:
        plain = llm.generate(prompts, stop=STOP)
        for _ in range(2):
            samples = llm.generate(prompts, stop=STOP, prompt_logprobs=num_top)
            for prompt, sample, before in zip(prompts, samples, plain, strict=True):
                check(model, prompt, sample.prompt_logprobs, num_top)
                assert sample.token_ids == before.token_ids
                assert sample.timeline is not None
                assert sample.timeline.matched_tokens == 0
        again = llm.generate(prompts, stop=STOP)
        for prompt, sample in zip(prompts, again, strict=True):
            assert not sample.prompt_logprobs
            assert sample.timeline is not None
            assert sample.timeline.matched_tokens >= (len(prompt) - 1) // PAGE * PAGE
        llm.engine.memory.check_integrity()


def test_beside_others_and_with_adapters_that_change_the_vocabulary(
    llama_dir: Path, tmp_path: Path, seed: int
) -> None:
    config = tiny_config("llama", vocab_size=VOCAB, num_hidden_layers=4)
    targets = ["embed_tokens", "lm_head"]
    tensors = vocabulary_tensors(config, seed, spread=0.3)
    folders = [
        make_adapter(tmp_path / "a", config, seed + 1),
        write_adapter(tmp_path / "b", tensors, target_modules=targets),
    ]
    adapted = [PeftModel.from_pretrained(load(llama_dir), str(folder)) for folder in folders]
    models = [load(llama_dir), *(model.eval() for model in adapted)]
    projections = ("q", "k", "v", "o", "gate", "up", "down", "embed_tokens", "lm_head")
    with make_llm(llama_dir, enable_lora=True, lora_projections=projections) as llm:
        digests = [b"", *(llm.load_adapter(folder) for folder in folders)]
        desk = Desk(llm.engine, llama_dir)
        submits, kinds = list[Submit](), list[tuple[int, int | None]]()
        for length in LENGTHS + LENGTHS:
            kind, num_top = random.randrange(3), random.choice([None, 0, 1, 4])
            submit = desk.submit(None, random_prompt(length), stop=STOP, top_logprobs=1)
            submits.append(replace(submit, adapter=digests[kind], prompt_logprobs=num_top))
            kinds.append((kind, num_top))
        outcomes = desk.run(*submits)
        alone = [desk.one(replace(s, request_id=f"{s.request_id}+")) for s in submits]
    for submit, (kind, num_top), outcome, other in zip(
        submits, kinds, outcomes, alone, strict=True
    ):
        assert isinstance(outcome, Outcome)
        assert outcome.ids == other.ids
        assert len(outcome.logprobs) == len(outcome.ids)
        if num_top is None:
            assert not outcome.prompt_logprobs
        else:
            check(models[kind], submit.prompt, outcome.prompt_logprobs, num_top)


def test_a_prompt_that_fills_the_context(model_dir: Path) -> None:
    model = load(model_dir)
    for context in (7 * PAGE, 7 * PAGE + 3):
        # Beside others, and with no page more than it needs.
        pages = -(-context // PAGE) + 1
        with make_llm(model_dir, max_context_tokens=context, num_pages=pages) as llm:
            prompts = [random_prompt(context), random_prompt(context), random_prompt(9)]
            stop = StopCriteria(max_tokens=1, ignore_eos=True)
            samples = llm.generate(prompts, stop=stop, prompt_logprobs=2)
            for prompt, sample in zip(prompts, samples, strict=True):
                check(model, prompt, sample.prompt_logprobs, 2)
                assert len(sample.token_ids) == 1
            (plain,) = llm.generate(prompts[:1], stop=stop)
            assert plain.token_ids == samples[0].token_ids
            for wanted, length, scores in (
                (2, context, None),
                (1, context + 1, None),
                (2, context, 0),
                (1, context + 1, 0),
            ):
                stop = StopCriteria(max_tokens=wanted, ignore_eos=True)
                with pytest.raises(ContextTooLong):
                    llm.generate([random_prompt(length)], stop=stop, prompt_logprobs=scores)
            llm.engine.memory.check_integrity()


@pytest.mark.each_of("overlap", "drafter")
@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_where_tokens_are_drafted(model_dir: Path, tmp_path: Path, seed: int, drafter: str) -> None:
    settings: dict[str, Any] = {"drafter": drafter, "draft_gate": "fixed"}
    if drafter == "eagle3":
        settings["draft_dir"] = make_tiny_draft(tmp_path, model_dir, seed)
    prompts = [random_prompt(length) for length in LENGTHS]
    model, stop = load(model_dir), StopCriteria(max_tokens=20, ignore_eos=True)
    with make_llm(model_dir) as llm:
        plain = llm.generate(prompts, stop=stop)
    with make_llm(model_dir, **settings) as llm:
        for _ in range(2):
            samples = llm.generate(prompts, stop=stop, prompt_logprobs=2)
            for prompt, sample, before in zip(prompts, samples, plain, strict=True):
                check(model, prompt, sample.prompt_logprobs, 2)
                assert sample.token_ids == before.token_ids


def test_once_for_requests_that_are_pre_empted(llama_dir: Path) -> None:
    prompts = [random_prompt(40 + i) for i in range(4)]
    model, stop = load(llama_dir), StopCriteria(max_tokens=100, ignore_eos=True)
    with make_llm(llama_dir, num_pages=40, max_running_requests=4) as llm:
        samples = llm.generate(prompts, stop=stop, prompt_logprobs=1)
    for prompt, sample in zip(prompts, samples, strict=True):
        check(model, prompt, sample.prompt_logprobs, 1)
    preempted = [s.timeline.num_preemptions for s in samples if s.timeline is not None]
    assert sum(preempted) > 0


def test_with_pages_in_host_memory(llama_dir: Path) -> None:
    """What the pool gave up is not loaded for a prompt that is computed anyway."""
    prompts = [random_prompt(20 * PAGE) for _ in range(4)]
    model = load(llama_dir)
    settings = {"num_pages": 48, "host_cache_bytes": 32 << 20, "load_back_threshold": 1}
    with make_llm(llama_dir, **settings) as llm:
        for _ in range(2):
            for prompt in prompts:
                llm.generate([prompt], stop=STOP)
        for prompt in prompts:
            (sample,) = llm.generate([prompt], stop=STOP, prompt_logprobs=0)
            check(model, prompt, sample.prompt_logprobs, 0)


def test_a_resumed_request_has_those_of_its_prompt(llama_dir: Path) -> None:
    """Not of the tokens that it generated elsewhere."""
    prompt, generated = random_prompt(60), random_prompt(30)
    with make_llm(llama_dir) as llm:
        desk = Desk(llm.engine, llama_dir)
        stop = StopCriteria(max_tokens=40, ignore_eos=True)
        progress = [SampleProgress(sample=0, tokens=generated)]
        submit = desk.submit(None, prompt, stop=stop, progress=progress)
        outcome = desk.one(replace(submit, prompt_logprobs=1))
    assert len(outcome.ids) == 10
    check(load(llama_dir), prompt, outcome.prompt_logprobs, 1)


def test_of_several_samples_there_are_none(llama_dir: Path) -> None:
    with make_llm(llama_dir) as llm, pytest.raises(InvalidRequest, match="n = 1"):
        llm.generate([random_prompt(9)], SamplingParams(n=2), prompt_logprobs=1)


def test_nobody_waits_for_pages_that_are_computed_anyway(llama_dir: Path) -> None:
    prompt = random_prompt(150)
    model = load(llama_dir)
    with make_llm(llama_dir) as llm:
        for sample in llm.generate([prompt] * 4, stop=STOP, prompt_logprobs=0):
            check(model, prompt, sample.prompt_logprobs, 0)
        assert llm.engine.scheduler.sharing.num_waits == 0


def test_a_cancelled_one_leaves_nothing(llama_dir: Path) -> None:
    with make_llm(llama_dir) as llm:
        desk, engine = Desk(llm.engine, llama_dir), llm.engine
        for steps in range(1, 8):
            submit = replace(desk.submit(None, random_prompt(150)), prompt_logprobs=2)
            engine.turn(Inbox(submits=[submit]))
            for _ in range(steps):
                engine.turn()
            cancel = Cancel(gateway=0, request_id=submit.request_id, attempt=1)
            outbox = engine.turn(Inbox(cancels=[cancel]))
            late = [batch for batch in outbox.gateways if batch.prompt_logprobs]
            while engine.pipeline.num_steps:
                late += [one for one in engine.turn().gateways if one.prompt_logprobs]
            assert not engine.has_work
            assert not late
            engine.memory.check_integrity()
            assert engine.memory.counts().used == 0
