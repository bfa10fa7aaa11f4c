"""The blocks of recurrent layers in a step, as numbers by request."""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.base.arrays import Int64Array


class StateRows(NamedTuple):
    """Blocks of a step's requests, R in the step's order."""

    borders: Int64Array
    """[R]: position up to which each request's block has its tokens."""
    blocks: Int64Array
    """[R]: the block; block 0, which is zeros, at position 0."""
    writes: Int64Array
    """[3, W]: number of a request in the step, position and block of each state to be written; by
    request, positions rising.
    """
