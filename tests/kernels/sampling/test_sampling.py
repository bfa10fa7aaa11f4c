"""Row sampling: noise to the last bit, both paths against a sorted float64 reference."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.kernels.ops.sampling import noise
from weft.kernels.ops.sampling.cpu import Scratch, native_sampling, sample_rows, top_rows
from weft.kernels.ops.sampling.spec import (
    ALWAYS_MASKED,
    ERROR_NO_CANDIDATE,
    ERROR_NOT_FINITE,
    MASKED_LOGIT,
    Field,
    SlotParams,
    pack_slot,
)
from weft.testing.kernels import naive_sampling
from weft.testing.kernels.device_sampling_cases import slot_params
from weft.testing.kernels.naive_sampling import NaiveParams

VECTORS = json.loads((Path(__file__).parent / "noise_vectors.json").read_text())

PATHS = [
    pytest.param(True, marks=pytest.mark.needs("cc"), id="native"),
    pytest.param(False, id="numpy"),
]


def fresh_seed() -> int:
    return int(np.random.default_rng().integers(2**63))


@pytest.mark.needs("cc")
def test_native_library_is_built() -> None:
    assert native_sampling().reason is None
    assert shutil.which("cc")


# ---- noise -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS["philox4x32_10"])
def test_philox_gives_the_published_numbers(vector: dict[str, list[str]]) -> None:
    counter, key, words = ([int(w, 16) for w in vector[k]] for k in ("counter", "key", "words"))
    arrays = tuple(np.array([w], np.uint32) for w in counter)
    assert [int(w[0]) for w in noise.philox4x32(arrays, (key[0], key[1]))] == words
    assert naive_sampling.philox(counter, key) == words


@pytest.mark.needs("cc")
@pytest.mark.parametrize("vector", VECTORS["philox4x32_10"])
def test_native_philox_gives_the_published_numbers(vector: dict[str, list[str]]) -> None:
    counter, key, words = ([int(w, 16) for w in vector[k]] for k in ("counter", "key", "words"))
    library = native_sampling().library
    assert library is not None
    source, result = np.array(counter, np.uint32), np.zeros(4, np.uint32)
    library.weft_philox(source.ctypes.data, key[1] << 32 | key[0], result.ctypes.data)
    assert result.tolist() == words


def native_noise(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    library = native_sampling().library
    assert library is not None
    result = np.empty(len(ids))
    library.weft_gumbel(seed, position, ids.ctypes.data, len(ids), result.ctypes.data)
    return result


def test_noise_vectors() -> None:
    for vector in VECTORS["gumbel"]:
        seed, position = int(vector["seed"], 16), int(vector["position"], 16)
        token_id = vector["token_id"]
        expected = float.fromhex(vector["noise"])
        ids = np.array([token_id], np.uint32)
        assert noise.gumbel_noise(seed, position, ids)[0] == expected
        assert naive_sampling.gumbel(seed, position, token_id) == pytest.approx(expected, rel=1e-14)


@pytest.mark.needs("cc")
def test_native_noise_is_the_same_bit_by_bit() -> None:
    rng = np.random.default_rng()
    for _ in range(20):
        seed, position = int(rng.integers(2**64, dtype=np.uint64)), int(rng.integers(2**40))
        ids = rng.integers(2**20, size=2000).astype(np.uint32)
        expected = noise.gumbel_noise(seed, position, ids)
        assert np.array_equal(native_noise(seed, position, ids), expected)


def test_logarithm_is_accurate() -> None:
    rng = np.random.default_rng()
    x = np.concatenate(
        [np.exp(rng.uniform(-36.7, 3.7, 50_000)), 1 - 2.0 ** -rng.uniform(1, 52, 500)]
    )
    exact = np.log(x.astype(np.longdouble))
    error = np.abs(noise.natural_log(x) - exact) / np.spacing(np.abs(exact.astype(np.float64)))
    assert error.max() <= 1.0


def test_noise_is_gumbel_and_independent_of_its_neighbours() -> None:
    seed = 20261120
    many = noise.gumbel_noise(seed, 7, np.arange(400_000))
    assert many.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert many.var() == pytest.approx(np.pi**2 / 6, abs=0.02)
    others = [
        many[1:],
        noise.gumbel_noise(seed, 8, np.arange(400_000)),
        noise.gumbel_noise(seed + 1, 7, np.arange(400_000)),
        noise.gumbel_noise(seed, 7 + 2**32, np.arange(400_000)),
    ]
    for other in others:
        assert abs(np.corrcoef(many[: len(other)], other)[0, 1]) < 0.01


# ---- what is drawn -----------------------------------------------------------------------------


class Table:
    """Parameters and masks of a few slots, and what the host's sampler needs beside them."""

    def __init__(self, vocab: int, params: Sequence[SlotParams], *, native: bool) -> None:
        self.params = np.stack([pack_slot(one) for one in params])
        self.reals = self.params.view(np.float64)
        self.masks = np.zeros((len(params), -(-vocab // 32)), np.uint32)
        self.scratch = Scratch(vocab, use_native=native)

    def draw(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        tables = torch.from_numpy(self.params), torch.from_numpy(self.masks.view(np.int32))
        return sample_rows(logits, slots, positions, *tables, self.scratch)


def greedy_table(vocab: int, num_slots: int, *, native: bool = True) -> Table:
    return Table(vocab, [SlotParams()] * num_slots, native=native)


def make_table(vocab: int, rows: list[NaiveParams], seeds: list[int], native: bool) -> Table:
    params = [slot_params(row, seed) for row, seed in zip(rows, seeds, strict=True)]
    return Table(vocab, params, native=native)


def random_params(rng: np.random.Generator, vocab: int) -> NaiveParams:
    def sometimes(value: float, otherwise: float) -> float:
        return value if rng.random() < 0.5 else otherwise

    return NaiveParams(
        temperature=sometimes(
            float(rng.choice([0.0, 1e-5, 0.1, 1.0, 5.0, 100.0])), rng.random() + 0.5
        ),
        top_k=int(sometimes(rng.integers(1, vocab + 2), rng.choice([0, 1, 40, 64, 65]))),
        top_p=sometimes(float(rng.choice([1.0, 1e-6, 0.5, 0.999, 1 - 1e-9])), rng.random() + 1e-9),
        min_p=sometimes(0.0, float(rng.choice([1.0, 0.5, 0.05, 1e-4, 1e-9]))),
        top_n_sigma=sometimes(0.0, 3 * rng.random()),
    )


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    spread = float(rng.choice([0.0, 1e-3, 1.0, 4.0, 30.0]))
    logits = torch.from_numpy(rng.normal(0, 1, (rows, vocab)).astype(np.float32) * spread)
    if rng.random() < 0.4:  # Coarse numbers, hence many ties.
        logits = logits.bfloat16().float()
    if rng.random() < 0.3:  # Some tokens out of reach.
        logits[torch.from_numpy(rng.random((rows, vocab)) < 0.3)] = MASKED_LOGIT
        logits[:, 0] = 0.0
    return logits


@given(st.integers(0, 2**62), st.sampled_from([1, 2, 31, 63, 64, 65, 127, 300, 517]))
@settings(max_examples=60, deadline=None)
def test_both_paths_equal_the_sorted_reference(entropy: int, vocab: int) -> None:
    rng = np.random.default_rng(entropy)
    num_rows = int(rng.integers(1, 6))
    rows = [random_params(rng, vocab) for _ in range(num_rows)]
    seeds = rng.integers(2**64, size=num_rows, dtype=np.uint64).tolist()
    positions = rng.integers(2**34, size=num_rows)
    logits = random_logits(rng, num_rows, vocab)
    expected = [
        naive_sampling.draw(logits[r].numpy(), rows[r], seeds[r], int(positions[r]))
        for r in range(num_rows)
    ]
    before = logits.clone()
    for native in (True, False):
        table = make_table(vocab, rows, seeds, native)
        drawn = table.draw(logits, np.arange(num_rows), positions)
        assert drawn.tolist() == expected, (native, rows)
    assert torch.equal(logits, before)


@given(st.integers(0, 2**62), st.sampled_from([1, 31, 32, 33, 64, 100, 517]))
@settings(max_examples=40, deadline=None)
def test_masked_rows_draw_as_if_the_forbidden_tokens_had_no_mass(entropy: int, vocab: int) -> None:
    rng = np.random.default_rng(entropy)
    num_rows = int(rng.integers(1, 6))
    rows = [random_params(rng, vocab) for _ in range(num_rows)]
    seeds = rng.integers(2**64, size=num_rows, dtype=np.uint64).tolist()
    positions = rng.integers(2**34, size=num_rows)
    logits = torch.from_numpy(rng.normal(0, 3, (num_rows, vocab)).astype(np.float32))
    allowed = rng.random((num_rows, vocab)) < rng.choice([0.02, 0.5, 0.98])
    allowed[np.arange(num_rows), rng.integers(vocab, size=num_rows)] = True
    is_masked = rng.random(num_rows) < 0.7
    expected = [
        naive_sampling.draw(
            np.where(allowed[r] | ~is_masked[r], logits[r].numpy(), np.float32(MASKED_LOGIT)),
            rows[r],
            seeds[r],
            int(positions[r]),
        )
        for r in range(num_rows)
    ]
    before = logits.clone()
    for native in (True, False):
        table = make_table(vocab, rows, seeds, native)
        table.masks[:] = mask_words(allowed, rng)
        table.params[:, Field.MASK_END] = np.where(is_masked, ALWAYS_MASKED, 0)
        drawn = table.draw(logits, np.arange(num_rows), positions)
        assert drawn.tolist() == expected, (native, rows)
    assert torch.equal(logits, before)


def mask_words(allowed: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Masks as words, bit by bit; the bits behind the vocabulary are anything."""
    words = np.zeros((len(allowed), -(-allowed.shape[1] // 32)), np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1 << int(token) % 32)
    for token in range(allowed.shape[1], 32 * words.shape[1]):
        words[:, token // 32] |= np.uint32(int(rng.integers(2)) << token % 32)
    return words


@pytest.mark.parametrize("native", PATHS)
def test_a_mask_hides_no_fault_and_may_leave_nothing(native: bool) -> None:
    vocab = 70
    logits = torch.randn(3, vocab)
    logits[0, 69] = float("nan")
    table = greedy_table(vocab, 3, native=native)
    table.params[:2, Field.MASK_END] = ALWAYS_MASKED
    table.masks[0, 0] = 1
    drawn = table.draw(logits, np.arange(3), np.arange(3))
    assert drawn[:2].tolist() == [ERROR_NOT_FINITE, ERROR_NO_CANDIDATE]
    assert drawn[2] == int(logits[2].argmax())


@pytest.mark.needs("cc")
@pytest.mark.parametrize("vocab", [5000, 49152, 49157])
def test_paths_agree_on_large_vocabularies(vocab: int) -> None:
    rng = np.random.default_rng()
    for _ in range(4):
        rows = [random_params(rng, vocab) for _ in range(8)]
        seeds = rng.integers(2**64, size=8, dtype=np.uint64).tolist()
        logits, positions = random_logits(rng, 8, vocab), rng.integers(2**20, size=8)
        drawn = [
            make_table(vocab, rows, seeds, native).draw(logits, np.arange(8), positions)
            for native in (True, False)
        ]
        assert np.array_equal(*drawn), rows


@pytest.mark.parametrize("native", PATHS)
def test_rows_are_independent_of_batch_and_slot(native: bool) -> None:
    rng = np.random.default_rng()
    vocab, num_rows = 700, 12
    rows = [random_params(rng, vocab) for _ in range(num_rows)]
    seeds = rng.integers(2**64, size=num_rows, dtype=np.uint64).tolist()
    table = make_table(vocab, rows, seeds, native)
    logits = random_logits(rng, num_rows, vocab)
    positions = rng.integers(2**20, size=num_rows)
    together = table.draw(logits, np.arange(num_rows), positions)
    order = rng.permutation(num_rows)
    moved = make_table(vocab, [rows[i] for i in order], [seeds[i] for i in order], native)
    assert np.array_equal(
        moved.draw(logits[order], np.arange(num_rows), positions[order]), together[order]
    )
    for r in range(num_rows):
        alone = table.draw(logits[r : r + 1], np.array([r]), positions[r : r + 1])
        assert alone[0] == together[r]


@pytest.mark.parametrize("native", PATHS)
def test_greedy_takes_the_lowest_of_equals(native: bool) -> None:
    for vocab, ties in ((200, [130, 7, 199]), (49152, [49151, 300, 20000])):
        logits = torch.randn(3, vocab)
        logits[:, ties] = 50.0
        table = greedy_table(vocab, 3, native=native)
        drawn = table.draw(logits, np.arange(3), np.zeros(3, np.int64))
        assert drawn.tolist() == [min(ties)] * 3


@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_told_apart(native: bool, bad: float) -> None:
    vocab = 300
    for temperature, where in ((0.0, 0), (0.0, 299), (1.0, 150)):
        logits = torch.randn(4, vocab)
        logits[1, where] = bad
        logits[2] = MASKED_LOGIT
        table = greedy_table(vocab, 4, native=native)
        table.reals[:, Field.TEMPERATURE] = temperature
        drawn = table.draw(logits, np.arange(4), np.arange(4))
        assert drawn[1] == ERROR_NOT_FINITE
        assert drawn[2] == ERROR_NO_CANDIDATE
        assert (drawn[[0, 3]] >= 0).all()


@pytest.mark.parametrize("native", PATHS)
def test_rows_may_share_memory_or_be_a_part(native: bool) -> None:
    vocab = 300
    wide = torch.randn(3, vocab + 20)
    part, forks = wide[:, :vocab], wide[:1, :vocab].expand(3, vocab)
    table = greedy_table(vocab, 3, native=native)
    table.reals[:, Field.TEMPERATURE] = 1.0
    table.params[:, Field.SEED] = [fresh_seed() for _ in range(3)]
    for logits in (part, forks):
        drawn = table.draw(logits, np.arange(3), np.arange(3))
        copied = table.draw(logits.contiguous(), np.arange(3), np.arange(3))
        assert np.array_equal(drawn, copied)


def test_wrong_tensors_are_refused() -> None:
    table = greedy_table(100, 2)
    slots, positions = np.arange(2), np.arange(2)
    for logits in (
        torch.zeros(2, 100, dtype=torch.bfloat16),
        torch.zeros(2, 101),
        torch.zeros(100),
        torch.zeros(100, 2).T,
        torch.zeros(3, 100),
    ):
        with pytest.raises(ValueError):
            table.draw(logits, slots, positions)
    with pytest.raises(ValueError, match="slots"):
        table.draw(torch.zeros(2, 100), np.array([0, 2]), positions)
    assert len(table.draw(torch.zeros(0, 100), slots[:0], positions[:0])) == 0


# ---- log-probabilities -------------------------------------------------------------------------


@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("vocab", [1, 19, 64, 700, 49152])
def test_top_rows_equal_log_softmax(native: bool, vocab: int) -> None:
    num_top = min(20, vocab)
    logits = torch.randn(5, vocab) * 5
    logits[1] = logits[1].round()  # Ties.
    logits[2, 0] = float("nan")
    table = greedy_table(vocab, 5, native=native)
    log_sums, ids = top_rows(logits, num_top, table.scratch)
    exact = torch.log_softmax(logits.double(), -1)
    assert np.isnan(log_sums[2])
    for r in (0, 1, 3, 4):
        assert (logits[r].double() - log_sums[r]).numpy() == pytest.approx(
            exact[r].numpy(), abs=1e-9
        )
        expected = np.lexsort((np.arange(vocab), -logits[r].numpy()))[:num_top]
        assert ids[r].tolist() == expected.tolist()
