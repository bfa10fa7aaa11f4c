"""`weft up --draft-dir DIR --drafter NAME`: which workers are told."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import load_settings


@pytest.mark.parametrize(
    ("flags", "with_folder", "drafter"),
    [
        ([], {"prefill-0", "decode-0"}, "eagle3"),
        (["--drafter", "ngram"], {"prefill-0", "decode-0"}, "ngram"),
        # A head's KV lies in the pages of all; a whole model is the decode worker's own affair.
        (["--drafter", "model"], {"decode-0"}, "model"),
    ],
)
def test_who_is_told_of_the_folder(
    tmp_path: Path, flags: list[str], with_folder: set[str], drafter: str
) -> None:
    head = {"architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(head))
    settings = load_settings(UpSettings, ["--draft-dir", str(tmp_path), *flags], {})
    models = [ModelFolder("tiny", tmp_path)]
    plan = plan_mesh(settings, StateFolder(tmp_path / "state"), models, None)
    pairs = {spec.name: {*pairwise(spec.command)} for spec in plan.services}
    folder = ("--draft-dir", str(tmp_path.resolve()))
    assert {name for name, found in pairs.items() if folder in found} == with_folder
    told = {name for name, found in pairs.items() if ("--drafter", drafter) in found}
    assert told == {"decode-0"}


def test_all_workers_load_the_head_of_the_models_own_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for drafter, loaders in (("mtp", {"prefill-0", "decode-0"}), ("ngram", set())):
        settings = load_settings(UpSettings, ["--drafter", drafter], {})
        models = [ModelFolder("tiny", tmp_path)]
        plan = plan_mesh(settings, StateFolder(tmp_path / "state"), models, None)
        assert {spec.name for spec in plan.services if "--mtp-head" in spec.command} == loaders
    with pytest.raises(SystemExit):
        load_settings(UpSettings, ["--drafter", "mtp", "--draft-dir", str(tmp_path)], {})
    assert "--drafter mtp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "environ", "folder"),
    [
        ([], {}, "demo-head"),
        (["--model", "demo"], {}, "demo-head"),
        (["--model-name", "mine"], {}, "demo-head"),
        (["--draft-dir", "own"], {}, "own"),
        (["--draft-dir", "none"], {}, None),
        (["--model", "other"], {}, None),
        ([], {"WEFT_UP_MODEL": "other"}, None),
        (["--model", "demo,other"], {}, None),
    ],
)
def test_the_demo_models_head_is_for_it_alone(
    flags: list[str], environ: dict[str, str], folder: str | None
) -> None:
    flags = ["--demo-draft-dir", "demo-head", *flags]
    settings = load_settings(UpSettings, flags, environ)
    assert settings.draft_dir == (None if folder is None else Path(folder))


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "model"])
def test_what_needs_a_folder_is_refused_without(
    drafter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(UpSettings, ["--drafter", drafter], {})
    assert f"--drafter {drafter} needs --draft-dir" in capsys.readouterr().err
