"""What a mesh tells of itself: traces, metrics, and dumps of an engine that stalls or dies."""

from __future__ import annotations

import base64
import json
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.testing.meshes.local_mesh import WEFT, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.metric_names import Metric, documented, exposed
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, TinyMesh
from weft.testing.services.otlp_collector import Collected, Collector, collector

pytestmark = pytest.mark.needs("go")
NUM_PROMPT, NUM_NEW = 100, 8
STALL_S = 3.0
"""Longer than a busy machine lets an engine wait."""
NUM_TRIES = 20


SHOWN = (
    *("attempt 1", "request", "queue", "fill", "plan", "compute", "gather", "digest", "post"),
    *("write", "report", "arrival", "check", "publish", "tail", "decode", "render"),
)
"""Spans of a shipped prompt."""


class TracedMesh(TinyMesh):
    """With a collector that all its services export to."""

    def __init__(self, folder: Path, spans: Collector) -> None:
        self.collector = spans
        dumps = f"--stall-dump-after-s {STALL_S} --crash-dump-tokens {PATIENT}"
        super().__init__(
            folder,
            *("--kvstore", "1", "--local-prefill-max-tokens", "0"),
            *("--enable-faults", "--decode-args", dumps),
        )

    def ask(self, traceparent: str | None, **fields: Any) -> dict[str, Any]:
        """A prompt of random tokens that must be shipped."""
        body = {
            "model": MODEL,
            "prompt": [secrets.randbelow(VOCAB) for _ in range(NUM_PROMPT)],
            "max_tokens": NUM_NEW,
            "ignore_eos": True,
            "weft_timeline": True,
            **fields,
        }
        answer = httpx.post(
            f"{self.url}/v1/completions",
            json=body,
            headers={"traceparent": traceparent} if traceparent else {},
            timeout=120,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def weft_trace(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*WEFT, "trace", *arguments, "--address", self.grpc_address]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def spans(self, request_id: str) -> list[dict[str, Any]]:
        """What `weft trace` finds, once the whole is there."""
        found: list[dict[str, Any]] = []

        def is_whole() -> bool:
            done = self.weft_trace(request_id, "--json")
            found[:] = json.loads(done.stdout) if done.returncode == 0 else []
            names = {(span["service"], span["name"]) for span in found}
            # The filler hears last that its fill is over.
            return names >= {
                *(("gateway", "text_completion"), ("decode", "request"), ("prefill", "fill")),
            }

        wait_until(is_whole, 30, lambda: str(found))
        return found

    def trace(self, flags: str) -> tuple[dict[str, Any], list[dict[str, Any]], str, str]:
        """A request's answer, its spans, and the ids of the trace and of the client's span.

        Nobody waits long for the store: one that a busy machine has not let answer in time may
        have no span, and the request is made again.
        """
        for _ in range(NUM_TRIES):
            traceparent, trace_id, client_span = new_traceparent(flags)
            answer = self.ask(traceparent)
            spans = self.spans(answer["id"])
            lookups = [span for span in spans if span["name"] == "lookup"]
            has_answered = any(span["service"] == "kvstore" for span in lookups)
            if has_answered and not any(span.get("error") for span in lookups):
                return answer, spans, trace_id, client_span
        raise AssertionError(f"{NUM_TRIES} times the store was late")

    def edge_span(self, trace_id: str) -> Collected:
        """The REST edge's span of a trace, once the collector has it."""
        found: list[Collected] = []

        def has_come() -> bool:
            found[:] = [s for s in self.collector.spans(trace_id) if s.service == "rest"]
            return bool(found)

        wait_until(has_come, 30, lambda: self.log("rest"))
        (span,) = found
        return span


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TracedMesh]:
    with collector() as spans, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", spans.address)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        mesh = TracedMesh(tmp_path_factory.mktemp("trace"), spans)
        mesh.wait_ready()
        mesh.wait_healthy()
        yield mesh
        assert mesh.stop() == 0, mesh.text


def new_traceparent(flags: str) -> tuple[str, str, str]:
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{flags}", trace_id, span_id


