"""Random sampling parameters, with what the host's sampler makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from weft.kernels.ops.sampling.cpu import Scratch, sample_rows
from weft.kernels.ops.sampling.spec import ALWAYS_MASKED, SlotParams, SlotTensors, pack_slot
from weft.testing.kernels.naive_sampling import NaiveParams, edited_logits

Int64Array = npt.NDArray[np.int64]


@dataclass
class DrawCase:
    """Rows of logits and the parameters of all slots."""

    logits: torch.Tensor
    """[L, vocab] float32 on the CPU."""
    slots: Int64Array
    positions: Int64Array
    params: list[NaiveParams]
    """Parameters by slot."""
    seeds: list[int]
    masks: npt.NDArray[np.uint32]
    """[slots, words]."""
    is_masked: npt.NDArray[np.bool_]


def make_case(
    rng: np.random.Generator, vocab: int, num_rows: int, num_slots: int, spread: float | None = None
) -> DrawCase:
    """Creates a case with all kinds of parameters; the logits are flat, peaked, tied or partly
    infinite.
    """
    spread = float(rng.choice([0.0, 0.3, 1.0, 4.0, 30.0])) if spread is None else spread
    logits = torch.from_numpy(rng.normal(0, 1, (num_rows, vocab)).astype(np.float32) * spread)
    if rng.random() < 0.4:
        logits = logits.bfloat16().float()
    if rng.random() < 0.3:
        logits[torch.from_numpy(rng.random((num_rows, vocab)) < 0.3)] = -1e30
        logits[:, 0] = 0.0
    allowed = rng.random((num_slots, vocab)) < rng.choice([0.02, 0.5, 0.98])
    allowed[np.arange(num_slots), rng.integers(vocab, size=num_slots)] = True
    packed = np.packbits(allowed, axis=1, bitorder="little")
    masks = np.zeros((num_slots, -(-vocab // 32) * 4), np.uint8)
    masks[:, : packed.shape[1]] = packed
    return DrawCase(
        logits,
        rng.permutation(num_slots)[:num_rows],
        rng.integers(2**34, size=num_rows),
        [_random_params(rng, vocab) for _ in range(num_slots)],
        rng.integers(2**64, size=num_slots, dtype=np.uint64).tolist(),
        masks.view("<u4"),
        rng.random(num_slots) < 0.3,
    )


def _random_params(rng: np.random.Generator, vocab: int) -> NaiveParams:
    def sometimes(value: float, otherwise: float) -> float:
        return value if rng.random() < 0.5 else otherwise

    params = NaiveParams(
        temperature=sometimes(float(rng.choice([0.0, 0.1, 1.0, 5.0])), rng.random() + 0.5),
        top_k=int(sometimes(0, rng.choice([1, 40, 64, 65, rng.integers(1, vocab + 2)]))),
        top_p=sometimes(1.0, float(rng.choice([1e-6, 0.5, 0.95, 0.999, rng.random() + 1e-9]))),
        min_p=sometimes(0.0, float(rng.choice([1.0, 0.5, 0.05, 1e-4]))),
        top_n_sigma=sometimes(0.0, 3 * rng.random()),
    )
    if rng.random() < 0.4:
        params.repetition_penalty = float(rng.choice([1.0, 1.3, 0.7]))
        params.presence_penalty, params.frequency_penalty = rng.normal(0, 1, 2).tolist()
        params.prompt = tuple(rng.integers(vocab, size=20).tolist())
        params.output = tuple(rng.integers(vocab, size=30).tolist())
    if rng.random() < 0.3:
        ids = rng.integers(vocab, size=5).tolist()
        params.logit_bias = dict(zip(ids, rng.normal(0, 5, 5).tolist(), strict=True))
    return params


def draw_on_host(case: DrawCase) -> list[int]:
    """Draws with the host's sampler from logits that were edited one token at a time."""
    packed = [
        pack_slot(slot_params(params, seed), mask_end=ALWAYS_MASKED * is_masked)
        for params, seed, is_masked in zip(
            case.params, case.seeds, case.is_masked.tolist(), strict=True
        )
    ]
    tables = torch.from_numpy(np.stack(packed)), torch.from_numpy(case.masks.view(np.int32))
    rows = zip(case.logits.numpy(), case.slots.tolist(), strict=True)
    edited = np.stack([edited_logits(row, case.params[slot]) for row, slot in rows])
    logits, scratch = torch.from_numpy(edited), Scratch(edited.shape[1])
    return sample_rows(logits, case.slots, case.positions, *tables, scratch).tolist()


def slot_params(params: NaiveParams, seed: int) -> SlotParams:
    """The same parameters in the sampler's form."""
    names = SlotParams._fields
    return SlotParams(**{**{n: getattr(params, n) for n in names if n != "seed"}, "seed": seed})


def tables_of(case: DrawCase, device: torch.device) -> SlotTensors:
    """The same parameters in the device's memory."""
    vocab, num_slots = case.logits.shape[1], len(case.params)
    rows = []
    biases = np.zeros((num_slots, vocab), np.float32)
    counts = np.zeros((num_slots, vocab), np.int32)
    for slot, params in enumerate(case.params):
        biases[slot, list(params.logit_bias)] = list(params.logit_bias.values())
        np.add.at(counts[slot], list(params.output), 2)
        counts[slot, list(params.prompt)] |= 1
        rows.append(
            pack_slot(
                slot_params(params, case.seeds[slot]),
                mask_end=ALWAYS_MASKED if case.is_masked[slot] else 0,
                bias_row=slot if params.logit_bias else -1,
                count_row=slot if params.prompt else -1,
            )
        )
    arrays = (np.stack(rows), case.masks.view(np.int32), biases, counts)
    return SlotTensors(*(torch.from_numpy(array).to(device) for array in arrays))
