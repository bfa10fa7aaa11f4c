"""The engine's sampler: distributions, penalties, masks, log-probabilities, independence."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor
from weft.contract.errors import Internal, InvalidRequest
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.sampling.sampler import Sampler, SamplerRow, derive_seed
from weft.testing.kernels import naive_sampling
from weft.testing.kernels.naive_sampling import NaiveParams

EOS = 2

PATHS = [
    pytest.param(True, marks=pytest.mark.needs("cc"), id="native"),
    pytest.param(False, id="numpy"),
]


def make_row(
    seed: int = 0,
    *,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    top_logprobs: int | None = None,
    **params: Any,
) -> SamplerRow:
    return SamplerRow(
        params=SamplingParams(**params),
        stop=StopCriteria(
            min_tokens=min_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
        ),
        seed=seed,
        eos_token_ids=(EOS,),
        top_logprobs=top_logprobs,
    )


def draw_one(
    row: SamplerRow,
    logits: torch.Tensor,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    **kwargs: Any,
) -> int:
    """A fresh sampler's token for one row of logits."""
    sampler = Sampler(logits.shape[-1], 1, **kwargs)
    sampler.add(0, row, prompt, output)
    drawn = sampler.draw(logits.reshape(1, -1), np.array([0]), np.array([position]))
    return int(drawn.token_ids[0])


# ---- distribution ------------------------------------------------------------------------------

NUM_SEEDS = 10_000

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "top_n_sigma": {"top_n_sigma": 0.8},
    "bias": {"logit_bias": {3: 2.0, 7: -3.0}},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "all": {
        "temperature": 1.3,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "logit_bias": {1: 1.0},
        "repetition_penalty": 0.8,
        "frequency_penalty": -0.4,
    },
}


def chi_square_bound(degrees: int) -> float:
    """Upper 10^-6 quantile (Wilson and Hilferty 1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.753 * part**0.5) ** 3


@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("case", CASES)
def test_tokens_fit_the_exact_distribution(case: str, native: bool) -> None:
    params = CASES[case]
    vocab, prompt, output = 24, (1, 3, 3, 5), (3, 9, 9, 9, 11)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(11)) * 1.5
    num_seeds = NUM_SEEDS if native else NUM_SEEDS // 10
    sampler = Sampler(vocab, num_seeds, use_native=native)
    for seed in range(num_seeds):
        sampler.add(seed, make_row(seed, **params), prompt, output)
    drawn = sampler.draw(
        logits.expand(num_seeds, vocab), np.arange(num_seeds), np.full(num_seeds, 9)
    )
    exact = naive_sampling.distribution(
        logits.numpy(), NaiveParams(**params, prompt=prompt, output=output)
    )
    counts = np.bincount(drawn.token_ids, minlength=vocab)
    assert counts[exact == 0].sum() == 0
    expected = exact[exact > 0] * num_seeds
    statistic = float(((counts[exact > 0] - expected) ** 2 / expected).sum())
    assert statistic < chi_square_bound(len(expected) - 1), (case, counts, expected)


def test_positions_and_samples_draw_independently() -> None:
    """Pairs over successive positions, and over two samples of one request, are uniform too."""
    num_seeds, vocab = 6000, 5
    logits = torch.zeros(num_seeds, vocab)
    sampler = Sampler(vocab, 2 * num_seeds)
    for seed in range(num_seeds):
        sampler.add(seed, make_row(seed), (), ())
        sampler.add(num_seeds + seed, make_row(derive_seed(seed, 1)), (), ())
    slots, positions = np.arange(num_seeds), np.full(num_seeds, 4)
    first = sampler.draw(logits, slots, positions).token_ids
    following = sampler.draw(logits, slots, positions + 1).token_ids
    sibling = sampler.draw(logits, slots + num_seeds, positions).token_ids
    for other in (following, sibling):
        counts = np.bincount(first * vocab + other, minlength=vocab**2)
        expected = num_seeds / vocab**2
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < chi_square_bound(vocab**2 - 1)


def test_derived_seeds_are_distinct() -> None:
    seed = int(np.random.default_rng().integers(2**64, dtype=np.uint64))
    derived = [derive_seed(seed, i) for i in range(128)]
    assert derived[0] == seed
    assert len(set(derived)) == 128
    assert all(0 <= s < 2**64 for s in derived)


# ---- the whole against the naive reference -----------------------------------------------------


def random_case(rng: np.random.Generator, vocab: int) -> tuple[SamplerRow, NaiveParams, int]:
    """A row and the same in the reference's words, with a position."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.5 else otherwise

    def some_tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(vocab, size=rng.integers(most)).tolist())

    prompt, output, stop_ids = some_tokens(40), some_tokens(20), some_tokens(4)
    params = {
        "temperature": sometimes(float(rng.choice([0.0, 0.2, 1.0])), rng.random() * 2),
        "top_k": sometimes(0, int(rng.integers(1, 80))),
        "top_p": sometimes(1.0, rng.random() + 1e-9),
        "min_p": sometimes(0.0, rng.random() / 4),
        "top_n_sigma": sometimes(0.0, 3 * rng.random()),
        "repetition_penalty": sometimes(1.0, 0.5 + rng.random()),
        "presence_penalty": sometimes(0.0, rng.uniform(-2, 2)),
        "frequency_penalty": sometimes(0.0, rng.uniform(-2, 2)),
        "logit_bias": {int(i): float(rng.uniform(-100, 100)) for i in some_tokens(5)},
    }
    min_tokens = int(rng.integers(0, 30))
    ignore_eos = bool(rng.random() < 0.5)
    row = make_row(
        int(rng.integers(2**64, dtype=np.uint64)),
        min_tokens=min_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=ignore_eos,
        top_logprobs=sometimes(None, 3),
        **params,
    )
    ends = stop_ids if ignore_eos else (*stop_ids, EOS)
    masked = ends if len(output) < min_tokens else ()
    naive = NaiveParams(**params, masked=masked, prompt=prompt, output=output)
    return row, naive, len(prompt) + len(output)


@given(st.integers(0, 2**62), st.sampled_from([17, 64, 200, 517]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_mixed_batches_equal_the_naive_reference(entropy: int, vocab: int, native: bool) -> None:
    rng = np.random.default_rng(entropy)
    num_rows = int(rng.integers(1, 7))
    slots = rng.permutation(10)[:num_rows]
    sampler = Sampler(vocab, 10, use_native=native)
    cases = [random_case(rng, vocab) for _ in range(num_rows)]
    for slot, (row, naive, _) in zip(slots.tolist(), cases, strict=True):
        sampler.add(slot, row, naive.prompt, naive.output)
    for _ in range(3):  # The sampler counts its own tokens; the reference is told them.
        logits = torch.from_numpy(rng.normal(0, 4, (num_rows, vocab)).astype(np.float32))
        before = logits.clone()
        positions = np.array([position for _, _, position in cases])
        drawn = sampler.draw(logits, slots, positions)
        assert torch.equal(logits, before)
        assert not drawn.errors
        for r, (row, naive, position) in enumerate(cases):
            expected = naive_sampling.draw(logits[r].numpy(), naive, row.seed, position)
            assert drawn.token_ids[r] == expected, (row, position)
            assert (drawn.logprobs[r] is None) == (row.top_logprobs is None)
            naive.output = (*naive.output, expected)
            if len(naive.output) >= row.stop.min_tokens:
                naive.masked = ()
            cases[r] = (row, naive, position + 1)


@pytest.mark.parametrize("native", PATHS)
def test_a_row_draws_the_same_alone_in_a_batch_and_elsewhere(native: bool) -> None:
    rng = np.random.default_rng()
    vocab, num_rows = 300, 9
    cases = [random_case(rng, vocab) for _ in range(num_rows)]
    logits = torch.from_numpy(rng.normal(0, 3, (num_rows, vocab)).astype(np.float32))
    batch = Sampler(vocab, 64, use_native=native)
    slots = rng.permutation(64)[:num_rows]
    for slot, (row, naive, _) in zip(slots.tolist(), cases, strict=True):
        batch.add(slot, row, naive.prompt, naive.output)
    together = batch.draw(logits, slots, np.array([position for _, _, position in cases]))
    for r, (row, naive, position) in enumerate(cases):
        alone = draw_one(row, logits[r], position, naive.prompt, naive.output, use_native=native)
        assert alone == together.token_ids[r]


def test_a_resumed_sample_goes_on_as_if_never_interrupted() -> None:
    rng = np.random.default_rng()
    vocab, num_steps = 120, 12
    row, naive, start = random_case(rng, vocab)
    logits = torch.from_numpy(rng.normal(0, 3, (num_steps, vocab)).astype(np.float32))
    sampler = Sampler(vocab, 1)
    sampler.add(0, row, naive.prompt, naive.output)
    tokens: list[int] = []
    for i in range(num_steps):
        drawn = sampler.draw(logits[i : i + 1], np.array([0]), np.array([start + i]))
        tokens.append(int(drawn.token_ids[0]))
    for i in range(num_steps):
        so_far = (*naive.output, *tokens[:i])
        assert draw_one(row, logits[i], start + i, naive.prompt, so_far) == tokens[i]


def test_a_slot_keeps_nothing_of_its_last_sample() -> None:
    vocab = 50
    logits = torch.randn(1, vocab)
    busy = make_row(5, temperature=0.7, top_k=3, min_tokens=9, logit_bias={1: 50.0}, top_logprobs=2)
    sampler = Sampler(vocab, 2)
    sampler.add(1, busy, (1, 2), (3,))
    sampler.draw(logits, np.array([1]), np.array([3]))
    sampler.remove(1)
    sampler.add(1, make_row(temperature=0.0), (), ())
    drawn = sampler.draw(logits, np.array([1]), np.array([0]))
    assert drawn.token_ids[0] == int(logits.argmax())
    assert drawn.logprobs == [None]
    with pytest.raises(ValueError, match="taken"):
        sampler.add(1, busy, (), ())


# ---- penalties, bias, masks --------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.5, 1.7])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    vocab = 90
    for _ in range(10):
        ids = torch.randint(0, vocab, (1, 30))
        logits = torch.randn(1, vocab)
        processor = RepetitionPenaltyLogitsProcessor(penalty=penalty)
        expected = int(processor(ids, logits.clone()).argmax())
        row = make_row(temperature=0.0, repetition_penalty=penalty)
        tokens = ids[0].tolist()
        assert draw_one(row, logits, 30, tokens[:20], tokens[20:]) == expected


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    prompt, output = [0, 0, 0], [1, 1]
    for penalties, expected in (
        ({"presence_penalty": 2.0}, 0),  # The prompt does not count.
        ({"frequency_penalty": 2.0}, 0),
        ({"presence_penalty": -1.5}, 1),  # 2 + 1.5 > 3.
        ({"frequency_penalty": -0.4}, 0),  # 2 + 2 * 0.4 < 3.
        ({"frequency_penalty": -0.6}, 1),  # 2 + 2 * 0.6 > 3.
    ):
        row = make_row(temperature=0.0, **penalties)
        assert draw_one(row, logits, 5, prompt, output) == expected


def test_no_end_token_is_drawn_before_min_tokens() -> None:
    vocab, min_tokens = 12, 4
    logits = torch.zeros(1, vocab)
    logits[0, EOS], logits[0, 7] = 50.0, 40.0
    for temperature in (0.0, 1.0):
        row = make_row(3, temperature=temperature, min_tokens=min_tokens, stop_token_ids=(7,))
        sampler = Sampler(vocab, 1)
        sampler.add(0, row, (1,), ())
        drawn = [
            int(sampler.draw(logits, np.array([0]), np.array([1 + i])).token_ids[0])
            for i in range(min_tokens + 1)
        ]
        assert not {EOS, 7} & set(drawn[:min_tokens])
        assert drawn[min_tokens] == EOS
    ignoring = make_row(temperature=0.0, min_tokens=4, ignore_eos=True)
    assert draw_one(ignoring, logits) == EOS  # It ends nothing, so it is a token as any.


def test_bias_can_force_and_forbid() -> None:
    logits = torch.randn(40)
    best = int(logits.argmax())
    assert draw_one(make_row(temperature=0.0, logit_bias={17: 100.0}), logits) == 17
    assert draw_one(make_row(temperature=1.0, logit_bias={17: 100.0}), logits) == 17
    assert draw_one(make_row(temperature=0.0, logit_bias={best: -100.0}), logits) != best
    with pytest.raises(InvalidRequest) as failure:
        Sampler(40, 1).add(0, make_row(logit_bias={40: 1.0}), (), ())
    assert failure.value.param == "logit_bias"


# ---- log-probabilities -------------------------------------------------------------------------


@pytest.mark.parametrize("native", PATHS)
def test_logprobs_are_of_the_unchanged_logits(native: bool) -> None:
    vocab = 640
    logits = torch.randn(5, vocab) * 3
    exact = torch.log_softmax(logits.double(), -1)
    wanted = [0, 5, None, 20, 1]
    sampler = Sampler(vocab, 5, use_native=native)
    for slot, top in enumerate(wanted):
        row = make_row(
            slot,
            temperature=1.7,
            top_p=0.9,
            repetition_penalty=3.0,
            logit_bias={5: 60.0},
            top_logprobs=top,
        )
        sampler.add(slot, row, (1, 2, 3), (4,))
    drawn = sampler.draw(logits, np.arange(5), np.full(5, 4))
    for r, top in enumerate(wanted):
        logprob = drawn.logprobs[r]
        if top is None:
            assert logprob is None
            continue
        assert logprob is not None
        assert logprob.token_id == drawn.token_ids[r] == 5
        assert logprob.logprob == pytest.approx(float(exact[r, 5]), abs=1e-9)
        values, ids = exact[r].topk(top)
        assert [i for i, _ in logprob.top] == ids.tolist()
        assert [v for _, v in logprob.top] == pytest.approx(values.tolist(), abs=1e-9)


@pytest.mark.parametrize("native", PATHS)
def test_several_rows_of_a_sample_are_changed_back_each(native: bool) -> None:
    """As behind drafts: rows of one slot, drawn in one call."""
    vocab, positions = 64, np.arange(4, 7)
    logits = torch.randn(3, vocab)
    row = make_row(9, logit_bias={3: 4.0, 5: -2.0}, top_logprobs=5)
    sampler = Sampler(vocab, 1, use_native=native)
    sampler.add(0, row, (1, 2), ())
    given = logits.clone()
    together = sampler.draw(given, np.zeros(3, np.int64), positions)
    assert torch.equal(given, logits)
    for index in range(3):
        alone = Sampler(vocab, 1, use_native=native)
        alone.add(0, row, (1, 2), ())
        one = alone.draw(logits[index : index + 1].clone(), np.array([0]), positions[index:][:1])
        assert one.token_ids[0] == together.token_ids[index]
        assert one.logprobs[0] == together.logprobs[index]


# ---- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_row_is_an_error_of_that_row_only(native: bool, bad: float) -> None:
    vocab = 130
    rows = [
        make_row(1, temperature=0.0),
        make_row(2, temperature=1.0, top_logprobs=2),
        make_row(3, temperature=1.0, top_p=0.5, repetition_penalty=1.2),
        make_row(4, temperature=0.0, top_logprobs=2),
    ]
    good = torch.randn(4, vocab)
    for broken in range(4):
        logits = good.clone()
        logits[broken, 77] = bad
        sampler = Sampler(vocab, 4, use_native=native)
        for slot, row in enumerate(rows):
            sampler.add(slot, row, (1,), ())
        drawn = sampler.draw(logits, np.arange(4), np.full(4, 9))
        assert list(drawn.errors) == [broken]
        assert isinstance(drawn.errors[broken], Internal)
        assert "position 9" in drawn.errors[broken].message
        assert drawn.token_ids[broken] < 0
        assert drawn.logprobs[broken] is None
        for r in {0, 1, 2, 3} - {broken}:
            assert drawn.token_ids[r] == draw_one(rows[r], good[r], 9, (1,))


def test_masking_everything_is_an_error_not_a_token() -> None:
    row = make_row(temperature=1.0, min_tokens=5, stop_token_ids=(0, 1, 2, 3))
    sampler = Sampler(4, 1)
    sampler.add(0, row, (), ())
    drawn = sampler.draw(torch.randn(1, 4), np.array([0]), np.array([0]))
    assert isinstance(drawn.errors[0], InvalidRequest)
    assert drawn.errors[0].param == "min_tokens"
