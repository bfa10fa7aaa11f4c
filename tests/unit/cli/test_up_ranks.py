"""`weft up --tp N --ep N`: all workers are told, and make it their engine's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import load_settings
from weft.common.worker.settings import WorkerSettings

FLAGS = ["--tp", "2", "--ep", "2"]


def test_all_workers_are_told(tmp_path: Path) -> None:
    settings = load_settings(UpSettings, FLAGS, {})
    plan = plan_mesh(
        settings, StateFolder(tmp_path / "state"), [ModelFolder("tiny", tmp_path)], None
    )
    told = {
        spec.name
        for spec in plan.services
        if {("--tp", "2"), ("--ep", "2")} <= set(pairwise(spec.command))
    }
    assert told == {"prefill-0", "decode-0"}


def test_a_worker_tells_its_engine(tmp_path: Path) -> None:
    settings = load_settings(WorkerSettings, ["--model-dir", str(tmp_path), *FLAGS], {})
    config = settings.engine_config("decode", "w")
    assert (config.tp, config.ep) == (2, 2)
