"""The blocks of recurrent layers in a step, as numbers by request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from weft.contract.arrays import Int64Array

NO_TABLE: Int64Array = np.zeros((0, 3), np.int64)
"""Blocks of no request."""


class StateRows(NamedTuple):
    """Blocks of a step's requests, R in the step's order."""

    borders: Int64Array
    """[R]: position up to which each request's block covers its tokens."""
    blocks: Int64Array
    """[R]: the block. At position 0 it is block 0, which is zeros."""
    writes: Int64Array
    """[3, W]: number of a request in the step, position and block of each state to be written.
    Sorted by request, then by position.
    """
    num_few: int = 0
    """Number of leading requests, those without prompts. A device can compute their states by
    itself, since it knows where they begin.
    """
    table: Int64Array = NO_TABLE
    """[R, 3]: each request's block at border b in column b / page_size mod 3."""
