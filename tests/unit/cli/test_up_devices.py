"""`weft up --device A,B`: where each worker runs, its share of a GPU, and what is chosen for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from weft.cli.up.devices import with_devices, with_gateways
from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import load_settings
from weft.contract.errors import ConfigError


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


@pytest.mark.parametrize(
    ("flags", "num_gpus", "devices", "prefill", "decode", "both"),
    [
        ("", 0, ["cpu"], 1, 1, 0),
        ("", 1, ["cuda:0"], 0, 1, 0),
        ("--device auto", 2, ["cuda:0", "cuda:1"], 0, 0, 2),
        ("--prefill-args=--cp=1", 1, ["cuda:0"], 0, 1, 0),
        ("--prefill-args=--cp=1", 4, [f"cuda:{index}" for index in range(4)], 1, 3, 0),
        ("", 8, [f"cuda:{index}" for index in range(8)], 0, 0, 8),
        ("--prefill 3", 4, [f"cuda:{index}" for index in range(4)], 3, 1, 0),
        ("--device cuda:1", 4, ["cuda:1"], 1, 1, 0),
        ("--device cpu --decode 2", 4, ["cpu"], 1, 2, 0),
        (
            "--tp 2 --device cuda:0,cuda:1,cuda:2,cuda:3",
            4,
            ["cuda:0,cuda:1", "cuda:2,cuda:3"],
            1,
            1,
            0,
        ),
        ("--tp 2", 3, ["cuda:0,cuda:1"], 0, 1, 0),
    ],
)
def test_what_is_not_said_follows_from_the_gpus(
    flags: str, num_gpus: int, devices: list[str], prefill: int, decode: int, both: int
) -> None:
    notices: list[str] = []
    chosen = with_devices(load_settings(UpSettings, flags.split(), {}), num_gpus, notices.append)
    assert chosen.device == devices
    assert (chosen.prefill, chosen.decode, chosen.both) == (prefill, decode, both)
    num_idle = num_gpus % chosen.tp
    assert len(notices) == num_idle
    assert all(f"{num_idle} of {num_gpus} stay idle" in notice for notice in notices)


@pytest.mark.parametrize(
    ("flags", "num_gpus", "reason"),
    [
        ("cuda", 0, "no 'cuda' here; GPUs that torch can use: 0"),
        ("cpu,cuda:2", 2, "no 'cuda:2' here; GPUs that torch can use: 2"),
        ("cuda --tp 2", 0, "no 'cuda' here"),
        ("cuda:x", 1, "no 'cuda:x' here"),
        ("gpu", 1, "no 'gpu' here"),
        ("cuda:0 --tp 2", 4, "takes 2 GPUs, and there are 1"),
        ("cuda:0,cuda:1,cuda:2 --tp 2", 4, "takes 2 GPUs, and 3 are given"),
    ],
)
def test_devices_that_cannot_serve_are_refused(flags: str, num_gpus: int, reason: str) -> None:
    settings = load_settings(UpSettings, ["--device", *flags.split()], {})
    with pytest.raises(ConfigError, match=reason):
        with_devices(settings, num_gpus, print)


def test_models_share_the_gpus() -> None:
    settings = load_settings(UpSettings, ["--model", "a,b"], {})
    chosen = with_devices(settings, 4, print)
    assert (chosen.prefill, chosen.decode, chosen.both) == (0, 0, 2)


def test_auto_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(UpSettings, ["--device", "auto,cuda:1"], {})
    assert "auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "num_gpus", "num_cores", "expected"),
    [
        ("--gateways auto", 0, 128, 1),  # workers on the CPU need no more
        ("--gateways auto", 1, 16, 1),
        ("--gateways auto", 8, 128, 8),
        ("--gateways auto", 8, 24, 4),  # 8 of 24 cores are left
        ("--gateways auto", 8, 8, 1),
        ("--gateways auto --tp 4", 8, 128, 2),
        ("--gateways auto --decode 30 --prefill 0", 8, 256, 16),
        ("--gateways auto --device cpu,cuda:0 --decode 4", 1, 128, 1),
        ("--gateways auto --rest-port 8000 --grpc-port 8002", 8, 128, 2),
        ("--gateways 3", 8, 4, 3),
        ("", 8, 128, 1),
    ],
)
def test_gateways_are_as_many_as_workers_and_cores_ask_for(
    flags: str, num_gpus: int, num_cores: int, expected: int
) -> None:
    settings = load_settings(UpSettings, flags.split(), {})
    settings = with_devices(settings, num_gpus, lambda text: None)
    found = with_gateways(settings, num_cores)
    assert (found.num_gateways, found.gateways) == (expected, expected)


@pytest.mark.parametrize("value", ["0", "17", "many"])
def test_other_numbers_of_gateways_are_refused(value: str) -> None:
    with pytest.raises(SystemExit):
        load_settings(UpSettings, ["--gateways", value], {})
