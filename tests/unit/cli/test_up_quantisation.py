"""`weft up --quantization FORMAT --kv-dtype FORMAT`: workers that have such numbers are told, and
make it their engine's.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import load_settings
from weft.common.worker.settings import WorkerSettings


def test_all_workers_are_told(tmp_path: Path) -> None:
    settings = load_settings(UpSettings, ["--quantization", "int8"], {})
    models = [ModelFolder("tiny", tmp_path)]
    plan = plan_mesh(settings, StateFolder(tmp_path / "state"), models, None)
    told = {
        spec.name for spec in plan.services if ("--quantization", "int8") in pairwise(spec.command)
    }
    assert told == {"prefill-0", "decode-0"}


def test_encoders_are_told_no_format_of_kv(tmp_path: Path) -> None:
    settings = load_settings(UpSettings, ["--kv-dtype", "int8"], {})
    models = [ModelFolder("tiny", tmp_path), ModelFolder("bert", tmp_path, "embed", "no KV")]
    plan = plan_mesh(settings, StateFolder(tmp_path / "state"), models, None)
    told = {spec.name for spec in plan.services if ("--kv-dtype", "int8") in pairwise(spec.command)}
    assert told == {"prefill-0", "decode-0"}


def test_a_worker_tells_its_engine(tmp_path: Path) -> None:
    flags = ["--model-dir", str(tmp_path)]
    for more, expected in (([], "auto"), (["--quantization", "int8"], "int8")):
        settings = load_settings(WorkerSettings, [*flags, *more], {})
        assert settings.engine_config("decode", "w").quantization == expected
