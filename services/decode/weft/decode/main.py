"""The decode worker: `weft serve decode`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from weft.common.rpc.server import run
from weft.common.settings import load_settings, require_paths
from weft.common.worker.host import run_worker
from weft.common.worker.settings import WorkerSettings, engine_field
from weft.decode.service import DecodeService
from weft.engine.base.config import DrafterName, DraftGateName


class DecodeSettings(WorkerSettings):
    """Owns requests and generates their tokens."""

    program: ClassVar[str] = "decode"

    drafter: DrafterName = Field(
        "none",
        description="source of draft tokens that the model verifies, several in one step, where "
        "that is measured to pay: mtp (the head that the model's checkpoint brings), eagle3 or "
        "eagle (the head in draft_dir, of that kind), model (a smaller model of the same "
        "vocabulary there), or ngram, which searches the request's text",
    )
    max_draft_tokens: int = engine_field(
        "max_draft_tokens",
        5,
        "most drafts of a request in one step that form a chain",
    )
    draft_width: int = engine_field(
        "draft_width",
        1,
        "with eagle3, drafts may form trees with this many children per node and up to 31 drafts "
        "of a request in one step, where that is measured to pay; 1 = chains only",
    )
    draft_gate: DraftGateName = Field(
        "measured",
        description="measured: the number of drafts that yields the most tokens a second; fixed: "
        "always the most, whether or not they pay",
    )
    local_prefill_max_tokens: int | None = engine_field(
        "local_prefill_max_tokens",
        None,
        "prompt remainders of at most this many tokens are prefilled here, longer ones "
        "by prefill workers; 0 = ship whenever there is a full page; none = by measured cost",
    )
    max_fill_fraction: float = engine_field(
        "max_fill_fraction", 0.3, "share of the KV pool that remote fills may reserve"
    )
    stream_interval_s: float | None = engine_field(
        "stream_interval_s",
        None,
        "time for which next tokens gather before gateways get them in one message, in seconds: "
        "each message takes processor time from workers that share its cores; first tokens and "
        "ends do not wait; 0 = the tokens of each step at once; none = 0 on a GPU, and on a CPU "
        "with 8 and more running samples the time in which the engine takes 3 ms of processor time "
        "for each of them",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns the exit status."""
    settings = load_settings(DecodeSettings, sys.argv[1:] if argv is None else argv)
    require_paths(settings)
    return run(run_worker(settings, "decode", DecodeService))
