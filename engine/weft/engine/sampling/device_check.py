"""Checks the device's sampler when an engine starts: compiles it and compares its tokens with the
host's.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from weft.kernels.ops.sampling.cpu import Scratch, sample_rows
from weft.kernels.ops.sampling.device import draw_rows, top_logits
from weft.kernels.ops.sampling.spec import DraftedRows, SlotParams, SlotTensors, pack_slot

logger = logging.getLogger(__name__)

_TRIALS = (
    SlotParams(),
    SlotParams(temperature=1.0),
    SlotParams(temperature=0.8, top_p=0.95, top_k=40),
    SlotParams(temperature=1.0, top_p=0.9, min_p=0.01),
    SlotParams(temperature=1.0, top_n_sigma=1.0),
)
_ROWS_A_TRIAL = 8


def device_sampler_fault(vocab_size: int, device: torch.device) -> str | None:
    """Draws from the same logits on the device and on the host. Returns why the device must not
    draw; None if all tokens are equal.
    """
    rng = np.random.default_rng(0)
    count = len(_TRIALS) * _ROWS_A_TRIAL
    spreads = np.resize([0.3, 4.0], count)[:, None]
    rows = (spreads * rng.standard_normal((count, vocab_size))).astype(np.float32)
    trials = [_TRIALS[slot // _ROWS_A_TRIAL]._replace(seed=slot) for slot in range(count)]
    params = torch.from_numpy(np.stack([pack_slot(trial) for trial in trials]))
    masks = torch.zeros((count, -(-vocab_size // 32)), dtype=torch.int32)
    slots, logits = np.arange(count), torch.from_numpy(rows)
    expected = sample_rows(logits, slots, slots + 100, params, masks, Scratch(vocab_size))
    try:
        drawn = _draw(logits, params, masks, device)
    except Exception as error:
        # A compiler or driver may raise anything; the host can draw instead.
        logger.exception("the device's sampler does not run")
        return f"the device's sampler does not run ({type(error).__name__})"
    num_wrong = int((drawn != expected).any(axis=0).sum())
    return f"{num_wrong} of {count} tokens of a trial differ" if num_wrong else None


def _draw(
    logits: torch.Tensor, params: torch.Tensor, masks: torch.Tensor, device: torch.device
) -> np.ndarray:
    """Draws once as from rows without drafts, and once as from rows with drafts: [2, L]."""
    count, vocab_size = logits.shape
    slots, logits = torch.arange(count, device=device), logits.to(device)
    tables = SlotTensors(
        params.to(device),
        masks.to(device),
        torch.zeros((1, vocab_size), device=device),
        torch.zeros((1, vocab_size), dtype=torch.int32, device=device),
    )
    tokens = draw_rows(logits, slots, slots + 100, tables)
    drafted = DraftedRows(firsts=slots, tokens=slots, words=None)
    behind_drafts = draw_rows(logits, slots, slots + 100, tables, drafted)
    for heats in (None, torch.ones(len(slots), dtype=torch.float64, device=logits.device)):
        top_logits(logits, slots, tokens, min(5, vocab_size), heats)
    drawn: np.ndarray = torch.stack((tokens, behind_drafts)).cpu().numpy()
    return drawn
