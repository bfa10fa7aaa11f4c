"""`weft status`, `weft chat` and the command itself, against a gateway with scripted workers."""

import asyncio
import io
import json
import secrets
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from weft.cli import main as cli_main
from weft.cli.chat import first_model, summary
from weft.cli.status import (
    PageUsage,
    StateUsage,
    WorkerStatus,
    _add_load,
    describe_states,
    show,
)
from weft.contract.errors import ConfigError
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import decode_pb2, gateway_pb2, gateway_pb2_grpc, worker_pb2

FLEET = gateway_pb2.GetFleetRequest()


def weft(*arguments: str) -> "asyncio.Future[Process]":
    command = [sys.executable, "-m", "weft.cli", *arguments]
    return asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    )


async def run(*arguments: str, typed: str = "") -> tuple[int, str, str]:
    process = await weft(*arguments)
    keys = typed.encode("utf-8", "surrogateescape")
    out, err = await asyncio.wait_for(process.communicate(keys), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_the_table_shows_models_whatever_their_names() -> None:
    workers = [
        WorkerStatus(worker_id=f"decode-{at}", role="decode", address="a", healthy=True, model=name)
        for at, name in enumerate(("[/b]odd", "org/plain"))
    ]
    out = io.StringIO()
    show(Console(file=out, width=200), workers)
    assert "[/b]odd" in out.getvalue()
    assert "org/plain" in out.getvalue()


@pytest.mark.parametrize("width", [64, 80, 120])
def test_the_table_leaves_out_columns_before_it_cuts_any(width: int) -> None:
    pages = PageUsage(free=1021, cached=1001, used=26, quarantined=0, total=2048)
    workers = [
        WorkerStatus(
            worker_id=f"{role}-{at}",
            role=role,
            address="a",
            healthy=True,
            model=f"org/of-some-name-{at}",
            pages=pages,
            transports=["nixl", "data"],
            decode_tokens_per_second=1640.0,
        )
        for role in ("prefill", "decode")
        for at in range(2)
    ]
    shown, piped = io.StringIO(), io.StringIO()
    show(Console(file=shown, width=width, force_terminal=True, no_color=True), workers)
    show(Console(file=piped, width=width), workers)
    lines = shown.getvalue().splitlines()
    assert len(lines) == 1 + len(workers)
    assert all(cell_len(Text.from_ansi(line).plain) <= width for line in lines)
    assert "…" not in shown.getvalue()
    assert all("org/of-some-name-" in line for line in lines[1:])
    assert all("nixl+data" in line for line in lines[1:]) is (width > 64)
    head = piped.getvalue().splitlines()[0].split()
    assert {"free", "quar.", "pages", "transport", "model"} <= set(head)


@pytest.mark.parametrize(("told", "shown"), [(None, "-"), (0.0, "0"), (31234.4, "31,234")])
def test_a_speed_that_a_worker_does_not_tell_is_no_zero(told: float | None, shown: str) -> None:
    """Workers of older versions tell only what they measured whenever that was."""
    load = worker_pb2.WatchLoadResponse(prefill_tokens_per_second=9999.0)
    if told is not None:
        load.recent_prefill_tokens_per_second = told
    worker = WorkerStatus(worker_id="prefill-0", role="prefill", address="a", healthy=True)
    _add_load(worker, worker_pb2.WatchLoadResponse.FromString(load.SerializeToString()))
    out = io.StringIO()
    show(Console(file=out, width=200), [worker])
    head, row = (line.split() for line in out.getvalue().splitlines()[:2])
    assert row[head.index("tok/s")] == shown
    assert worker.prefill_tokens_per_second == told


class Echo:
    """Answers with a fixed text; remembers the prompts."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.prompts: list[list[int]] = []
        self.hang_after = 10**9
        self.harness: Harness | None = None

    def __call__(self, submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        assert self.harness is not None
        self.prompts.append(prompt)
        tokens = [*self.harness.ids(self.text), self.harness.end]
        return Script([tokens], hang_after=self.hang_after)


async def test_chat_streams_and_remembers(tmp_path: Path) -> None:
    echo = Echo("Bonjour [bold]é 你好")
    async with gateway(tmp_path, echo) as harness:
        echo.harness = harness
        address = harness.app.server.address
        status, out, err = await run(
            *("chat", "--address", address, "--system", "Be kind."),
            typed="first\n\nsecond\n/reset\nthird\n/quit\nnever\n",
        )
        assert status == 0, err
        assert out.count(echo.text + "\n") == 3
        assert MODEL in out
        said = [harness.tokenizer.decode(prompt) for prompt in echo.prompts]
    assert ["first" in text for text in said] == [True, True, False]
    assert ["second" in text for text in said] == [False, True, False]
    assert [text.count(echo.text) for text in said] == [0, 1, 0]
    assert all("Be kind." in text for text in said)
    assert "third" in said[2]


def test_the_parts_of_a_prompt_are_no_more_than_it() -> None:
    last = gateway_pb2.ChatResponse()
    last.usage.prompt_tokens = 96
    last.timeline.worker_id = "decode-0"
    last.timeline.fills.add(worker_id="prefill-0", accepted_tokens=80)
    last.timeline.local_prefill_tokens = 16
    assert summary(last, 1.0).endswith("80 from prefill-0, 16 computed by decode-0")
    last.timeline.fills[0].accepted_tokens = 96
    last.timeline.local_prefill_tokens = 1
    assert summary(last, 1.0).endswith("96 from prefill-0, 1 run again by decode-0")
    del last.timeline.fills[:]
    last.timeline.local_prefill_tokens = 100
    assert summary(last, 1.0).endswith("96 computed by decode-0, 4 run again by decode-0")


async def test_what_is_typed_in_another_encoding_is_asked_as_it_can_be(tmp_path: Path) -> None:
    echo = Echo("Bonjour")
    async with gateway(tmp_path, echo) as harness:
        echo.harness = harness
        latin = "caf\udce9\n"  # b"caf\xe9"
        status, out, err = await run("chat", "--address", harness.app.server.address, typed=latin)
        assert status == 0, err
        assert echo.text in out
        assert "caf\ufffd" in harness.tokenizer.decode(echo.prompts[0])


async def test_chat_shows_reasoning_before_the_answer(tmp_path: Path) -> None:
    (tmp_path / MODEL).mkdir()
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}<think>{# </think> #}"
    (tmp_path / MODEL / "chat_template.jinja").write_text(template)
    echo = Echo("one and one [b]\n</think>\n\nTwo.")
    async with gateway(tmp_path, echo) as echo.harness:
        typed = "1+1?\nSure?\n"
        status, out, err = await run(
            "chat", "--address", echo.harness.app.server.address, typed=typed
        )
    assert status == 0, err
    assert out.count("one and one [b]\n\nTwo.\n") == 2
    tokenizer = echo.harness.tokenizer
    assert tokenizer.decode(echo.prompts[1]) == "1+1?|Two.|Sure?|<think>"


async def test_ctrl_c_stops_the_answer_not_the_chat(tmp_path: Path) -> None:
    echo = Echo(secrets.token_hex(20))
    async with gateway(tmp_path, echo) as harness:
        echo.harness = harness
        echo.hang_after = 3
        process = await weft("chat", "--address", harness.app.server.address)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n")
        await process.stdin.drain()
        text = b""
        async with asyncio.timeout(60):
            await process.stdout.readline()  # the head
            text = await process.stdout.read(1)  # the answer has begun
            echo.hang_after = 10**9
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate(b"again\n")
        assert process.returncode == 0, err
        answer = (text + out).decode()
        assert "[stopped]" in answer
        assert echo.text in answer
        await harness.wait(lambda: harness.workers[0].cancels)


class Endless(gateway_pb2_grpc.GatewayServiceServicer):
    """Begins an answer and never ends it."""

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.ChatResponse]:
        yield gateway_pb2.ChatResponse(choices=[gateway_pb2.Choice(text="half")])
        await asyncio.Event().wait()


async def test_a_gateway_that_ends_in_mid_answer_is_told_in_a_line_of_its_own() -> None:
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Endless(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    process = await weft("chat", "--model", "m", "--address", f"127.0.0.1:{port}")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hello\n")
    async with asyncio.timeout(60):
        await process.stdout.readuntil(b"half")
        await server.stop(0)
        out, err = await process.communicate(b"")
    assert out == b"\n"
    assert process.returncode == 1
    assert err.decode().count("\n") == 1, err


async def test_chat_says_what_is_wrong(tmp_path: Path) -> None:
    echo = Echo("x")
    async with gateway(tmp_path, echo) as harness:
        echo.harness = harness
        address = harness.app.server.address
        status, out, told = await run(
            "chat", "--address", address, "--model", "no", typed="hello\n"
        )
        refused, _, err = await run("chat", "--address", address, "--temperature", "-1")
    assert status == 1
    assert "the model `no` does not exist" in told
    assert "does not exist" not in out
    assert refused == 2
    assert "must be a number from 0 to 100" in err


def test_chat_takes_the_first_model_that_generates() -> None:
    class Gateway:
        def __init__(self, *tasks: str) -> None:
            models = [gateway_pb2.Model(name=f"a-{task}", task=task) for task in tasks]
            self.response = gateway_pb2.ListModelsResponse(models=models)

        def ListModels(self, *_: object, **__: object) -> gateway_pb2.ListModelsResponse:
            return self.response

    assert first_model(cast("Any", Gateway("embed", "generate", "score"))) == "a-generate"
    with pytest.raises(ConfigError, match=r"no model here generates text: a-embed \(embed\)"):
        first_model(cast("Any", Gateway("embed")))


@pytest.mark.parametrize("command", ["chat", "status"])
async def test_without_a_gateway_it_says_so(command: str) -> None:
    status, _, err = await run(command, "--address", "127.0.0.1:1")
    assert status == 1
    assert "no gateway answers at 127.0.0.1:1" in err


async def test_a_gateway_that_stands_still_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        status, _, err = await run("status", "--address", address)
    assert status == 1
    assert f"the gateway at {address} did not answer in time" in err


async def test_status_tells_of_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    async with gateway(tmp_path, Echo("x"), num_decode=2, num_prefill=1) as harness:
        address = harness.app.server.address
        harness.workers[0].running_requests = 7
        await harness.workers[1].stop()
        async with asyncio.timeout(60):
            while all(w.healthy for w in (await harness.typed.GetFleet(FLEET)).workers):
                await asyncio.sleep(0.05)
        status, out, err = await run("status", "--address", address, "--json")
        assert status == 0, err
        workers = {worker["worker_id"]: worker for worker in json.loads(out)["workers"]}
        assert json.loads(out)["gateway"]["running_prompts"] == 0
        _, table, _ = await run("status", "--address", address)
    assert workers.keys() == {"decode-0", "decode-1", "prefill-0"}
    assert [workers[name]["healthy"] for name in sorted(workers)] == [True, False, True]
    assert workers["decode-1"]["problem"]
    assert workers["decode-0"]["running_requests"] == 7
    lines = table.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["decode-0", "decode-1", "prefill-0"]
    assert [" not ok " in line for line in lines[1:4]] == [False, True, False]
    assert " 7 " in lines[1]


def test_states_are_told_in_one_line() -> None:
    counts = {"used": 1, "cached": 2, "total": 1234, "checkpoint_tokens": 1024}
    told = describe_states(StateUsage(**counts, prefix_pages=60, continuable_pages=45))
    assert "1 used and 2 cached of 1,234 blocks" in told
    assert "every 1,024 tokens" in told
    assert "45 of 60 cached pages (75%); no block is left behind the other 15" in told
    told = describe_states(StateUsage(**counts, prefix_pages=0, continuable_pages=0))
    assert told.endswith("0 of 0 cached pages")


def test_commands_are_dispatched(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli_main.COMMANDS)
    assert cli_main.main(["nonsense"]) == 2
    assert "no command 'nonsense'" in capsys.readouterr().err
    assert cli_main.main(["serve", "nonsense"]) == 2
    assert "gateway, prefill, decode, kvstore, planner, rest" in capsys.readouterr().err
