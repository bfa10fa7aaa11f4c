"""Low-rank additions on a GPU: all tokens' ranks first, then their products added in place.

Ranks need the product's input alone, so that in a captured graph they are computed beside the
product. Few tokens are taken row by row, more in tiles of those sorted by adapter. Grids do not
depend on which adapters there are: a captured graph serves any mix.
"""

from __future__ import annotations

import torch
from weft.kernels.gpu.dependent_launch import launch_options
from weft.kernels.gpu.lora_rows import expand_rows, of_tokens, shrink_rows
from weft.kernels.gpu.lora_tiles import Shrunk, expand_tiles, expand_tiles_silu, shrink_tiles
from weft.kernels.lora import LoraAddition
from weft.kernels.side_stream import Beside, is_forking

MAX_ROWS = 8
"""Up to here hardly two tokens share an adapter."""


def add_lora(out: torch.Tensor, x: torch.Tensor, addition: LoraAddition) -> None:
    """`weft.kernels.lora.add_lora` for CUDA tensors."""
    Ranks(x, addition).add_to(out)


class Ranks:
    """The ranks of some tokens, computed from here on; to be used once.

    Args:
        x: [T, K], contiguous; stays as it is meanwhile.
        addition: Of these tokens.
    """

    def __init__(self, x: torch.Tensor, addition: LoraAddition) -> None:
        if not x.is_contiguous():
            raise ValueError("x must be contiguous")
        self._addition = addition
        self._tokens = x.shape[0]
        self._is_few = self._tokens <= MAX_ROWS
        is_forked = is_forking(x.device)
        options = self._options = launch_options(x.device, is_alone=is_forked)

        def shrink() -> Shrunk | torch.Tensor:
            if not self._is_few:
                return shrink_tiles(x, addition, options)
            slots = of_tokens(addition.segments.token_slots)
            return shrink_rows(x, addition.parts, addition.layer, slots, options)

        self._ranks = Beside(x.device, shrink) if self._tokens else None

    def add_to(self, out: torch.Tensor, *, is_new: bool = False) -> None:
        """Adds what adapters add to `out` [T, N].

        Args:
            out: Contiguous.
            is_new: It is written, whatever was there; all of its columns are some part's.
        """
        if not out.is_contiguous():
            raise ValueError("out must be contiguous")
        if self._ranks is None:
            return
        ranks, addition = self._ranks.join(), self._addition
        if isinstance(ranks, Shrunk):
            if is_new:
                out.zero_()
            expand_tiles(out, ranks, addition, self._options)
            return
        slots, layer = of_tokens(addition.segments.token_slots), addition.layer
        expand_rows(out, ranks, addition.parts, layer, slots, self._options, is_new=is_new)

    def silu_of(self, both: torch.Tensor) -> torch.Tensor | None:
        """silu(gate) * up with what adapters add to `both` [T, 2 * I].

        None where `add_to` has to be called instead.
        """
        inner = both.shape[1] // 2
        places = [(part.column, part.out_features) for part in self._addition.parts]
        if self._is_few or self._ranks is None or places != [(0, inner), (inner, inner)]:
            return None
        ranks = self._ranks.join()
        assert isinstance(ranks, Shrunk)
        return expand_tiles_silu(both, ranks, self._addition, self._options)