def hexadecimal(text: str) -> str:
    """Bytes as protobuf's JSON writes them."""
    return base64.b64decode(text).hex()


def test_a_request_is_one_trace_over_all_services(mesh: TracedMesh) -> None:
    answer, spans, trace_id, client_span = mesh.trace("01")
    by_id = {hexadecimal(span["span_id"]): span for span in spans}
    assert {hexadecimal(span["trace_id"]) for span in spans} == {trace_id}
    assert answer["weft"]["trace_id"] == trace_id
    assert {span["service"] for span in spans} == {"gateway", "decode", "prefill", "kvstore"}
    assert {span["request_id"] for span in spans} == {answer["id"]}
    assert not [span["error"] for span in spans if span.get("error")]
    # The edge is between client and gateway. It keeps no spans: a collector has them.
    edge = mesh.edge_span(trace_id)
    assert (edge.name, edge.parent_id) == ("POST /v1/completions", client_span)
    assert edge.attributes["http.response.status_code"] == 200

    def path(span: dict[str, Any]) -> str:
        parent = hexadecimal(span["parent_span_id"])
        own = f"{span['service']} {span['name']}"
        if parent == edge.span_id:
            return own
        return f"{path(by_id[parent])} > {own}"

    paths = {path(span) for span in spans}
    root = "gateway text_completion"
    owner = f"{root} > gateway attempt 1 > decode request"
    filler = f"{owner} > decode fill > prefill fill"
    assert paths >= {
        f"{root} > gateway queue",
        f"{root} > gateway prepare",
        f"{root} > gateway render",
        f"{root} > gateway attempt 1 > gateway route",
        f"{owner} > decode queue",
        f"{owner} > decode lookup > kvstore lookup",
        f"{owner} > decode tail",
        f"{owner} > decode decode",
        f"{filler} > prefill queue",
        f"{filler} > prefill compute",
        f"{filler} > prefill write",
    }

    # Sizes and times are those of the answer's own timeline.
    def only(wanted: str) -> dict[str, Any]:
        (span,) = [span for span in spans if path(span) == wanted]
        return span

    timeline = answer["weft"]["timeline"]
    fill = only(f"{owner} > decode fill")["attributes"]
    assert fill["weft.bytes"] == int(timeline["fills"][0]["bytes"]) > 0
    assert fill["weft.tokens"] == timeline["fills"][0]["accepted_tokens"] == NUM_PROMPT // 16 * 16
    assert only(f"{filler} > prefill write")["attributes"]["weft.bytes"] == fill["weft.bytes"]
    assert only(f"{owner} > decode decode")["attributes"]["weft.tokens"] == NUM_NEW
    whole = only(root)["attributes"]
    assert whole["gen_ai.usage.input_tokens"] == NUM_PROMPT
    assert whole["gen_ai.usage.output_tokens"] == NUM_NEW
    for span in spans:
        parent = by_id.get(hexadecimal(span["parent_span_id"]))
        if parent is not None and span["service"] == parent["service"]:
            # One clock: all lies within what caused it, give or take rounding.
            assert started(span) >= started(parent) - timedelta(microseconds=1), (span, parent)
            assert ended(span) <= ended(parent) + timedelta(milliseconds=2), (span, parent)


