"""Sabotages, for `weft chaos --sabotage`: each breaks an invariant, to show that a run detects it.

Product code knows nothing of them. In a process that was started with `--enable-faults` they wrap
the methods that they break; such a method works as ever until its point is armed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.engine.base.faults import BOARD, FaultPoint


def wrap(
    owner: type, name: str, point: FaultPoint, broken: Callable[[Callable[..., Any]], Any]
) -> None:
    """Makes a method breakable; at most once in a process.

    Args:
        owner: The method's class.
        name: Name of the method.
        point: Breaks it while armed; registered here.
        broken: Makes the broken method of the whole one. It asks the point, with `fire`, each time
            that it could break something.
    """
    if point in BOARD.points:
        return
    BOARD.add(point)
    whole = getattr(owner, name)
    wrong = broken(whole)

    def method(*args: Any, **kwargs: Any) -> Any:
        return (wrong if point.is_armed else whole)(*args, **kwargs)

    setattr(owner, name, method)
