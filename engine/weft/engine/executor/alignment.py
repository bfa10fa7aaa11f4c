"""When the tokens of a transcript are spoken, from a decoder's attention to its clip.

The attention of a few heads is normalised over the tokens, smoothed over time and averaged. The
path of least cost through it (dynamic time warping) gives each token a frame, as in transformers'
`_extract_token_timestamps` and OpenAI's `find_alignment`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from weft.checkpoint.audio_config import AlignmentConfig
from weft.contract.arrays import Float32Array, Int64Array
from weft.engine.base.device_copies import Fetched
from weft.engine.executor.step_input import PooledRows
from weft.engine.model.step import AlignedRows

_BOTH, _ALONG_TOKENS, _ALONG_FRAMES = 0, 1, 2
"""The last step of a path to a cell."""
_NUMBERS_OF_A_THREAD = 1 << 15
"""Elements that torch gives to one thread, if an operation has no more."""


class Aligner:
    """Joins the attention of a prompt's tokens, whose rows may come in several steps, by slot."""

    def __init__(self, config: AlignmentConfig | None) -> None:
        self._median_width = 1 if config is None else config.median_width
        self._parts: dict[int, list[torch.Tensor]] = {}

    def begin(self, pieces: Sequence[PooledRows], aligned: Sequence[AlignedRows]) -> Alignments:
        """Takes in the attention of a step. `aligned` has one entry for each piece that has rows to
        align.
        """
        of_requests = {rows.request: rows for rows in aligned}
        found = []
        for piece in pieces:
            rows = of_requests.get(piece.request)
            if rows is None:
                continue
            if piece.start <= piece.pool.aligned_from:
                self._parts[piece.slot] = []
            parts = self._parts[piece.slot]
            parts.append(torch.cat(rows.weights))
            if piece.is_last:
                del self._parts[piece.slot]
                found.append((piece, _matrix(torch.cat(parts, dim=1), self._median_width)))
        return Alignments(found)


class Alignments:
    """Alignments of a step's prompts, whose attention the device may still be computing."""

    def __init__(self, found: Sequence[tuple[PooledRows, torch.Tensor]]) -> None:
        self._found = [(piece, Fetched(matrix)) for piece, matrix in found]

    def wait(self) -> list[tuple[PooledRows, Float32Array]]:
        """Waits for them: [1, tokens] of each prompt, frames."""
        return [
            (piece, frames_of(matrix.wait().numpy()).astype(np.float32)[None])
            for piece, matrix in self._found
        ]


def _matrix(weights: torch.Tensor, median_width: int) -> torch.Tensor:
    """[tokens, frames] float32 of attention, [heads, tokens, frames] float32."""
    matrix = weights.new_zeros(weights.shape[1:])
    # On a CPU few rows at once, so that torch does not wait for other threads in each of many
    # small operations.
    num_rows = len(matrix)
    if weights.device.type == "cpu":
        num_rows = max(1, _NUMBERS_OF_A_THREAD // matrix.shape[1])
    for head in weights:
        # The deviation of one token is 0; it begins with the clip whatever the costs are.
        deviation, mean = torch.std_mean(head, dim=0, keepdim=True, unbiased=False)
        deviation = deviation.clamp(min=1e-12)
        for rows, own in zip(
            torch.split(matrix, num_rows), torch.split(head, num_rows), strict=True
        ):
            rows += _smoothed((own - mean) / deviation, median_width)
    return matrix / len(weights)


def _smoothed(weights: torch.Tensor, width: int) -> torch.Tensor:
    """The median over `width` frames around each."""
    half = width // 2
    if not half or weights.shape[-1] <= half:
        return weights
    padded = torch.nn.functional.pad(weights, (half, half), mode="reflect")
    windows = [padded[..., at : at + weights.shape[-1]] for at in range(width)]
    # Of more than half of the values, neither the largest nor the least is the median.
    kept = windows[: half + 2]
    for more in (*windows[half + 2 :], None):
        for at in range(1, len(kept)):
            kept[0], kept[at] = (
                torch.minimum(kept[0], kept[at]),
                torch.maximum(kept[0], kept[at]),
            )
        for at in range(1, len(kept) - 1):
            kept[-1], kept[at] = (
                torch.maximum(kept[-1], kept[at]),
                torch.minimum(kept[-1], kept[at]),
            )
        kept = kept[1:-1]
        if more is not None:
            kept.append(more)
    (median,) = kept
    return median


def frames_of(matrix: Float32Array) -> Int64Array:
    """[tokens]: the first frame of each token on the path of least cost through the negated
    [tokens, frames] from the first to the last of both.
    """
    num_tokens, num_frames = matrix.shape
    costs = -matrix.astype(np.float64)
    before = np.full(num_frames + 1, np.inf)
    before[0] = 0.0
    steps = np.empty((num_tokens, num_frames), np.int8)
    for token, row in enumerate(costs):
        # row[f] + min(other ways, cost at f - 1), for all frames at once: a running minimum of
        # what each costs beyond the row's own sum.
        sums = np.cumsum(row)
        others = np.minimum(before[:-1], before[1:])
        now = np.minimum.accumulate(others - np.concatenate(([0.0], sums[:-1]))) + sums
        left = np.concatenate(([np.inf], now[:-1]))
        both, up = before[:-1], before[1:]
        steps[token] = np.where(
            # Smoothed attention often has equal costs side by side, whose sums are equal, too.
            (both <= up) & (both < left),
            _BOTH,
            np.where((up < both) & (up < left), _ALONG_TOKENS, _ALONG_FRAMES),
        )
        before = np.concatenate(([np.inf], now))
    firsts = np.zeros(num_tokens, np.int64)
    token, frame = num_tokens - 1, num_frames - 1
    while token >= 0:
        firsts[token] = frame
        step = steps[token, frame]
        token -= step != _ALONG_FRAMES
        frame -= step != _ALONG_TOKENS
    return firsts
