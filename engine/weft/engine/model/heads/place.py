"""Where a draft head's K and V lie in the target's pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from weft.checkpoint.draft_config import HeadConfig
from weft.contract.layout import PagedPlane, plane_beside
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.step import Step
from weft.kernels.ops.draft_head.spec import DraftRows
from weft.kernels.ops.pages.pool import PlaneInPage


class HeadPlace(NamedTuple):
    layer: int
    """Index of the head's K and V among the layers of their plane."""
    plane: PagedPlane | None = None
    """The head's own plane, after the target's in each page; None: the head's K and V are one more
    layer of the target's.
    """
    in_page: PlaneInPage | None = None
    """The same for this process."""

    def of(self, pool: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The pool that holds the head's K and V, and their layer there."""
        return (pool if self.in_page is None else self.in_page.of(pool)), self.layer


def draft_rows(
    step: Step, group: int, *, is_uniform: bool = False, ancestors: torch.Tensor | None = None
) -> DraftRows:
    """The rows of a step whose `slots` are not None, with their places in a page group."""
    assert step.slots is not None, "a step of a drafted model names its slots"
    own = step.groups[group]
    return DraftRows(
        token_ids=step.token_ids,
        positions=step.positions,
        slots=own.places,
        cu_q_lens=own.cu_q_lens,
        request_slots=step.slots,
        is_uniform=is_uniform,
        ancestors=ancestors,
    )


def place_of_head(config: HeadConfig, target: DecoderOnlyLM) -> HeadPlace:
    """The place of a head. Beside latents, which have another shape, it is a plane of its own, and
    the target's layers learn that they share their pages.
    """
    plane = target.kv_layout(1).plane
    if target.config.latent is None:
        return HeadPlace(plane.layers)
    own = PagedPlane(
        name=plane_beside(plane.name, config.num_kv_heads, config.head_dim),
        layers=1,
        heads=config.num_kv_heads,
        dim=config.head_dim,
        dtype=plane.dtype,
    )
    of_target, of_head = _in_page((plane, own))
    for index, number in enumerate(target.config.attention_layers):
        target.model.layers[number].mixer.move(0, index, of_target)
    return HeadPlace(0, own, of_head)


def _in_page(planes: Sequence[PagedPlane]) -> list[PlaneInPage]:
    vectors = [plane.layers * plane.heads * len(plane.parts) for plane in planes]
    widths = [count * plane.dim for count, plane in zip(vectors, planes, strict=True)]
    found = []
    for number, plane in enumerate(planes):
        before = sum(widths[:number]), sum(widths), sum(vectors[:number]), sum(vectors)
        sizes = plane.heads, plane.layers, len(plane.parts), plane.dim
        found.append(PlaneInPage(*before, *sizes))
    return found
