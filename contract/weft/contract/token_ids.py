"""Token ids of a whole prompt, packed, so that no loop in Python sends and checks them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from weft.contract.errors import InvalidRequest

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # Has no parameters when the program runs.

ID_TYPE = "I"
"""Type code of arrays of token ids: unsigned numbers of 32 bits."""


def token_ids(ids: Iterable[int] = ()) -> TokenIds:
    """Packs token ids. Raises InvalidRequest if one is negative, or takes more than 32 bits."""
    try:
        return array(ID_TYPE, ids)
    except OverflowError as error:
        raise InvalidRequest(f"a token id has no 32 bits: {error}", stage="validate") from error


def unpacked_ids(data: bytes) -> TokenIds:
    """Token ids of the bytes of such an array. Raises ValueError if the bytes end within a
    number.
    """
    ids = array(ID_TYPE)
    ids.frombytes(data)
    return ids


def extend_ids(ids: TokenIds, more: Sequence[int]) -> None:
    """Appends token ids of 32 bits, which numpy reads from a protobuf field at once."""
    ids.frombytes(np.asarray(more, np.uint32).tobytes())


def are_below(ids: Iterable[int], limit: int) -> bool:
    """Whether all ids are from 0 to `limit` - 1."""
    try:
        packed = ids if isinstance(ids, array) else array(ID_TYPE, ids)
    except OverflowError:
        return False
    return not packed or int(np.asarray(packed).max()) < limit
