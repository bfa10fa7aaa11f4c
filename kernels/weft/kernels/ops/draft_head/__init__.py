"""The draft head of EAGLE-3 (Li et al. 2025): its K and V for a target's step, and chains of
drafts.

A head is one decoder layer over pairs of a token's embedding and g, the target's state at the
position before. Its K and V are one more layer of the target's pool, without position 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.draft_head.cpu import NativeEntries, native_chain, native_for
from weft.kernels.ops.draft_head.operations import draft_chain_reference, draft_entries_reference
from weft.kernels.ops.draft_head.spec import (
    MAX_NATIVE_DEPTH,
    DraftChains,
    DraftHeadWeight,
    DraftRows,
)
from weft.kernels.shared.cpu import DraftWriteStruct
from weft.kernels.shared.deferred import deferred
from weft.kernels.shared.side_stream import SideStreamWork, is_forking

if TYPE_CHECKING:
    from weft.kernels.shared import dependent_launch as _dependent_launch
else:
    _dependent_launch = deferred(__name__, "weft.kernels.shared.dependent_launch")


class DraftEntries:
    """Writes the head's K and V of a target's step into the pool.

    The work begins once the taps have written `aux`, in the threads of the native operation or
    beside the layers that follow. Indices are checked after it has run.

    Args:
        aux: [T, W], contiguous: the target's states.
        kept: [slots, H], contiguous: g of the row before each request's first one, which counts
            as zeros at position 0; becomes g of the request's last row.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page; written.
        layer: Index of the head's layer in the pool.
    """

    def __init__(
        self,
        aux: torch.Tensor,
        w: DraftHeadWeight,
        rows: DraftRows,
        kept: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
    ) -> None:
        self._arguments = (aux, w, rows, kept, pool, layer)
        self._is_done = False
        self._beside: SideStreamWork[torch.Tensor] | None = None
        native = native_for(aux, w, pool)
        self._native = None if native is None else NativeEntries(native, *self._arguments)

    def native(self) -> DraftWriteStruct | None:
        """The work for native operations, valid as long as this object lives; None if it has no
        native form.
        """
        return None if self._native is None else self._native.write

    def done(self) -> None:
        """Called when the native operation has run it."""
        self._is_done = True

    def begin(self) -> None:
        """Called on a GPU once all states have been tapped, before the layers that follow."""
        device = self._arguments[0].device
        if is_forking(device):
            self._beside = SideStreamWork(device, self._launch_beside, "drafts")

    def finish(self) -> torch.Tensor:
        """Runs the operation unless the layers have done so.

        Returns:
            g [T, H], dtype of `aux`.

        Raises:
            IndexError: A token, position, slot or length points outside.
        """
        if self._beside is not None:
            # The cycle is broken here, since garbage is not collected while a graph is captured.
            work, self._beside = self._beside, None
            return work.join()
        if self._native is None:
            return draft_entries_reference(*self._arguments)
        if not self._is_done:
            self._native.run()
            self.done()
        return self._native.g

    def _launch_beside(self) -> torch.Tensor:
        with _dependent_launch.ordinary_launches():
            return draft_entries_reference(*self._arguments)


def draft_chain(
    state: torch.Tensor,
    token_ids: torch.Tensor,
    w: DraftHeadWeight,
    chains: DraftChains,
    pool: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Proposes tokens one after another, each time the head's most likely one.

    Args:
        state: [R, H], contiguous: g of the position before the last token; overwritten.
        token_ids: [R] int64: last tokens.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page; written.
        layer: Index of the head's layer in the pool.

    Returns:
        [D, R] int64, ids of the target's vocabulary; undefined for steps that a chain did not run.

    Raises:
        IndexError: A token, position, slot, length or page points outside.
    """
    native = native_for(state, w, pool)
    depth, is_divided = len(chains.positions), w.peers is not None
    if native is None or is_divided or depth > MAX_NATIVE_DEPTH or chains.lora is not None:
        return draft_chain_reference(state, token_ids, w, chains, pool, layer)
    return native_chain(native, state, token_ids, w, chains, pool, layer)
