"""What drawing tokens costs on a GPU, beside the same from logits copied to the host.

    python bench/gpu_sampling.py [--vocab 128256] [--batches 1 16 64 256]

Logits fall as those of language models do (by rank, with noise), or are flat, which makes top-p
search the whole row. Both samplers' tokens are compared. Times are medians: `device_ms` of the
launches and copies of a step, enqueued behind other work as behind a forward; `step_ms` of a call
of the engine's sampler, launches included; `host_ms` of the way by the host: logits copied, then
drawn by the native sampler.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch
from clocks import event_s
from harness import Harness, Run, timed
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.sampling.sampler import Sampler, SamplerRow

KINDS: dict[str, tuple[SamplingParams, bool, int | None]] = {
    "greedy": (SamplingParams(temperature=0.0), False, None),
    "temperature": (SamplingParams(temperature=0.8), False, None),
    "top-p 0.95": (SamplingParams(temperature=0.8, top_p=0.95), False, None),
    "top-k 50, top-p 0.9": (SamplingParams(temperature=0.8, top_k=50, top_p=0.9), False, None),
    "top-p 0.95, flat": (SamplingParams(temperature=1.0, top_p=0.95), True, None),
    "penalties": (
        SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.2),
        False,
        None,
    ),
    "top-p 0.95, 5 log-probabilities": (SamplingParams(temperature=0.8, top_p=0.95), False, 5),
    "temperature, new masks": (SamplingParams(temperature=0.8), False, None),
}
"""Cases by name: parameters, flat logits, log-probabilities."""

harness = Harness(__file__, __doc__)
harness.flag("--vocab", type=int, default=128_256)
harness.flag("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
harness.flag("--kinds", nargs="+", choices=KINDS, default=list(KINDS))


def make_logits(batch: int, vocab: int, is_flat: bool) -> torch.Tensor:
    """[batch, vocab] float32 on the device."""
    noise = torch.randn(batch, vocab, device="cuda")
    if is_flat:
        return 0.3 * noise
    ranks = torch.stack([torch.randperm(vocab, device="cuda") for _ in range(batch)]) + 1.0
    return 0.5 * noise - 1.5 * ranks.log()


def make_sampler(batch: int, vocab: int, kind: str, device: torch.device | None) -> Sampler:
    """Creates a sampler with a sample in each slot."""
    params, _, top_logprobs = KINDS[kind]
    sampler = Sampler(vocab, batch, device=device)
    prompt = list(range(0, vocab, vocab // 500))
    for slot in range(batch):
        row = SamplerRow(
            params=params,
            stop=StopCriteria(),
            seed=slot,
            eos_token_ids=(),
            top_logprobs=top_logprobs,
        )
        sampler.add(slot, row, prompt, [])
    return sampler


def make_masks(batch: int, vocab: int) -> list[np.ndarray]:
    """Masks like those of constraints: each row may draw a tenth of the vocabulary."""
    allowed = np.random.default_rng(0).random((batch, -(-vocab // 32) * 32)) < 0.1
    allowed[:, vocab:] = False
    packed = np.packbits(allowed, axis=1, bitorder="little")
    return list(packed.view(np.uint32))


def set_masks(sampler: Sampler, masks: list[np.ndarray]) -> None:
    """Sets the masks, as in a step in which every row's mask changes."""
    for slot, mask in enumerate(masks):
        sampler.set_mask(slot, mask)


def wall_ms(call: Callable[[], object], turns: int) -> float:
    """Median wall time, milliseconds."""

    def whole() -> None:
        call()
        torch.cuda.synchronize()

    times = []
    for _ in range(turns):
        torch.cuda.synchronize()
        times.append(timed(whole))
    return 1e3 * statistics.median(times[1:])


def on_device_ms(call: Callable[[], object], turns: int) -> float:
    """Time on the device of launches that are enqueued behind a long one."""
    times = []
    ballast = torch.randn(4096, 4096, device="cuda")
    for _ in range(turns):
        for _ in range(4):
            ballast @ ballast
        times.append(event_s(call))
    return 1e3 * statistics.median(times[1:])


def bench(kind: str, batch: int, vocab: int) -> dict[str, float]:
    """Times both ways and compares their tokens."""
    logits = make_logits(batch, vocab, KINDS[kind][1])
    slots = np.arange(batch)
    ours = make_sampler(batch, vocab, kind, logits.device)
    theirs = make_sampler(batch, vocab, kind, None)

    masks = make_masks(batch, vocab) if kind.endswith("masks") else []

    def by_host(position: int = 100) -> np.ndarray:
        set_masks(theirs, masks)
        copy = logits.to("cpu", non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return theirs.draw(copy, slots, np.full(batch, position)).token_ids

    def by_device(position: int = 100) -> np.ndarray:
        set_masks(ours, masks)
        return ours.draw(logits, slots, np.full(batch, position)).token_ids

    for position in range(4):
        assert np.array_equal(by_device(position), by_host(position)), kind
    device_ms = on_device_ms(by_device, 12)
    step_ms, host_ms = wall_ms(by_device, 12), wall_ms(by_host, 6)
    return {"device_ms": device_ms, "step_ms": step_ms, "host_ms": host_ms}


@harness.part
def sampling(run: Run) -> None:
    """All kinds."""
    for kind in run.options.kinds:
        for batch in run.options.batches:
            run.row(bench(kind, batch, run.options.vocab), table=kind, batch=batch)


if __name__ == "__main__":
    sys.exit(harness.main())
