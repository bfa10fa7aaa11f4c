"""The serving benchmark: clients read streams right, wrong tokens and wrong sources are noticed."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from google.protobuf.duration_pb2 import Duration
from weft.testing.models.tiny_models import make_tiny
from weft.v1 import common_pb2, gateway_pb2

BENCH = Path(__file__).resolve().parents[3] / "bench"
MODELS = b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{"data":[{"id":"tiny"}]}'


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    num_threads = torch.get_num_threads()
    yield importlib.import_module("bench")
    torch.set_num_threads(num_threads)  # The benchmark sets what it was told.


@pytest.fixture
def scripted_server() -> Iterator[Any]:
    """Answers each connection with given bytes, cut at random places."""
    listener = socket.create_server(("127.0.0.1", 0))
    answers: list[bytes] = []
    threads: list[threading.Thread] = []

    def serve(count: int) -> None:
        for _ in range(count):
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            raw = answers.pop(0)
            while raw:
                size = random.randint(1, len(raw))
                connection.sendall(raw[:size])
                raw = raw[size:]
            connection.close()

    def start(*raw: bytes) -> str:
        answers.extend(raw)
        thread = threading.Thread(target=serve, args=(len(raw),), daemon=True)
        thread.start()
        threads.append(thread)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for thread in threads:
        thread.join(10)
    listener.close()


def load_rest(url: str) -> Any:
    """The load generator on the REST client."""
    load = importlib.import_module("serving.load")
    client = importlib.import_module("serving.rest_client").RestClient(url)
    return load.LoadSystem("rest", client, asyncio.Runner())


def chunked(body: bytes, status: str = "200 OK") -> bytes:
    """An HTTP answer whose chunks end anywhere."""
    raw = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    while body:
        size = random.randint(1, 40)
        piece, body = body[:size], body[size:]
        raw += f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    return raw + b"0\r\n\r\n"


def sse(*events: Any) -> bytes:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def text_event(text: str) -> dict[str, Any]:
    return {"choices": [{"text": text}]}


def usage_event(num_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": num_tokens}}


@pytest.mark.usefixtures("bench")
def test_streams_are_read_whatever_the_cuts(scripted_server: Any) -> None:
    pieces = ["Grüße", " an\n\n", "data: 漢字", " 🙂"]
    body = sse(*map(text_event, pieces), usage_event(4), "[DONE]")
    system = load_rest(scripted_server(MODELS, *(chunked(body) for _ in range(10))))
    outcome = system.run([[1, 2]] * 10, 4)
    assert len(outcome.answers) == 10
    for answer in outcome.answers:
        assert answer.text == "".join(pieces)
        assert len(answer.event_times_s) == len(pieces)
        times_s = [answer.sent_s, *answer.event_times_s]
        assert times_s == sorted(times_s)
        assert times_s[-1] - answer.sent_s <= outcome.wall_s
        assert sum(answer.gaps_s()) == pytest.approx(times_s[-1] - times_s[1])
    assert system.cpu_s > 0
    assert system.wall_s == outcome.wall_s


BROKEN = [
    chunked(b'{"error": {}}', "503 Service Unavailable"),
    chunked(sse(text_event("x"), usage_event(1))),  # Never done.
    chunked(sse(text_event("x"), {"error": {"message": "lost"}})),
    chunked(sse(text_event("x"), usage_event(1), "[DONE]"))[:-8],
    chunked(sse(text_event("x"), usage_event(2), "[DONE]")),  # One token too many.
    b"",
]


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("raw", BROKEN, ids=range(len(BROKEN)))
def test_failed_answers_are_errors(raw: bytes, scripted_server: Any) -> None:
    load_error = importlib.import_module("serving.load").LoadError
    system = load_rest(scripted_server(MODELS, raw))
    with pytest.raises(load_error):
        system.run([[1]], 1)


@pytest.mark.usefixtures("bench")
def test_no_prompt_arrives_once_the_streams_have_ended(scripted_server: Any) -> None:
    long = chunked(sse(*[text_event("a")] * 30, usage_event(30), "[DONE]"))
    system = load_rest(scripted_server(MODELS, long))
    # So many pieces never come: the streams have ended when prompts may arrive.
    arrivals = importlib.import_module("serving.systems").Arrivals([[2], [3]], 10**6, 0.0)
    outcome, arrived = system.run_with_arrivals([[1]], 30, arrivals)
    assert [answer.text for answer in outcome.answers] == ["a" * 30]
    assert arrived == []


@pytest.mark.usefixtures("bench")
def test_typed_messages_are_read() -> None:
    load = importlib.import_module("serving.load")
    client = importlib.import_module("serving.grpc_client").GrpcClient
    tokens = [[7], [], [8, 9], [10]]
    messages = [
        gateway_pb2.CompleteResponse(choices=[gateway_pb2.Choice(token_ids=ids)]) for ids in tokens
    ]
    messages[-1].timeline.matched_tokens = 32
    pieces = [message.SerializeToString() for message in messages]
    raw = load.Raw(1.0, pieces, [1.5, 1.6, 1.75, 2.0])
    answer = client.decode(None, raw, 4)
    assert answer.token_ids == [7, 8, 9, 10]
    assert answer.first_s == 0.5
    assert answer.gaps_s() == [0.25, 0.25]
    assert answer.gaps_s(1.6) == [0.25]
    assert answer.timeline.matched_tokens == 32
    with pytest.raises(load.LoadError):
        client.decode(None, raw, 5)


@pytest.mark.usefixtures("bench")
def test_sources_of_a_prompt_are_told_from_its_timeline() -> None:
    describe = importlib.import_module("serving.first_token").describe_source
    rate = importlib.import_module("serving.sections").prefill_rate
    answer = importlib.import_module("serving.systems").Answer
    error = importlib.import_module("serving.load").LoadError
    prefill, store = common_pb2.FILL_SOURCE_PREFILL, common_pb2.FILL_SOURCE_KVSTORE

    def timeline(*fills: tuple[int, int, int], matched: int = 0, local: int = 0) -> Any:
        return common_pb2.Timeline(
            matched_tokens=matched,
            local_prefill_tokens=local,
            fills=[
                common_pb2.FillTimeline(
                    source=source,
                    accepted_tokens=accepted,
                    computed_tokens=computed,
                    last_chunk_computed_time=Duration(nanos=500_000_000),
                )
                for source, accepted, computed in fills
            ],
        )

    assert describe(timeline((prefill, 992, 992), local=8), 1000) == "cold"
    assert describe(timeline(local=1000), 1000) == "cold"
    assert describe(timeline(matched=992, local=8), 1000) == "local hit"
    assert describe(timeline((store, 992, 0), local=8), 1000) == "store hit"
    half = timeline((store, 496, 0), (prefill, 496, 496), local=8)
    assert describe(half, 1000) not in ("cold", "local hit", "store hit")
    assert rate(answer(None, timeline=timeline((prefill, 992, 992)))) == 1984
    for wrong in (timeline(local=1000), half, timeline((prefill, 992, 0))):
        with pytest.raises(error):
            rate(answer(None, timeline=wrong))


@pytest.mark.usefixtures("bench")
def test_llama_cpp_output_is_read() -> None:
    llama = importlib.import_module("serving.llama")
    error = importlib.import_module("serving.load").LoadError
    table = """
