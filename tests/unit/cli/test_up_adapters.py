"""`weft up --adapter-root DIR --adapter NAME=PATH`: what is taken, and what processes are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import load_settings


def settings(*flags: str) -> UpSettings:
    return load_settings(UpSettings, [*flags], {})


def test_adapters_are_named_by_folders_of_the_root(tmp_path: Path) -> None:
    found = settings(
        *("--adapter-root", str(tmp_path), "--adapter", "pirate=team/pirate"),
        *("--adapter", f"base:json={tmp_path / 'json'}"),
    )
    assert [found.parse_adapter(text) for text in found.adapter] == [
        ("", "pirate", "team/pirate"),
        ("base", "json", "json"),
    ]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--adapter", "a=b"], "--adapter-root"),
        (["--adapter-root", "R", "--adapter", "ab"], "NAME=PATH"),
        (["--adapter-root", "R", "--adapter", "=b"], "NAME=PATH"),
        (["--adapter-root", "R", "--adapter", "a="], "NAME=PATH"),
        (["--adapter-root", "R", "--adapter", "a=/somewhere/else"], "not in --adapter-root"),
    ],
)
def test_others_are_refused(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings(*flags)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("is_on", [False, True])
def test_gateways_and_workers_share_the_root(tmp_path: Path, is_on: bool) -> None:
    flags = ("--adapter-root", str(tmp_path)) if is_on else ()
    plan = plan_mesh(
        settings(*flags, "--kvstore", "1"),
        StateFolder(tmp_path / "state"),
        [ModelFolder("tiny", tmp_path)],
        None,
    )
    told = {
        spec.name
        for spec in plan.services
        if ("--adapter-root", str(tmp_path.resolve()))
        in zip(spec.command, spec.command[1:], strict=False)
    }
    assert told == ({"gateway", "prefill-0", "decode-0"} if is_on else set())
