"""The request log of a gateway, and what `weft replay` makes of it."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.api.httpbody_pb2 import HttpBody
from weft.common.telemetry import request_log as requestlog
from weft.common.telemetry.request_log import (
    LoggedPrompt,
    LoggedSample,
    RequestLog,
    read_log,
    to_line,
)
from weft.contract.errors import ConfigError
from weft.gateway.app import GatewayApp
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import common_pb2, decode_pb2, gateway_pb2

ANSWER = " one two three"


class Scripted:
    """Answers every prompt by one text; can be told to answer by another."""

    def __init__(self) -> None:
        self.harness: Harness | None = None
        self.text = ANSWER

    def __call__(self, submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        assert self.harness is not None
        return Script(tokens=[self.harness.ids(self.text)])


async def ask(harness: Harness, text: str, client_id: str = "", **fields: Any) -> None:
    request = gateway_pb2.CompleteRequest(text=text, **fields)
    metadata = (("x-request-id", client_id),) if client_id else None
    async for _ in harness.typed.Complete(request, metadata=metadata):
        pass


async def logged(path: Path, count: int) -> list[LoggedPrompt]:
    """What is in a log, once so many lines are."""
    async with asyncio.timeout(60):
        while len(prompts := lines_of(path)) < count:
            await asyncio.sleep(0.02)
    return prompts


def lines_of(path: Path) -> list[LoggedPrompt]:
    with path.open() as file:
        return list(read_log(file))


async def replay(harness: Harness, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """`weft replay`: its exit status and results."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weft.cli", "replay", *arguments, "--json"),
        *("--address", harness.app.server.address),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, json.loads(output)


async def test_a_log_is_closed_though_a_task_of_the_gateway_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(GatewayApp, "_open_to_edges", fails)
    script = Scripted()
    path = tmp_path / "requests.jsonl"
    async with gateway(tmp_path, script, wait=False, request_log=path) as harness:
        script.harness = harness
        await harness.wait(lambda: not any(s.problem() for s in harness.app.catalogue))
        await ask(harness, "alpha")
    assert len(lines_of(path)) == 1
    assert not [t for t in threading.enumerate() if t.name == "request-log"]


SAMPLING = common_pb2.SamplingParams(temperature=0.7, top_p=0.9, n=2, logit_bias={5: 1.5})


async def test_a_log_says_how_to_ask_again_and_nothing_of_what_was_said(tmp_path: Path) -> None:
    script = Scripted()
    path = tmp_path / "requests.jsonl"
    constrained = common_pb2.SamplingParams()
    constrained.CopyFrom(SAMPLING)
    constrained.constraint.choice.choices.append("a secret choice")
    async with gateway(tmp_path, script, request_log=path) as harness:
        script.harness = harness
        await ask(
            harness,
            "A secret prompt",
            client_id="mine",
            sampling=constrained,
            stop=common_pb2.StopCriteria(
                max_tokens=50, stop=["secret end"], stop_regex=["secret.+"]
            ),
        )
        (line,) = await logged(path, 1)
        (submit,) = harness.workers[0].submits
        assert line.sampling["seed"] == str(submit.sampling.seed)
        assert line.sampling["temperature"] == pytest.approx(0.7)
        assert line.sampling["logit_bias"] == {"5": 1.5}
        assert line.stop["max_tokens"] == 50
        assert (line.outcome, line.request_id) == ("ok", submit.request_id)
        assert line.client_request_id == "mine"
        assert line.num_prompt_tokens == len(harness.ids("A secret prompt"))
        assert [sample.num_tokens for sample in line.samples] == [len(harness.ids(ANSWER))] * 2
        # Every field with content is absent, not empty.
        assert "secret" not in path.read_text()
        fields = json.loads(path.read_text())
        assert not {"prompt_ids", "prompt_text"} & fields.keys()
        assert all(sample.keys() == {"finish_reason", "num_tokens"} for sample in fields["samples"])
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        status, results = await replay(harness, str(path))
        assert status == 1
        assert results[0]["verdict"] == "skipped"


async def test_prompts_of_which_vectors_were_wanted_are_skipped(tmp_path: Path) -> None:
    (prompt,) = prompts(3)[:1]
    prompt.is_pooled = True
    path = tmp_path / "requests.jsonl"
    path.write_text(f"{to_line(prompt)}\n")
    script = Scripted()
    async with gateway(tmp_path, script) as harness:
        script.harness = harness
        _, (result,) = await replay(harness, str(path))
    assert (result["verdict"], "vectors" in result["detail"]) == ("skipped", True)


@pytest.mark.parametrize("content", ["tokens", "text"])
async def test_a_log_with_content_is_replayed_and_compared(tmp_path: Path, content: str) -> None:
    script = Scripted()
    path = tmp_path / "requests.jsonl"
    settings = {"request_log": path, "request_log_content": content}
    async with gateway(tmp_path, script, **settings) as harness:
        script.harness = harness
        for number in range(3):
            await ask(harness, f"Prompt {number}", sampling=SAMPLING)
        lines = await logged(path, 3)
        assert lines[1].prompt_ids == harness.ids("Prompt 1")
        assert lines[1].prompt_text == ("Prompt 1" if content == "text" else None)
        assert lines[1].samples[0].text == (ANSWER if content == "text" else None)
        copy = tmp_path / "copy.jsonl"
        copy.write_text(path.read_text())
        status, results = await replay(harness, str(copy))
        assert status == 0
        assert [result["verdict"] for result in results] == ["same"] * 3
        # It asks for just what was asked for before.
        before, after = harness.workers[0].submits[:3], harness.workers[0].submits[3:]
        by_prompt = {tuple(submit.prompt.ids): submit for submit in after}
        for submit in before:
            again = by_prompt[tuple(submit.prompt.ids)]
            assert (again.sampling, again.stop) == (submit.sampling, submit.stop)
        script.text = " one two four"
        status, results = await replay(harness, str(copy), "--limit", "1")
        assert status == 1
        assert results[0]["verdict"] == "different"
        pairs = zip(harness.ids(ANSWER), harness.ids(script.text), strict=False)
        shared = next(index for index, (old, new) in enumerate(pairs) if old != new)
        assert f"from its token {shared} on" in results[0]["detail"]