main: n_kv_max = 8192, n_batch = 2048, n_threads = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|    64 |     96 |    1 |    160 |    0.128 |   500.00 |    0.600 |   160.00 |    0.728 |   219.78 |
|    64 |     96 |   16 |   2560 |    2.048 |   500.00 |    4.000 |   384.00 |    6.048 |   423.28 |
"""
    found = llama.parse_batched(table)
    assert found.generation == {1: 160.0, 16: 384.0}
    assert found.prompt == {64: 500.0}
    row = {"pp": 512, "tg": 1, "pl": 1, "speed_pp": 495.5, "speed_tg": 150.25, "t": 1.0}
    assert llama.parse_batched(f"loading\n{json.dumps(row)}\n").prompt == {512: 495.5}
    tests = [
        {"n_prompt": 512, "n_gen": 0, "avg_ts": 480.5},
        {"n_prompt": 0, "n_gen": 96, "avg_ts": 170.0},
    ]
    found = llama.parse_bench(json.dumps(tests, indent=2))
    assert found.generation == {1: 170.0}
    assert found.prompt == {512: 480.5}
    for parse in (llama.parse_batched, llama.parse_bench):
        with pytest.raises(error):
            parse("error: unable to load model")


FAKE_BATCHED_BENCH = """#!{python}
import sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
generated = int(flags["-ntg"])
for prompt in map(int, flags["-npp"].split(",")):
    for streams in map(int, flags["-npl"].split(",")):
        assert streams * (prompt + generated) <= int(flags["-c"])
        cells = (prompt, generated, streams, 0, 0.0, 500.0 + prompt, 0.0, 100.0 * streams, 0.0, 0.0)
        print("|" + "|".join(str(cell) for cell in cells) + "|")
