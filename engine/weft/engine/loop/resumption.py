"""Requests resumed from other owners: reports what is finished, and finds what is left to run."""

from __future__ import annotations

from weft.engine.loop.intake import Intake
from weft.engine.loop.outgoing import Outgoing
from weft.engine.scheduler.state import Request, end_of


def first_to_run(first: Request, intake: Intake, out: Outgoing, now: float) -> Request | None:
    """Reports the samples that their last tokens had ended before the owner was lost.

    Args:
        first: A resumed request as `Intake.from_submit` made it.
        intake: Makes its siblings.
        out: Where ends are reported.
        now: On the engine's clock.

    Returns:
        The first sample that still has to run; the rest will be forked from it. None: all had
        ended.
    """
    unforked, first.unforked_samples = first.unforked_samples, {}
    siblings = [intake.sibling(first, sample, ids, now) for sample, ids in unforked.items()]
    running: list[Request] = []
    for request in (first, *siblings):
        count = request.num_generated
        end = end_of(request, request.tokens[-1], count) if count else None
        if end is None:
            running.append(request)
        else:
            request.timeline.finish_s = 0.0
            out.finished(request, *end)
    if not running:
        return None
    leader, *others = running
    leader.is_sibling = False
    leader.candidates = first.candidates
    leader.unforked_samples = {other.sample: unforked[other.sample] for other in others}
    return leader