async def test_what_was_refused_or_cut_off_is_logged_as_such(tmp_path: Path) -> None:
    script = Scripted()
    path = tmp_path / "requests.jsonl"
    settings = {"request_log": path, "request_log_content": "tokens"}
    async with gateway(tmp_path, script, step_s=0.05, **settings) as harness:
        script.harness = harness
        script.text = " word" * 100
        call = harness.typed.Complete(gateway_pb2.CompleteRequest(text="Go on", stream=True))
        await anext(aiter(call))
        call.cancel()
        (line,) = await logged(path, 1)
        assert line.outcome == "cancelled"
        (sample,) = line.samples
        assert sample.finish_reason == ""
        assert 0 < len(sample.ids or []) < len(harness.ids(script.text))
        with pytest.raises(grpc.aio.AioRpcError):  # refused before it had tokens: nothing to log
            await ask(harness, "word " * 3000)
        # As far as it had come it is the same.
        status, results = await replay(harness, str(path))
        assert (status, results[0]["verdict"]) == (0, "same")


async def test_a_failed_request_is_found_by_its_header_and_by_its_body(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.jsonl"
    names = {"client_request_id": "mine", "header_request_id": "req-of-the-edge"}
    async with gateway(
        tmp_path, lambda submit, prompt: Script(tokens=[[7]], hang_after=0), request_log=path
    ) as harness:
        call = harness.openai.Completions(
            HttpBody(data=b'{"prompt": "x", "request_id": "mine"}'),
            metadata=(("x-request-id", names["header_request_id"]),),
        )
        await harness.wait(lambda: harness.workers[0].submits)
        harness.app.pipeline.end_all()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        (line,) = await logged(path, 1)
        (warning,) = [one for one in caplog.records if "request failed" in one.getMessage()]
        for found in (line, warning):
            assert {name: getattr(found, name) for name in names} == names


def prompts(count: int, size: int = 100) -> Sequence[LoggedPrompt]:
    return [
        LoggedPrompt(time=float(n), request_id=f"cmpl-{n}", prompt_ids=list(range(size)))
        for n in range(count)
    ]


def write_many(path: Path, num_files: int) -> None:
    """More prompts than fit into the files."""
    log = RequestLog(path, max_bytes=4096, num_files=num_files)
    for prompt in prompts(100):
        log.write(prompt)
    log.close()


def test_a_single_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_many(path, 1)
    assert [*tmp_path.iterdir()] == [path]
    assert 0 < path.stat().st_size <= 4096
    assert lines_of(path)[-1].request_id == "cmpl-99"


def test_a_full_disk_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"), 1 << 20, 1)
    for prompt in prompts(3):
        log.write(prompt)
    log.close()
    assert log.num_dropped == 3
    told = [record for record in caplog.records if "request log" in record.message]
    assert "No space left" in told[0].message
    assert not any(record.exc_info for record in told)


def test_what_waits_for_a_disk_is_bounded_in_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requestlog, "MAX_QUEUED_TOKENS", 1000)
    is_back = threading.Event()
    path = tmp_path / "log.jsonl"
    log = RequestLog(path, 1 << 20, 1)
    for prompt in prompts(20):
        prompt.prompt_ids = [7] * 90
        prompt.samples = [LoggedSample(ids=[8] * 10)]
        log.write(prompt, lambda _: assert_is_set(is_back))
    assert log.num_dropped == 10
    is_back.set()
    deadline = time.monotonic() + 60
    while log._tokens_taken < 1000 and time.monotonic() < deadline:
        time.sleep(0.01)
    (again,) = prompts(1)
    again.prompt_ids = [7] * 1000
    log.write(again)  # there is room again
    log.close()
    assert len(lines_of(path)) == 11


def assert_is_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_files_rotate_and_the_oldest_go(tmp_path: Path) -> None:
    write_many(tmp_path / "log.jsonl", 3)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    assert all(file.stat().st_size <= 4096 for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    newest_first = [line for file in files for line in reversed(file.read_text().splitlines())]
    ids = [json.loads(line)["request_id"] for line in newest_first]
    assert ids == [f"cmpl-{n}" for n in range(99, 99 - len(ids), -1)]


def test_a_line_comes_back_as_it_was(tmp_path: Path) -> None:
    prompt = LoggedPrompt(
        time=1.5,
        request_id="chatcmpl-1",
        sampling={"seed": "18446744073709551615"},
        prompt_ids=[1, 2],
        samples=[LoggedSample(finish_reason="stop", num_tokens=1, ids=[3], text="é\n")],
    )
    path = tmp_path / "log"
    path.write_text(f"{to_line(prompt)}\n\n{to_line(prompt)}\n", encoding="utf-8")
    with path.open(encoding="utf-8") as file:
        assert list(read_log(file)) == [prompt, prompt]


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"time": "x", "request_id": 1}', "[1]"])
def test_a_line_of_something_else_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log"
    path.write_text(f"{to_line(prompts(1)[0])}\n{line}\n")
    with path.open() as file, pytest.raises(ConfigError, match="line 2"):
        list(read_log(file))


def test_a_log_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--request-log"):
        RequestLog(tmp_path / "nowhere" / "log", max_bytes=4096, num_files=2)