"""


@pytest.mark.usefixtures("bench")
def test_llama_cpp_rows_stand_beside_the_others(tmp_path: Path) -> None:
    series = importlib.import_module("serving.series")
    llama = importlib.import_module("serving.llama")
    goals = importlib.import_module("serving.goals")
    program = tmp_path / "llama-batched-bench"
    program.write_text(FAKE_BATCHED_BENCH.format(python=sys.executable))
    program.chmod(0o755)
    ledger = series.Ledger()
    ledger.row("throughput", "mesh, REST", "16").note(1, 2000.0)
    ledger.row("prompts", "engine", "512").note(1, 4048.0)
    part = llama.Llama(ledger, program, tmp_path / "model.gguf", [1, 16], [512], 96, 2)
    for turn in range(3):
        part.take(turn)
    goals.set_goals(ledger)
    found = {(row.system, row.case): row for row in ledger.rows}
    assert found["llama.cpp", "16"].values == {1: 1600.0, 2: 1600.0}
    assert found["llama.cpp", "1"].values == {1: 100.0, 2: 100.0}
    assert found["llama.cpp", "512"].values == {1: 1012.0, 2: 1012.0}
    (ahead,) = found["llama.cpp", "16"].goals
    assert (ahead.value, ahead.is_met) == (1.25, True)
    (ahead,) = found["llama.cpp", "512"].goals
    assert (ahead.value, ahead.is_met) == (4.0, False)
    program.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    broken = llama.Llama(series.Ledger(), program, tmp_path / "model.gguf", [1], [512], 96, 2)
    broken.take(1)
    assert all("status 3" in row.failure for row in broken.ledger.rows)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("bench"), seed=5, tokenizer=True)


def test_a_run_reports_rates_and_right_tokens(
    bench: ModuleType, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "result.json"
    flags = "--systems engine,transformers --rows throughput,prompts,mixed --dtype float32 "
    flags += "--threads 1 --repeats 2 --tokens 6 --streams 1,3 --prompt-tokens 40 --long-tokens 50"
    status = bench.harness.main([*flags.split(), "--model", str(tiny_dir), "--json", str(target)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    document = json.loads(target.read_text())
    assert document["setup"]["dtype"] == "float32"
    rows = {(row["section"], row["system"], row["case"]): row for row in document["rows"]}
    assert list(rows) == [
        ("throughput", "engine", "1"),
        ("throughput", "transformers", "1"),
        ("throughput", "engine", "3"),
        ("throughput", "transformers", "3"),
        ("prompts", "engine", "40"),
        ("prompts", "transformers", "40"),
        ("mixed", "engine", "4"),
    ]
    for (section, _, case), row in rows.items():
        assert len(row["values"]) == 2
        assert row["first_s"]["p50"] > 0
        if section == "throughput":
            num_answers = 2 * 2 if case == "1" else 2 * 3
            assert row["tokens"]["exact"] + row["tokens"]["near_ties"] == 6 * num_answers
            assert row["gaps_s"]["count"] == 5 * num_answers
    for row in (rows["prompts", "engine", "40"], rows["prompts", "transformers", "40"]):
        assert row["tokens"]["exact"] + row["tokens"]["near_ties"] == 2


@pytest.mark.usefixtures("bench")
def test_every_step_of_a_fake_model_is_timed(tmp_path: Path) -> None:
    step = importlib.import_module("step")
    target = tmp_path / "steps.json"
    flags = f"--running 1,20 --steps 7 --vocab 64 --temperature 0.5 --json {target}"
    assert step.harness.main(flags.split()) == 0
    rows = json.loads(target.read_text())["rows"]
    rows = [row for row in rows if "running" in row]
    assert [row["running"] for row in rows] == [1, 20]
    for row in rows:
        for part in ("plan_batch_us", "draw_commit_us", "encode_us", "server_us"):
            assert row[part]["num"] == 7
            assert 0 < row[part]["low"] <= row[part]["median"] <= row[part]["high"]


def test_wrong_tokens_are_noticed(bench: ModuleType, tiny_dir: Path) -> None:
    systems = importlib.import_module("serving.systems")
    checking = importlib.import_module("serving.checking")
    prompt, num_tokens = [3, 17, 40, 99], 8
    reference = systems.TransformersSystem(tiny_dir, "float32", 1)
    right = reference.run([prompt], num_tokens).answers[0].token_ids
    tokenizer = bench.Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    checker = checking.Checker(tiny_dir, "float32", tokenizer)

    def verdict(tokens: list[int] | None, text: str | None = None) -> Any:
        return checker.check(prompt, systems.Answer(tokens, text), num_tokens, [right])

    assert verdict(right).is_right
    wrong = [*right[:4], (right[4] + 1) % 400, *right[5:]]
    assert verdict(wrong).wrong >= 1
    assert verdict(right[:-1]).missing == num_tokens
    text = tokenizer.decode(right, skip_special_tokens=False)
    assert verdict(None, text).exact == num_tokens
    assert not verdict(None, text + "!").is_right


def test_ratios_compare_the_same_repeats(bench: ModuleType) -> None:
    series = importlib.import_module("serving.series")
    ours, theirs = series.Series("s", "ours", "1"), series.Series("s", "theirs", "1")
    for repeat, (a, b) in enumerate([(10.0, 5.0), (90.0, 30.0), (4.0, 1.0)]):
        ours.note(repeat, a)
        theirs.note(repeat, b)
    ours.compare(theirs)
    assert ours.ratio == 3.0
    theirs.compare(ours, is_time=True)
    assert theirs.ratio == 3.0
