"""Where the ragged sequences of a step begin and end, in the form that recurrent operations read.
It is made once a step, for all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

CHUNK = 64
"""Most rows of a chunk."""


class HostSequences(NamedTuple):
    """`Sequences` on the host."""

    cu_lens: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    chunks: npt.NDArray[np.int64]
    first_chunks: npt.NDArray[np.int64]

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64]) -> HostSequences:
        """`lengths`: [S], rows of each sequence, each at least one."""
        cu_lens = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=cu_lens[1:])
        numbers = np.arange(len(lengths))
        num_chunks = -(-lengths // CHUNK)
        first_chunks = np.cumsum(num_chunks) - num_chunks
        of_chunk = np.repeat(numbers, num_chunks)
        behind = CHUNK * (np.arange(len(of_chunk)) - first_chunks[of_chunk])
        sizes = np.minimum(lengths[of_chunk] - behind, CHUNK)
        chunks = np.stack([cu_lens[of_chunk] + behind, sizes], axis=1)
        return cls(cu_lens, np.repeat(numbers, lengths), chunks, first_chunks)


class Sequences(NamedTuple):
    """S sequences of N rows in all, one after another; each has at least one row."""

    cu_lens: torch.Tensor
    """[S + 1] int64: where each sequence begins."""
    owners: torch.Tensor
    """[N] int64: the sequence of each row."""
    chunks: torch.Tensor
    """[C, 2] int64: first row and number of rows of each chunk; all chunks of a sequence but the
    last are full.
    """
    first_chunks: torch.Tensor
    """[S] int64: each sequence's first chunk."""

    @classmethod
    def of(cls, cu_lens: torch.Tensor) -> Sequences:
        """The sequences with bounds `cu_lens`, [S + 1] int64; it waits for the device."""
        host = HostSequences.of(np.diff(cu_lens.cpu().numpy()))
        return cls(*(torch.from_numpy(each).to(cu_lens.device) for each in host))

    @property
    def num_rows(self) -> int:
        """N."""
        return self.owners.shape[0]

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.first_chunks.shape[0]
