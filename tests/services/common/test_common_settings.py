"""Settings: sources in their order, and errors that name field, value and fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field
from weft.cli.up.command import main as up
from weft.cli.up.flags import check_flags
from weft.cli.up.settings import UpSettings
from weft.common.settings import ServiceSettings, list_text, load_settings
from weft.decode.main import main as serve_decode
from weft.gateway.main import main as serve_gateway
from weft.prefill.main import main as serve_prefill


class DemoSettings(ServiceSettings):
    """Serves nothing."""

    program: ClassVar[str] = "demo"
    peers: list[str] = Field([], description="addresses of peers, host:port")
    ratio: float = Field(0.5, ge=0, le=1, description="share of 100 % kept, 0 to 1")
    mode: Literal["fast", "safe"] = Field("safe", description="how")
    is_loud: bool = Field(False, description="say more")
    limit_pages: int | None = Field(None, ge=1, description="most pages, in pages")


def test_sources_override_in_order(tmp_path: Path) -> None:
    file = tmp_path / "demo.toml"
    file.write_text('peers = ["a:1", "b:2"]\nratio = 0.25\nlimit_pages = 7\nmode = "fast"\n')
    environ = {"WEFT_DEMO_RATIO": "0.75", "WEFT_DEMO_LIMIT_PAGES": "none", "WEFT_OTHER_X": "1"}
    settings = load_settings(
        DemoSettings, ["--config", str(file), "--mode", "safe", "--is-loud"], environ
    )
    assert settings.peers == ["a:1", "b:2"]
    assert settings.ratio == 0.75
    assert settings.limit_pages is None
    assert settings.mode == "safe"
    assert settings.is_loud
    assert settings.port == 0


def test_lists_are_comma_separated() -> None:
    assert load_settings(DemoSettings, ["--peers", "x:1, y:2,"], {}).peers == ["x:1", "y:2"]
    assert load_settings(DemoSettings, [], {"WEFT_DEMO_PEERS": ""}).peers == []


def test_an_item_of_a_list_may_have_commas() -> None:
    items = ["/models/a,b", "c", ",", "d,e,,f"]
    text = list_text(items)
    assert load_settings(DemoSettings, ["--peers", text], {}).peers == items
    assert load_settings(DemoSettings, [], {"WEFT_DEMO_PEERS": text}).peers == items


def test_weft_up_takes_a_directory_with_a_comma_and_no_surplus_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", r"/models/a\,b", "--model", "/models/c", "--model-name", "one,two"]
    settings = load_settings(UpSettings, given, {})
    assert settings.model == ["/models/a,b", "/models/c"]
    with pytest.raises(SystemExit):
        load_settings(UpSettings, [*given, "--model-name", "three"], {})
    assert "--model-name three: there are 3 names and 2 models" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["--deterministic", "--log-level=debug", "--draft-width 4", "--max-draft-tokens=4", ""]
)
def test_weft_up_passes_on_flags_of_services(text: str) -> None:
    argv = ["--decode-args", text, "--log-level", "error", f"--prefill-args={text}"]
    settings = load_settings(UpSettings, argv, {})
    assert (settings.decode_args, settings.prefill_args) == (text, text)
    assert settings.log_level == "error"
    with pytest.raises(SystemExit):
        load_settings(UpSettings, ["--decode-args"], {})


@pytest.mark.parametrize(
    ("flag", "text", "expected"),
    [
        ("--decode-args", "--max-runing-requests 5", "did you mean --max-running-requests?"),
        ("--decode-args", "--max-running-requests five", "--max-running-requests = 'five'"),
        ("--prefill-args", "--drafter ngram", "--drafter: no such flag"),
        ("--prefill-args", "--no-deterministc", "--no-deterministc: no such flag"),
        ("--kvstore-args", "--memory-bytes", "--memory-bytes: expected one argument"),
        ("--kvstore-args", "--memory-bytes 1", "--memory-bytes = '1'"),
        ("--gateway-args", "--decode-policy next", "'cache_aware'"),
        ("--gateway-args", "cache_aware", "'cache_aware' is no flag"),
    ],
)
def test_weft_up_starts_nothing_with_flags_that_no_service_takes(
    flag: str, text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    with pytest.raises(SystemExit) as stop:
        up(["--state-dir", str(state), "--model", "/no/such/model", flag, text])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert line.startswith(f"  {flag}: ")
    assert expected in line
    assert not state.exists()


def test_flags_may_depend_on_others_that_weft_up_gives() -> None:
    argv = ["--gateway-args", "--admin-host 0.0.0.0", "--decode-args", "--enable-faults --tp 2"]
    argv += ["--prefill-args=--config /some/file.toml", "--kvstore-args", "--disk-cache-bytes 9999"]
    check_flags(load_settings(UpSettings, argv, {}))


def test_weft_up_wants_ports_that_do_not_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    ports = ["--rest-port", "9001", "--grpc-port", "9000"]
    assert load_settings(UpSettings, ports, {}).rest_port == 9001
    assert not load_settings(UpSettings, [*ports, "--gateways", "2", "--no-rest"], {}).rest
    with pytest.raises(SystemExit):
        load_settings(UpSettings, [*ports, "--gateways", "2"], {})
    assert "--rest-port 9001 and --grpc-port 9000 overlap" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        (["--ratio", "1.5"], {}, ["--ratio", "'1.5'", "less than or equal to 1", "share of"]),
        (["--ratio", "nan"], {}, ["--ratio", "'nan'", "finite"]),
        ([], {"WEFT_DEMO_PORT": "many"}, ["WEFT_DEMO_PORT", "'many'", "integer", "gRPC port"]),
        ([], {"WEFT_DEMO_RATOI": "1"}, ["WEFT_DEMO_RATOI", "no such setting", "ratio"]),
        (["--mode", "wild"], {}, ["--mode", "'wild'", "'fast' or 'safe'"]),
        (["--ratoi=1"], {}, ["--ratoi: no such flag (did you mean --ratio?)"]),
        (["--ratio"], {}, ["--ratio", "expected one argument"]),
        (["1"], {}, ["'1' is no flag and no value of one"]),
        (["--config", "/nonexistent/x.toml"], {}, ["/nonexistent/x.toml", "No such file"]),
    ],
)
def test_problems_are_explained(
    argv: list[str],
    environ: dict[str, str],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        load_settings(DemoSettings, argv, environ)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("start", "flag", "problem"),
    [
        (up, "--adapter-root", "no such folder"),
        (up, "--draft-dir", "no such folder"),
        (serve_gateway, "--adapter-root", "no such folder"),
        (serve_gateway, "--tenants-file", "no such file"),
        (serve_decode, "--adapter-root", "no such folder"),
        (serve_decode, "--sleep-dir", "no such folder"),
        (serve_prefill, "--adapter-root", "no such folder"),
        (serve_prefill, "--draft-dir", "no such folder"),
    ],
)
def test_paths_that_are_not_there_are_told_before_the_start(
    start: Callable[[Sequence[str]], int],
    flag: str,
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    needed = [] if start is up else ["--model-dir", "m"]
    needed += ["--decode", "h:1"] if start is serve_gateway else []
    for path, told in ((tmp_path / "none", problem), (tmp_path / ("n" * 300), "name too long")):
        with pytest.raises(SystemExit) as stop:
            start([*needed, flag, str(path)])
        assert stop.value.code == 2
        shown = capsys.readouterr().err
        assert f"{flag} = '{path}': " in shown
        assert told in shown


def test_unknown_key_and_bad_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "demo.toml"
    file.write_text("rati = 1\n")
    with pytest.raises(SystemExit):
        load_settings(DemoSettings, ["--config", str(file)], {})
    assert "did you mean ratio?" in capsys.readouterr().err
    file.write_text("ratio = = 1\n")
    with pytest.raises(SystemExit):
        load_settings(DemoSettings, ["--config", str(file)], {})
    assert "not a TOML file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        load_settings(DemoSettings, ["--no-such-flag", "1"], {})


def test_help_shows_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_settings(DemoSettings, ["--help"], {})
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in DemoSettings.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert (field.description or "?") in text
