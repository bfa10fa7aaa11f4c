"""`weft up` tells workers whether they exchange pages, and so what they may free behind windows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import load_settings
from weft.engine.base.config import NEVER_SHIP_TOKENS


@pytest.mark.parametrize(
    ("flags", "most_tokens"),
    [
        (["--prefill", "0"], str(NEVER_SHIP_TOKENS)),
        (["--prefill", "0", "--local-prefill-max-tokens", "7"], "7"),
        (["--prefill", "0", "--kvstore", "1"], None),
        ([], None),
    ],
)
def test_workers_that_have_nobody_to_ask_are_told(
    tmp_path: Path, flags: list[str], most_tokens: str | None
) -> None:
    """They may then free pages behind sliding windows."""
    settings = load_settings(UpSettings, flags, {})
    models = [ModelFolder("tiny", tmp_path)]
    plan = plan_mesh(settings, StateFolder(tmp_path / "state"), models, None)
    (command,) = [spec.command for spec in plan.services if spec.name == "decode-0"]
    told = dict(pairwise(command)).get("--local-prefill-max-tokens")
    assert told == most_tokens


@pytest.mark.parametrize(
    ("flags", "frees"),
    [
        ([], True),
        (["--drafter", "none", "--decode-args", "--num-pages 60"], True),
        (["--prefill", "0"], False),
        (["--kvstore", "1"], True),
        (["--prefill", "0", "--kvstore", "1"], True),
        (["--drafter", "ngram"], True),
        (["--host-cache-bytes", "1000000", "--disk-cache-dir", "pages"], True),
        (["--tp", "2"], False),
        (["--decode-args", "--draft-width=4"], False),
        (["--prefill-args", "--tp 2"], False),
        (["--decode-args", "--window-pages keep"], False),
        (["--prefill-args", "--config x.toml"], False),
    ],
)
def test_all_workers_free_pages_behind_windows_or_none(
    tmp_path: Path, flags: list[str], frees: bool
) -> None:
    """Workers exchange pages of equal groups only."""
    told = told_of_windows(tmp_path, flags)
    assert told == {"free"} if frees else "free" not in told


@pytest.mark.parametrize(
    "variable", ["WEFT_DECODE_DRAFT_WIDTH", "WEFT_PREFILL_WINDOW_PAGES", "WEFT_PREFILL_TP"]
)
def test_what_workers_find_in_their_environment_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """They would refuse the flag beside such a setting."""
    monkeypatch.setenv(variable, "2")
    assert told_of_windows(tmp_path, []) == {None}


def test_models_without_windows_have_nothing_to_free(tmp_path: Path) -> None:
    assert told_of_windows(tmp_path, [], has_windows=False) == {None}


def told_of_windows(
    tmp_path: Path, flags: list[str], *, has_windows: bool = True
) -> set[str | None]:
    settings = load_settings(UpSettings, flags, {})
    models = [ModelFolder("tiny", tmp_path, has_windows=has_windows)]
    plan = plan_mesh(settings, StateFolder(tmp_path / "state"), models, None)
    workers = [spec.command for spec in plan.services if spec.name[:4] in ("pref", "deco")]
    return {dict(pairwise(command)).get("--window-pages") for command in workers}
