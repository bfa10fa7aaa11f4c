"""`weft up --device A,B`: where each worker runs, and its share of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import load_settings


def told(command: tuple[str, ...], flag: str) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {"prefill-0": (None, None), "decode-0": (None, None)}),
        ("--device cuda", {"prefill-0": ("cuda", 0.5), "decode-0": ("cuda", 0.5)}),
        ("--device cuda --prefill 0", {"decode-0": ("cuda", None)}),
        (
            "--device cuda:0,cuda:1",
            {"prefill-0": ("cuda:0", None), "decode-0": ("cuda:1", None)},
        ),
        (
            "--device cuda,cuda:1 --decode 2",
            {
                "prefill-0": ("cuda", 0.5),
                "decode-0": ("cuda:1", None),
                "decode-1": ("cuda", 0.5),
            },
        ),
        (
            "--device cuda:0,cuda --decode 2 --prefill 2",
            {
                name: ("cuda:0" if name.endswith("0") else "cuda", 0.25)
                for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")
            },
        ),
        (
            "--device cpu,cuda:1",
            {"prefill-0": ("cpu", None), "decode-0": ("cuda:1", None)},
        ),
    ],
)
def test_workers_take_the_devices_in_turn(
    tmp_path: Path, flags: str, expected: dict[str, tuple[str | None, float | None]]
) -> None:
    settings = load_settings(UpSettings, flags.split(), {})
    models = [ModelFolder("tiny", tmp_path)]
    plan = plan_mesh(settings, StateFolder(tmp_path / "state"), models, None)
    workers = [spec for spec in plan.services if spec.name.startswith(("prefill", "decode"))]
    found = {}
    for spec in workers:
        share = told(spec.command, "--device-memory-share")
        device = told(spec.command, "--device")
        found[spec.name] = (device, None if share is None else float(share))
    assert found == expected


def test_workers_of_two_models_share_a_gpu(tmp_path: Path) -> None:
    settings = load_settings(UpSettings, ["--device", "cuda:3", "--prefill", "0"], {})
    models = [ModelFolder("a", tmp_path), ModelFolder("b", tmp_path)]
    plan = plan_mesh(settings, StateFolder(tmp_path / "state"), models, None)
    shares = {
        spec.name: told(spec.command, "--device-memory-share")
        for spec in plan.services
        if spec.name.startswith("decode")
    }
    assert shares == {"decode-0": "0.5", "decode-1": "0.5"}
