"""Sampling by a whole engine: the exact distribution, and the same text wherever a request runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("overlap")

VOCAB = 40
NUM_SEEDS = 10_000


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny("llama", folder, seed=7, vocab_size=VOCAB, num_hidden_layers=2)


@pytest.fixture(scope="module")
def llm(model_dir: Path, overlap: None) -> Iterator[LLM]:
    with (
        one_thread(),
        LLM(
            model_dir,
            dtype="float32",
            page_size=8,
            num_pages=2048,
            num_threads=1,
            max_running_requests=256,
            max_waiting_requests=2 * NUM_SEEDS,
        ) as engine,
    ):
        yield engine


def draw(llm: LLM, prompt: Sequence[int], seeds: Sequence[int], temperature: float) -> list[int]:
    """The first token that each seed gives, all requests in the engine at once."""
    submits = [
        Submit(
            gateway=0,
            request_id=f"seed-{seed}",
            attempt=1,
            prompt=list(prompt),
            sampling=SamplingParams(temperature=temperature, seed=seed),
            stop=StopCriteria(max_tokens=1),
        )
        for seed in seeds
    ]
    drawn: dict[str, int] = {}
    inbox: Inbox | None = Inbox(submits=submits)
    while len(drawn) < len(seeds):
        for batch in llm.engine.turn(inbox).gateways:
            assert not batch.failed
            drawn |= {tokens.request_id: tokens.ids[0] for tokens in batch.all_tokens()}
        inbox = None
    return [drawn[submit.request_id] for submit in submits]


def chi_square_bound(degrees: int) -> float:
    """Upper 10^-6 quantile (Wilson and Hilferty 1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.753 * part**0.5) ** 3


@pytest.mark.each_of("overlap", "temperature")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ten_thousand_seeds_fit_the_exact_softmax(
    llm: LLM, model_dir: Path, temperature: float
) -> None:
    prompt = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    expected = NUM_SEEDS * torch.softmax(logits / temperature, 0).numpy()
    counts = np.bincount(draw(llm, prompt, range(NUM_SEEDS), temperature), minlength=VOCAB)
    # Rare tokens count as one, so that chi-square holds.
    rare = expected < 10
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    if expected[-1] == 0:
        expected, counts = expected[:-1], counts[:-1]
    assert len(expected) > 8, "the distribution is too narrow to show anything"
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < chi_square_bound(len(expected) - 1), (counts, expected)


def sampled(
    llm: LLM, prompts: Sequence[Sequence[int]], seed: int, n: int = 1
) -> list[list[GeneratedSample]]:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=seed, n=n)
    return llm.generate_all(prompts, params, StopCriteria(max_tokens=24, ignore_eos=True))


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(llm: LLM) -> None:
    seed = random.randrange(2**64)
    prompts = [random_prompt(random.randrange(1, 60)) for _ in range(12)]
    alone = [sampled(llm, [prompt], seed)[0][0].token_ids for prompt in prompts]
    together = [group[0].token_ids for group in sampled(llm, prompts, seed)]
    assert together == alone
    others = [group[0].token_ids for group in sampled(llm, prompts, seed ^ 1)]
    assert all(one != other for one, other in zip(together, others, strict=True))


def test_samples_of_one_prompt_differ_and_repeat(llm: LLM) -> None:
    seed, prompt = random.randrange(2**64), random_prompt(21)
    (samples,) = sampled(llm, [prompt], seed, n=16)
    texts = [tuple(sample.token_ids) for sample in samples]
    assert len(set(texts)) == len(texts)
    ((first,),) = sampled(llm, [prompt], seed)
    assert tuple(first.token_ids) == texts[0]
    repeated = sampled(llm, [random_prompt(40), prompt], seed, n=16)[1]
    assert [tuple(sample.token_ids) for sample in repeated] == texts


@pytest.mark.parametrize("num_prompt_tokens", [5, 21])
def test_what_a_sample_computed_is_not_cached_for_its_siblings(
    model_dir: Path, num_prompt_tokens: int
) -> None:
    """Also where there is no room for all of them at once, and no full page of the prompt."""
    settings = {"page_size": 8, "num_pages": 64, "num_threads": 1, "max_running_requests": 2}
    with one_thread(), LLM(model_dir, dtype="float32", **settings) as llm:
        for turn, cached in enumerate((0, num_prompt_tokens - 1)):
            submit = Submit(
                gateway=0,
                request_id=f"r{turn}",
                attempt=1,
                prompt=list(range(num_prompt_tokens)),
                sampling=SamplingParams(temperature=1.0, seed=turn, n=4),
                stop=StopCriteria(max_tokens=20, ignore_eos=True),
            )
            inbox: Inbox | None = Inbox(submits=[submit])
            told: list[int] = []
            while inbox is not None or llm.engine.has_work:
                for batch in llm.engine.turn(inbox).gateways:
                    told += [finished.cached_prompt_tokens for finished in batch.finished]
                inbox = None
            assert told == [cached] * 4


def test_each_session_gets_its_own_tokens(llm: LLM) -> None:
    """Of requests that decode together, end at different times, and want log-probabilities or not;
    the same as each gets alone."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    submits = [
        Submit(
            gateway=index % 3,
            request_id=f"r{index}",
            attempt=1 + index % 2,
            prompt=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))],
            sampling=SamplingParams(temperature=0.8, n=1 + index % 2, seed=rng.randrange(2**32)),
            stop=StopCriteria(
                max_tokens=rng.randint(1, 30), stop_token_ids=(rng.randrange(VOCAB),)
            ),
            top_logprobs=rng.choice((None, 0, 2)),
        )
        for index in range(20)
    ]

    def answers(some: list[Submit]) -> dict[tuple[int, str, int, int], list[Any]]:
        """By session, request, attempt and sample: tokens with what came with them, and the end."""
        found: dict[tuple[int, str, int, int], list[Any]] = {}
        inbox: Inbox | None = Inbox(submits=some)
        num_open = sum(submit.sampling.n for submit in some)
        while num_open:
            for batch in llm.engine.turn(inbox).gateways:
                assert not batch.failed
                for tokens in batch.all_tokens():
                    key = (batch.gateway, tokens.request_id, tokens.attempt, tokens.sample)
                    known = found.setdefault(key, [])
                    assert tokens.first_index == len(known)
                    logprobs = tokens.logprobs or [None] * len(tokens.ids)
                    known += [*zip(tokens.ids, logprobs, strict=True)]
                for end in batch.finished:
                    key = (batch.gateway, end.request_id, end.attempt, end.sample)
                    found[key].append((end.reason, end.stop_token_id, end.completion_tokens))
                num_open -= len(batch.finished)
            inbox = None
        return found

    together = answers(submits)
    assert len(together) == 30
    for submit in submits:
        alone = answers([submit])
        for key, expected in alone.items():
            *tokens, end = together[key]
            *expected_tokens, expected_end = expected
            assert end == expected_end
            for (token, logprob), (expected_token, expected_logprob) in zip(
                tokens, expected_tokens, strict=True
            ):
                assert token == expected_token
                assert (logprob is None) == (submit.top_logprobs is None)
                if logprob is not None:
                    assert logprob.token_id == token
                    assert abs(logprob.logprob - expected_logprob.logprob) < 1e-4
                    assert len(logprob.top) == submit.top_logprobs
