"""Log-probabilities of a step's tokens, from columns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from weft.contract.arrays import Int64Array
from weft.contract.request import TokenLogprob

Float64Array = npt.NDArray[np.float64]


def token_logprobs(
    num_tops: Mapping[int, int],
    tokens: Int64Array,
    drawn: Float64Array,
    top_ids: Int64Array,
    top: Float64Array,
) -> dict[int, TokenLogprob]:
    """Log-probabilities by row, without the rows that have no token.

    Args:
        num_tops: By row, for M rows: number of most likely tokens wanted.
        tokens: [M]: tokens drawn from these rows; negative where there is none.
        drawn: [M]: log-probabilities of the tokens.
        top_ids: [M, N]: most likely tokens of each row, most likely first.
        top: [M, N]: their log-probabilities.
    """
    # Converting all numbers at once is ten times faster than indexing the arrays one by one.
    columns = zip(
        num_tops.items(),
        tokens.tolist(),
        drawn.tolist(),
        top_ids.tolist(),
        top.tolist(),
        strict=True,
    )
    return {
        row: TokenLogprob(token, logprob, tuple(zip(ids[:wanted], values[:wanted], strict=True)))
        for (row, wanted), token, logprob, ids, values in columns
        if token >= 0
    }
