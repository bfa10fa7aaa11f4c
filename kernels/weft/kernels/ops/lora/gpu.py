"""Low-rank additions on a GPU: first the ranks of all tokens (x times A), then their products with
B.

Few tokens are taken row by row, more in tiles of tokens sorted by adapter. Grids do not depend on
the adapters of a step, so that a captured graph serves any mix. If a row's bits must not depend on
the other rows, all rows come in tiles of one shape.
"""

from __future__ import annotations

import torch
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.lora.triton_fold import Folded
from weft.kernels.ops.lora.triton_parts import new_entries
from weft.kernels.ops.lora.triton_product import MAX_ROWS
from weft.kernels.ops.lora.triton_rows import expand_rows, of_tokens, shrink_rows
from weft.kernels.ops.lora.triton_shrink import Shrunk, can_be_ahead, shrink_tiles
from weft.kernels.ops.lora.triton_tiles import expand_tiles, expand_tiles_silu
from weft.kernels.shared.dependent_launch import launch_options
from weft.kernels.shared.side_stream import SideStreamWork, is_forking


def add_lora(out: torch.Tensor, x: torch.Tensor, addition: LoraAddition) -> None:
    Ranks(x, addition).add_to(out)


def add_fixed_lora(out: torch.Tensor, x: torch.Tensor, addition: LoraAddition) -> None:
    """`add_lora` in which a row's bits depend only on its adapter and its row of x.

    One shape of tiles and one way to cut K serve any number of tokens, in launches of their own.

    Args:
        out: [T, N], contiguous.
        x: [T, K], contiguous.
    """
    if x.shape[0] == 0:
        return
    options = launch_options(x.device)
    shrunk = shrink_tiles(x, addition, options, is_fixed=True)
    expand_tiles(out, shrunk, addition, options, is_fixed=True)


class Ranks:
    """The ranks of some tokens, whose computation begins with this object; to be used once.

    They need only the product's input, so that a captured graph computes them concurrently with the
    product.

    Args:
        x: [T, K], contiguous; must not change meanwhile.
        down: Parts of the product that follows, if `silu_of` is to compute their ranks as well.
        is_ahead: Whether to compute them before the product, which would leave too little of the
            device for them.
        is_folded: Whether they are for `folded`, and for nothing else.
    """

    def __init__(
        self,
        x: torch.Tensor,
        addition: LoraAddition,
        down: LoraAddition | None = None,
        *,
        is_ahead: bool = False,
        is_folded: bool = False,
    ) -> None:
        if not x.is_contiguous():
            raise ValueError("x must be contiguous")
        self._addition = addition
        self._tokens = x.shape[0]
        self._is_few = self._tokens <= MAX_ROWS
        self._down = None if self._is_few else down
        following = () if self._down is None else self._down.parts
        is_ahead = is_ahead and not self._is_few
        self._is_forked = not is_ahead and is_forking(x.device)
        is_ahead = is_ahead and can_be_ahead(*x.shape)
        options = self._options = launch_options(x.device, is_alone=self._is_forked)

        tokens, is_few = self._tokens, self._is_few

        # The function does not refer to `self`, which refers to it: such a cycle would keep `x`
        # alive, since garbage is not collected while a graph is captured.
        def shrink() -> Shrunk | tuple[torch.Tensor, torch.Tensor | None]:
            if not is_few:
                how = {"is_ahead": is_ahead, "is_folded": is_folded}
                return shrink_tiles(x, addition, options, following, **how)
            slots = of_tokens(addition.segments.token_slots)
            parts, layer = addition.parts, addition.layer
            entries = new_entries(tokens, parts, x.device) if is_folded else None
            return shrink_rows(x, parts, layer, slots, options, entries=entries), entries

        self._ranks = None
        if self._tokens:
            self._ranks = SideStreamWork(x.device, shrink, is_forked=self._is_forked)

    def folded(self) -> Folded:
        """The addition for a kernel that reads the product next. There must be at least one token,
        and one part.
        """
        assert self._ranks is not None
        found, (part,) = self._ranks.join(), self._addition.parts
        ranks, entries = (found.ranks, found.entries) if isinstance(found, Shrunk) else found
        assert entries is not None
        return Folded(ranks, entries, part, self._is_forked)

    def add_to(self, out: torch.Tensor, *, is_new: bool = False) -> None:
        """Adds what adapters add to `out`, [T, N], contiguous. With `is_new` it overwrites `out`;
        then all of its columns belong to some part.
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
        expand_rows(out, ranks[0], addition.parts, layer, slots, self._options, is_new=is_new)

    def silu_of(self, both: torch.Tensor) -> tuple[torch.Tensor, Folded | None] | None:
        """silu(gate) * up with what adapters add to `both`, [T, 2 * I], and what they add to down.

        None if the caller must use `add_to` instead.
        """
        inner = both.shape[1] // 2
        places = [(part.column, part.out_features) for part in self._addition.parts]
        if self._is_few or self._ranks is None or places != [(0, inner), (inner, inner)]:
            return None
        ranks = self._ranks.join()
        assert isinstance(ranks, Shrunk)
        if self._down is None:
            return expand_tiles_silu(both, ranks, self._addition, self._options).out, None
        (down,) = self._down.parts
        out, to_down = expand_tiles_silu(both, ranks, self._addition, self._options, down)
        assert ranks.entries is not None
        return out, Folded(to_down, ranks.entries, down)
