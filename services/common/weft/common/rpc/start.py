"""How far the start of a service is, as the error that it answers calls with until it serves."""

from __future__ import annotations

from typing import NamedTuple

import grpc
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import Starting

_PHASE, _FRACTION, _ELAPSED = "weft-start-phase", "weft-start-fraction", "weft-start-elapsed-s"


class StartProgress(NamedTuple):
    """Progress of a start."""

    phase: str
    """What is done now, in words."""
    fraction: float | None
    """Done of this phase, 0..1; None: not known."""
    elapsed_s: float
    """Seconds since the start of the process."""
    worker_id: str = ""

    def error(self) -> Starting:
        """The error that callers get."""
        done = "" if self.fraction is None else f", {self.fraction:.0%}"
        facts = [(_PHASE, self.phase), (_ELAPSED, f"{self.elapsed_s:.3f}")]
        if self.fraction is not None:
            facts.append((_FRACTION, f"{self.fraction:.4f}"))
        return Starting(
            f"starting: {self.phase}{done}, for {self.elapsed_s:.0f} s",
            stage="start",
            worker_id=self.worker_id,
            metadata=tuple(facts),
        )


def progress_of(error: grpc.aio.AioRpcError) -> StartProgress | None:
    """The progress that an error reports; None: it is not from a service that is starting."""
    known = from_rpc_error(error)
    if not isinstance(known, Starting):
        return None
    facts = {key: str(value) for key, value in error.trailing_metadata() or ()}
    try:
        fraction = float(facts[_FRACTION]) if _FRACTION in facts else None
        elapsed_s = float(facts.get(_ELAPSED, "0"))
    except ValueError:  # of another version
        return None
    return StartProgress(facts.get(_PHASE, ""), fraction, elapsed_s, known.worker_id)
