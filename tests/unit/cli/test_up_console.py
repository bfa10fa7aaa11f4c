"""What `weft up` says, and that it goes on when nobody reads it."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from weft.cli.up.console import ConsoleReporter, first_request
from weft.cli.up.plan import FirstTask, MeshPlan
from weft.testing.terminal import run_on_terminal

TALKS = """
import sys
from rich.console import Console
from weft.cli.output import SteadyOutput, finish_output
from weft.cli.up.console import ConsoleReporter
reporter = ConsoleReporter(Console(file=SteadyOutput()))
for number in range(3):
    sys.stdin.readline()
    reporter.restarting(f"decode-{number}", 0.5)
sys.stderr.write("served to the end")
finish_output()
"""


def test_a_pipe_without_a_reader_is_no_end() -> None:
    command = [sys.executable, "-c", TALKS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert "decode-0 starts again" in process.stdout.readline()
        process.stdout.close()
        process.stdin.write("\n\n")
        process.stdin.close()
        assert process.stderr is not None
        assert process.stderr.read() == "served to the end"
        assert process.wait(60) == 0


def test_a_full_disk_is_no_end() -> None:
    """As with `weft up >> FILE`."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", TALKS],
            input="\n\n\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, "served to the end")


SHOWS_A_BAR = """
from rich.console import Console
from weft.cli.model import progress_bar
from weft.cli.output import SteadyOutput
with progress_bar(Console(file=SteadyOutput()), "converting") as report:
    report(1, 2)
    print("a line beside the bar")
    report(2, 2)
"""


def test_a_bar_on_a_terminal_comes_to_its_end() -> None:
    """As at the first start with the demo model."""
    status, shown = run_on_terminal([sys.executable, "-c", SHOWS_A_BAR], os.environ)
    assert status == 0
    assert "converting" in shown
    assert "a line beside the bar" in shown


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_output_is_no_failure(closed: str) -> None:
    command = [sys.executable, "-m", "weft.cli", "--version"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flags", [[], ["--hashes"]])
def test_what_another_command_cannot_write_it_says(tmp_path: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "weft.cli", "keys"]
    at = ["--file", str(tmp_path / "keys.json")]
    subprocess.run([*command, "add", "acme", *at], check=True, capture_output=True, timeout=60)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, "list", *flags, *at],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    told = "weft keys: cannot write: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_brackets_are_shown_and_lines_stay_whole() -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(Console(file=out, width=40))
    where = "/srv/[prod]/mesh/" + "x" * 60
    reporter.died("decode-0", f"could not be started: No space left on device ({where})")
    reporter.notice(f"adapter a is loaded from {where}")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert all(where in line for line in lines)


@pytest.mark.parametrize("has_rest", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    ("task", "path"),
    [
        ("generate", "chat/completions"),
        ("embed", "embeddings"),
        ("classify", "classify"),
        ("score", "rerank"),
        ("transcribe", "audio/transcriptions"),
    ],
)
def test_the_first_request_brings_what_the_mesh_asks_for(
    has_rest: bool, is_open: bool, task: FirstTask, path: str
) -> None:
    plan = MeshPlan(
        services=(),
        model_names=("tiny",),
        first_task=task,
        gateways={"gateway": "127.0.0.1:1"},
        rest_edges={"rest": "[::1]:2"} if has_rest else {},
        rest_scheme="http" if is_open else "https",
        tls_dir=None if is_open else Path("/srv/my tls"),
        needs_key=not is_open,
        worker_addresses={},
    )
    words = shlex.split(first_request(plan))
    if not has_rest and task != "generate":
        assert {task, "127.0.0.1:1"} & {word.strip("`") for word in words}
        return
    secrets = {"--cacert", "/srv/my tls/ca.pem", "Authorization: Bearer KEY"}
    if not has_rest:
        secrets = {"--tls-dir", "/srv/my tls", "WEFT_API_KEY=KEY"}
    assert secrets & set(words) == (set() if is_open else secrets)
    if has_rest:
        assert words[:2] == ["curl", f"{plan.rest_scheme}://[::1]:2/v1/{path}"]
        if task == "transcribe":
            assert {"model=tiny", "file=@speech.wav"} <= set(words)
        else:
            assert json.loads(words[words.index("-d") + 1])["model"] == "tiny"