def started(span: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(span["start_time"])


def ended(span: dict[str, Any]) -> datetime:
    return started(span) + timedelta(seconds=seconds(span))


def seconds(span: dict[str, Any]) -> float:
    return float(span["duration"].removesuffix("s"))


def test_a_collector_gets_the_same_spans(mesh: TracedMesh) -> None:
    answer, found, trace_id, _ = mesh.trace("01")
    spans = {hexadecimal(span["span_id"]): span for span in found}
    edge = mesh.edge_span(trace_id)
    wait_until(lambda: len(mesh.collector.spans(trace_id)) > len(spans), 30)
    exported = {span.span_id: span for span in mesh.collector.spans(trace_id)}
    assert exported.keys() == {edge.span_id, *spans}
    for span_id, span in spans.items():
        twin = exported[span_id]
        assert (twin.service, twin.instance) == (span["service"], span["instance"])
        assert (twin.name, twin.parent_id) == (span["name"], hexadecimal(span["parent_span_id"]))
        assert twin.attributes["weft.request_id"] == answer["id"]
        assert abs(twin.duration_ns / 1e9 - seconds(span)) < 1e-3


def test_the_edge_begins_the_trace_of_a_client_without_one(mesh: TracedMesh) -> None:
    answer = mesh.ask(None)
    edge = mesh.edge_span(answer["weft"]["trace_id"])
    assert edge.parent_id == ""
    (root,) = [span for span in mesh.spans(answer["id"]) if span["name"] == "text_completion"]
    assert hexadecimal(root["parent_span_id"]) == edge.span_id


def test_an_unsampled_trace_is_kept_but_not_exported(mesh: TracedMesh) -> None:
    _, spans, trace_id, client_span = mesh.trace("00")
    assert {span["service"] for span in spans} == {"gateway", "decode", "prefill", "kvstore"}
    (root,) = [span for span in spans if span["name"] == "text_completion"]
    # The edge has no span of it, so it names none as the parent.
    assert hexadecimal(root["parent_span_id"]) == client_span
    sampled, sampled_id, _ = new_traceparent("01")
    mesh.ask(sampled)
    wait_until(lambda: mesh.collector.spans(sampled_id), 30)
    assert not mesh.collector.spans(trace_id)


def test_the_tree_is_shown_by_request_and_by_trace(mesh: TracedMesh) -> None:
    traceparent, trace_id, _ = new_traceparent("01")
    answer = mesh.ask(traceparent, n=2, prompt=[[1, 2, 3] * 30, [4, 5, 6] * 30])
    mesh.spans(answer["id"])
    for wanted in (answer["id"], trace_id):
        done = mesh.weft_trace(wanted)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert trace_id in lines[0]
        assert answer["id"] in lines[0]
        for name in SHOWN:
            assert any(name in line for line in lines), done.stdout
        assert sum("attempt 1" in line for line in lines) == 2
        assert any("KiB" in line for line in lines)


def test_an_unknown_request_is_said_to_be_unknown(mesh: TracedMesh) -> None:
    done = mesh.weft_trace("chatcmpl-never")
    assert done.returncode == 1
    assert "no spans of chatcmpl-never" in done.stderr


# -- metrics -------------------------------------------------------------------------------------

HEADINGS = {
    "gateway": "Gateway",
    "decode-0": "Prefill and decode workers",
    "prefill-0": "Prefill and decode workers",
    "kvstore-0": "KV store",
    "rest": "REST edge",
}
ONLY_AFTER_A_FAILURE = {"weft_rest_stream_failures_total"}
ONLY_WITH_DRAFTS = {"weft_draft_tokens"}
ONLY_ELSEWHERE = (
    *("weft_kvstore_backend_", "weft_engine_adapter_", "weft_kv_window_pages"),
    *("weft_state_blocks", "vllm:lora_requests_info", "weft_expert_"),
)
"""With Valkey, where adapters are served, where pages are freed behind windows, where layers are
recurrent, and where experts have ranks.
"""


def scrape(mesh: TracedMesh, name: str) -> set[Metric]:
    address = mesh.service(name)["metrics_address"]
    return exposed(httpx.get(f"http://{address}/metrics", trust_env=False).text)


def test_the_list_of_metrics_is_what_services_show(mesh: TracedMesh) -> None:
    mesh.ask(new_traceparent("00")[0])
    # The store knows nothing of pages before its first put.
    wait_until(lambda: len(scrape(mesh, "kvstore-0")) > 20, 30)
    listed = documented()
    # The mesh runs no planner and no picker; their own tests see what they show.
    assert listed.keys() == {*HEADINGS.values(), "Planner", "Endpoint picker"}
    for name, heading in HEADINGS.items():
        shown = scrape(mesh, name)
        wanted = {
            metric
            for metric in listed[heading]
            if metric.name not in ONLY_AFTER_A_FAILURE | ONLY_WITH_DRAFTS
            and not metric.name.startswith(ONLY_ELSEWHERE)
        }
        assert shown == wanted, (name, shown ^ wanted)


def test_metrics_count_what_was_asked(mesh: TracedMesh) -> None:
    def value(name: str, metric: str) -> float:
        address = mesh.service(name)["metrics_address"]
        lines = httpx.get(f"http://{address}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric))

    mesh.wait_empty()
    mesh.wait_counted()
    before = {
        name: value("gateway", name)
        for name in (
            "weft_prompt_tokens_total",
            "weft_generation_tokens_total",
            "weft_request_prefill_time_seconds_count",
            'weft_fills_total{outcome="ok",source="prefill"}',
            "weft_fill_bytes_total",
        )
    }
    answer = mesh.ask(new_traceparent("00")[0])
    (fill,) = answer["weft"]["timeline"]["fills"]
    expected = [NUM_PROMPT, NUM_NEW, 1, 1, int(fill["bytes"])]

    def gained() -> list[float]:
        return [value("gateway", name) - count for name, count in before.items()]

    # A request is counted when it is over, which its client may know first.
    wait_until(lambda: gained() == expected, 30, lambda: str(gained()))


# -- an engine that stalls, and dies -------------------------------------------------------------


def dumps(mesh: TracedMesh, kind: str) -> set[Path]:
    """Dumps of a kind."""
    return set((mesh.state / "crashes").glob(f"[0-9]*-decode-0-{kind}"))


def fault(mesh: TracedMesh, *arguments: str) -> None:
    command = [*WEFT, "fault", *arguments, "--state-dir", str(mesh.state)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)


def test_a_stall_and_a_crash_are_dumped_and_the_dump_is_replayed(mesh: TracedMesh) -> None:
    # A try before this one may have left a stall. A busy machine makes some, too.
    mesh.wait_healthy()
    mesh.ask(new_traceparent("00")[0])
    stalls, crashes = dumps(mesh, "stall"), dumps(mesh, "crash")
    engine_pid = mesh.service("decode-0")["engine_pid"]
    fault(mesh, "add", "engine.step", "stall", "--service", "decode-0", "--delay-s", "60")
    prompt = [secrets.randbelow(VOCAB) for _ in range(20)]
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(mesh.ask(new_traceparent("00")[0], prompt=prompt))
    )
    asking.start()
    wait_until(lambda: dumps(mesh, "stall") - stalls, 60, lambda: mesh.log("decode-0"))
    (stall,) = dumps(mesh, "stall") - stalls
    report = json.loads((stall / "report.json").read_text())
    assert report["worker_id"] == "decode-0"
    assert report["info"]["engine_pid"] == engine_pid
    assert report["loop_age_s"] > STALL_S
    assert report["plan"]["is_running"]
    (item,) = report["plan"]["items"]
    assert item["start_token"] + item["num_tokens"] == len(prompt)
    # The state of an engine that is stuck, told by another of its threads.
    state = json.loads((stall / "state.json").read_text())
    assert item["request_id"] in json.dumps(state)
    stacks = (stall / "stacks.txt").read_text()
    assert "engine.py" in stacks
    assert "in _start" in stacks
    os.kill(engine_pid, signal.SIGSEGV)
    wait_until(lambda: dumps(mesh, "crash") - crashes, 60, lambda: mesh.log("decode-0"))
    (crash,) = dumps(mesh, "crash") - crashes
    report = json.loads((crash / "report.json").read_text())
    assert "signal 11" in report["why"]
    assert report["plan"]["items"] == [item]
    assert "Segmentation fault" in (crash / "stacks.txt").read_text()
    (line,) = (crash / "requests.jsonl").read_text().splitlines()
    logged = json.loads(line)
    assert (logged["request_id"], logged["prompt_ids"]) == (item["request_id"], prompt)
    asking.join(120)
    assert answers, "the request was not resumed"
    mesh.wait_healthy()
    done = subprocess.run(
        [*WEFT, "replay", str(crash / "requests.jsonl"), "--address", mesh.grpc_address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 requests: 1 same" in done.stdout
