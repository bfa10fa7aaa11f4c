"""The prefill worker: `weft serve prefill`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from weft.common.rpc.server import run
from weft.common.settings import load_settings, require_paths
from weft.common.worker.host import run_worker
from weft.common.worker.other_host import follow_first_host
from weft.common.worker.prefill_service import PrefillService
from weft.common.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """Turns prompts into KV pages in other workers' pools."""

    program: ClassVar[str] = "prefill"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns the exit status."""
    settings = load_settings(PrefillSettings, sys.argv[1:] if argv is None else argv)
    require_paths(settings)
    if settings.host_rank:
        return follow_first_host(settings, "prefill")
    return run(run_worker(settings, "prefill", [PrefillService]))
