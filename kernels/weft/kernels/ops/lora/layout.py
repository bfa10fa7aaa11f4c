"""How rows of adapters lie in memory."""

from __future__ import annotations

import torch

ROW_RANK = 8
"""Ranks in a row of the pool."""
B_COLUMNS = 16
"""Columns in a block of packed B."""
_WORDS = {2: torch.int16, 4: torch.int32}
"""Integer dtypes by size in bytes, used instead of bfloat16, which numpy lacks."""


def packed_sizes(width: int) -> tuple[int, int]:
    """[blocks, elements of a block] of a packed row of B with `width` columns."""
    return -(-width // B_COLUMNS), ROW_RANK * B_COLUMNS


def pack_b(rows: torch.Tensor) -> torch.Tensor:
    """Packs rows of B for native operations, which compute B_COLUMNS columns at a time.

    A block of B_COLUMNS columns is laid out as a panel of a weight (csrc/linear.h), in words of 32
    bits that hold a float or two bfloat16 of neighbouring ranks: first the first words of all
    columns, then all second words. The last block is filled up with zeros.

    Args:
        rows: [n, ROW_RANK, out_features], on the CPU.

    Returns:
        [n, blocks, ROW_RANK * B_COLUMNS].
    """
    count, _, width = rows.shape
    blocks, size = packed_sizes(width)
    packed = torch.zeros((count, blocks, size), dtype=rows.dtype)
    # Numpy, since torch would use the threads that steps run on.
    words, given = (t.view(_WORDS[rows.itemsize]).numpy() for t in (packed, rows))
    ranks = words.reshape(count, blocks, -1, B_COLUMNS, 4 // rows.itemsize)
    full = width // B_COLUMNS
    for rank in range(ROW_RANK):
        step, half = divmod(rank, 4 // rows.itemsize)
        to, some = ranks[:, :, step, :, half], given[:, rank]
        whole = some[:, : full * B_COLUMNS]
        to[:, :full] = whole.reshape(count, full, B_COLUMNS)
        if full < blocks:
            to[:, full, : width % B_COLUMNS] = some[:, full * B_COLUMNS :]
    return packed


def unpack_b(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Inverts `pack_b`; returns a new tensor, [n, ROW_RANK, width]."""
    count, blocks, _ = packed.shape
    per_word = 4 // packed.itemsize
    ranks = packed.view(count, blocks, -1, B_COLUMNS, per_word).permute(0, 2, 4, 1, 3)
    return ranks.reshape(count, ROW_RANK, blocks * B_COLUMNS)[:, :, :width].contiguous()
