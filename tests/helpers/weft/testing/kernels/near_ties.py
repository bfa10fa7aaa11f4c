"""Draws in which float32 can tell what is best.

Between two that are nearly as good roundings decide, and two ways of computing choose differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from weft.kernels.ops import moe as moe_module
from weft.kernels.ops.draft_head import operations as draft_operations
from weft.kernels.ops.moe.spec import SOFTMAX, RouterForm, Routing
from weft.testing.draws import Drawn, draw_until

CLEAR = 1e-4
"""A difference between two scores, or logits, of sizes about 1 that roundings do not turn over."""


def clear_logits(
    rows: int,
    experts: int,
    top_k: int,
    form: RouterForm = SOFTMAX,
    *,
    spread: float = 1.0,
    shift: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Normal logits of routers, [rows, experts] float32, whose choices are clear."""
    made = torch.empty(0, experts)

    def draw() -> torch.Tensor:
        nonlocal made
        more = spread * torch.randn(rows + 8, experts) + shift
        made = torch.cat((made, more[routing_gaps(more, top_k, form) > CLEAR]))
        return made

    return draw_until(draw, lambda found: len(found) >= rows)[:rows]


def routing_gaps(logits: torch.Tensor, top_k: int, form: RouterForm = SOFTMAX) -> torch.Tensor:
    """How much better than the best that it leaves the worst is that a row chooses, of groups and
    of experts: [T] float64.

    Args:
        logits: [T, E].
        top_k: Experts of a row.
        form: How logits become scores.
    """
    wide = logits.double()
    worth = wide.sigmoid() if form.is_sigmoid else wide.softmax(-1)
    worth = worth if form.correction is None else worth + form.correction
    gaps = torch.full((len(wide),), torch.inf, dtype=torch.float64)
    if form.groups > 1:
        grouped = worth.unflatten(1, (form.groups, -1))
        sums = grouped.topk(form.summed, -1).values.sum(-1)
        gaps = _gap_behind(sums, form.kept_groups)
        kept = sums.topk(form.kept_groups, -1).indices
        is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, kept, True)
        worth = torch.where(is_kept.unsqueeze(-1), grouped, -torch.inf).flatten(1)
    return torch.minimum(gaps, _gap_behind(worth, top_k))


def _gap_behind(values: torch.Tensor, count: int) -> torch.Tensor:
    """Difference between the last of the `count` largest of each row and the next."""
    ordered = torch.nn.functional.pad(values, (0, 1), value=-torch.inf)
    ordered = ordered.sort(-1, descending=True).values
    return ordered[:, count - 1] - ordered[:, count]


@contextmanager
def noting_gaps() -> Iterator[list[float]]:
    """Notes how clear the choices of routers on a CPU, and of draft heads' single operations, are:
    the least difference of scores, or of logits, of each call.
    """
    gaps: list[float] = []
    route, choose = moe_module.route_reference, draft_operations._choose

    def route_noted(
        logits: torch.Tensor, top_k: int, *, renormalise: bool, form: RouterForm = SOFTMAX
    ) -> Routing:
        gaps.append(float(routing_gaps(logits, top_k, form).min()))
        return route(logits, top_k, renormalise=renormalise, form=form)

    def choose_noted(
        logits: torch.Tensor, target_ids: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        gaps.append(float(_gap_behind(logits, 1).min()))
        return choose(logits, target_ids, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_module, "route_reference", route_noted)
        patch.setattr(draft_operations, "_choose", choose_noted)
        yield gaps


def draw_clear(draw: Callable[[], Drawn], run: Callable[[Drawn], object]) -> Drawn:
    """Draws until what `run` chooses of the drawn is clear; see `noting_gaps`."""

    def is_clear(drawn: Drawn) -> bool:
        with noting_gaps() as gaps:
            run(drawn)
        assert gaps, "nothing was chosen"
        return min(gaps) > CLEAR

    return draw_until(draw, is_clear)
