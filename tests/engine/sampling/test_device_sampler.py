"""The engine's sampler with parameters in device memory (Triton's interpreter), beside the host's.

Both see the same logits, slots that change hands, masks that change and tokens that count.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.draws import StepSampler
from weft.engine.sampling import device_check
from weft.engine.sampling.device_draws import RowsOnDevice
from weft.engine.sampling.pending import PendingTokens
from weft.engine.sampling.sampler import Sampler, SamplerRow
from weft.engine.scheduler.plan import Plan
from weft.kernels.ops.sampling.device import draw_rows
from weft.testing.scheduling.bare_request import bare_request

pytestmark = pytest.mark.needs("triton-interpreter")

VOCAB = 150
NUM_SLOTS = 3
NUM_PROMPT = 9


def random_row(rng: np.random.Generator) -> SamplerRow:
    bias = {int(i): float(rng.normal(0, 4)) for i in rng.integers(VOCAB, size=3)}
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.7, 1.5])),
        top_k=int(rng.choice([0, 5, 40])),
        top_p=float(rng.choice([1.0, 0.9])),
        min_p=float(rng.choice([0.0, 0.05])),
        top_n_sigma=float(rng.choice([0.0, 0.7, 1.9])),
        repetition_penalty=float(rng.choice([1.0, 1.4])),
        presence_penalty=float(rng.choice([0.0, 0.7])),
        frequency_penalty=float(rng.choice([0.0, 0.9])),
        logit_bias=bias if rng.random() < 0.5 else {},
    )
    return SamplerRow(
        params=params,
        stop=StopCriteria(
            min_tokens=int(rng.integers(0, 5)), stop_token_ids=tuple(range(int(rng.integers(60))))
        ),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        eos_token_ids=(1, 2),
        top_logprobs=int(rng.integers(4)) if rng.random() < 0.5 else None,
    )


def random_mask(rng: np.random.Generator) -> np.ndarray:
    words = rng.integers(2**32, size=-(-VOCAB // 32), dtype=np.uint32)
    words[-1] &= np.uint32((1 << VOCAB % 32) - 1)
    words[0] |= np.uint32(1)
    return words


@pytest.mark.parametrize("way", ["host", "device", "graph"])
def test_a_mask_that_stays_allows_stop_tokens_after_min_tokens(way: str) -> None:
    sampler = Sampler(VOCAB, NUM_SLOTS, device=None if way == "host" else torch.device("cpu"))
    params = SamplingParams(temperature=0.0)
    stop = StopCriteria(min_tokens=2, stop_token_ids=(7,))
    sampler.add(1, SamplerRow(params=params, stop=stop, seed=0, eos_token_ids=(1,)), [5, 5, 5], [])
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    words[0] = (1 << 7) | (1 << 9)
    sampler.set_mask(1, words)
    logits, slots, drawn = torch.zeros(1, VOCAB), np.array([1]), list[int]()
    logits[0, 7] = 4.0
    for step in range(4):
        positions = np.array([3 + step])
        if way == "graph":
            assert sampler.common_way(slots) == "any"
            captured = partial(draw_by_graph, sampler, logits, slots, positions)
            drawn += sampler.begin_captured(captured, "any", slots).wait().token_ids.tolist()
        else:
            drawn += sampler.draw(logits, slots, positions).token_ids.tolist()
    assert drawn == [9, 9, 7, 7]


def draw_by_graph(
    sampler: Sampler, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, *_: object
) -> PendingTokens:
    tables = sampler.plain_tensors
    assert tables is not None
    rows = torch.from_numpy(slots), torch.from_numpy(positions)
    return PendingTokens.of_tokens(draw_rows(logits, *rows, tables), positions)


def test_both_samplers_draw_and_report_the_same() -> None:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    host = Sampler(VOCAB, NUM_SLOTS)
    device = Sampler(VOCAB, NUM_SLOTS, device=torch.device("cpu"))
    lengths: dict[int, int] = {}
    for step in range(8):
        for slot in range(NUM_SLOTS):
            if slot in lengths and rng.random() < 0.3:
                del lengths[slot]
                host.remove(slot)
                device.remove(slot)
            if slot not in lengths:
                row = random_row(rng)
                prompt, output = (rng.integers(VOCAB, size=n).tolist() for n in (NUM_PROMPT, 4))
                output = output if rng.random() < 0.5 else []
                host.add(slot, row, prompt, output)
                device.add(slot, row, prompt, output)
                lengths[slot] = len(prompt) + len(output)
            if rng.random() < 0.3:
                mask = random_mask(rng) if rng.random() < 0.7 else None
                for sampler in (host, device):
                    if mask is not None and rng.random() < 0.5:
                        sampler.mask_memory()[slot] = mask
                        sampler.set_masks(np.array([slot]), [lengths[slot] - NUM_PROMPT])
                    else:
                        sampler.set_mask(slot, mask)
        slots = rng.permutation(NUM_SLOTS)[: int(rng.integers(1, NUM_SLOTS + 1))]
        positions = np.array([lengths[slot] for slot in slots.tolist()])
        logits = torch.from_numpy(rng.normal(0, 3, (len(slots), VOCAB)).astype(np.float32))
        before = logits.clone()
        expected = host.draw(logits, slots, positions)
        slots_there = torch.from_numpy(slots) if rng.random() < 0.5 else None
        on_device = partial(RowsOnDevice, slots_there, torch.from_numpy(positions))
        if rng.random() < 0.7:
            # What the device has counts: positions of the host may be later ones.
            output_of = device.begin(logits, slots, positions + 7, on_device).wait()
        else:
            output_of = device.draw(logits, slots, positions)
        assert torch.equal(logits, before)
        assert output_of.token_ids.tolist() == expected.token_ids.tolist(), step
        assert output_of.errors.keys() == expected.errors.keys()
        for ours, theirs in zip(output_of.logprobs, expected.logprobs, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.token_id == theirs.token_id
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
                assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
                assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top])
        for slot in slots.tolist():
            lengths[slot] += 1


def test_the_trial_at_start_finds_a_sampler_that_draws_other_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(device_check, "_ROWS_A_TRIAL", 1)
    assert device_check.device_sampler_fault(VOCAB, cpu) is None
    draw_rows = device_check.draw_rows
    monkeypatch.setattr(
        device_check, "draw_rows", lambda *args: (draw_rows(*args) + 1) % (VOCAB - 1)
    )
    fault = device_check.device_sampler_fault(VOCAB, cpu)
    assert fault is not None
    assert "tokens of a trial differ" in fault
    monkeypatch.setattr(device_check, "draw_rows", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in str(device_check.device_sampler_fault(VOCAB, cpu))


def test_rows_with_masks_of_their_own_draw_as_their_slots_do_now(seed: int) -> None:
    """Slots change hands, and the same rows have masks again; nothing of before is left."""
    rng = np.random.default_rng(seed)
    most = 6
    device = Sampler(VOCAB, NUM_SLOTS, device=torch.device("cpu"), max_masked_rows=most)
    taken: set[int] = set()
    for _ in range(12):
        for slot in range(NUM_SLOTS):
            if slot in taken and rng.random() < 0.4:
                continue
            if slot in taken:
                device.remove(slot)
            temperature, top_k = float(rng.choice([0.0, 0.8])), int(rng.choice([0, 5]))
            params = SamplingParams(temperature=temperature, top_k=top_k)
            own = SamplerRow(
                params=params, stop=StopCriteria(), seed=int(rng.integers(99)), eos_token_ids=(1,)
            )
            device.add(slot, own, [5], [])
            taken.add(slot)
        count = int(rng.integers(1, most + 1))
        slots = rng.integers(NUM_SLOTS, size=count)
        positions, masks = rng.integers(99, size=count), [random_mask(rng) for _ in slots]
        logits = torch.from_numpy(rng.normal(0, 3, (count, VOCAB)).astype(np.float32))
        slot_override = device.mask_rows(slots, masks, [1] * count)
        found = device.begin(logits, slots, positions, slot_override=slot_override).wait().token_ids
        for row, slot in enumerate(slots.tolist()):
            alone = Sampler(VOCAB, NUM_SLOTS)
            alone.add(slot, device._rows[slot], [5], [])
            alone.set_mask(slot, masks[row])
            place = np.array([slot]), positions[row : row + 1]
            assert found[row] == alone.draw(logits[row : row + 1], *place).token_ids[0]


def test_a_slot_is_free_again_where_there_was_no_memory_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = Sampler(VOCAB, NUM_SLOTS, device=torch.device("cpu"))
    nothing = SimpleNamespace(grammars={})
    step_sampler = StepSampler(sampler, nothing)  # type: ignore[arg-type]
    own = SamplingParams(temperature=0.0, logit_bias={7: 5.0}, presence_penalty=0.1)
    requests = [bare_request([1], 16, bytes(32), params=own, slot=slot) for slot in range(2)]
    step_sampler.prepare(Plan(), requests[:1])
    monkeypatch.setattr(torch, "cat", _no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        step_sampler.prepare(Plan(), requests)
    monkeypatch.undo()
    step_sampler.free(1)
    step_sampler.prepare(Plan(), requests)
    assert step_sampler.num_slots == 2
    drawn = sampler.draw(torch.zeros(2, VOCAB), np.arange(2), np.array([3, 3]))
    assert drawn.token_ids.tolist() == [7, 7]


def _no_memory(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError
