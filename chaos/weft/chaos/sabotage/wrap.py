"""Sabotages, for `weft chaos --sabotage`: each breaks an invariant, to show that a run detects it.

Product code does not know them. In a process that was started with `--enable-faults` each sabotage
wraps the method that it breaks. The method works normally until the fault point is armed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.contract.faults import BOARD, FaultPoint


def wrap(
    owner: type, name: str, point: FaultPoint, broken: Callable[[Callable[..., Any]], Any]
) -> None:
    """Makes a method breakable, at most once in a process. `point` is registered here; while it is
    armed, the method is the one that `broken` makes from the original. That one calls `fire` of the
    point each time that it could break something.
    """
    if point in BOARD.points:
        return
    BOARD.add(point)
    whole = getattr(owner, name)
    wrong = broken(whole)

    def method(*args: Any, **kwargs: Any) -> Any:
        return (wrong if point.is_armed else whole)(*args, **kwargs)

    setattr(owner, name, method)
