"""Tables of commands in pipes and files."""

from __future__ import annotations

import io

from rich.console import Console
from weft.cli import adapter, trace
from weft.v1 import common_pb2, gateway_pb2, trace_pb2


def test_tables_are_whole_in_pipes() -> None:
    out = io.StringIO()
    path, worker = "folder/" * 20, "decode-" + "w" * 90
    adapter.show(
        Console(file=out, width=80),
        [
            gateway_pb2.RegisteredAdapter(
                adapter=common_pb2.AdapterRef(name="a" * 60),
                path=path,
                holders=[gateway_pb2.AdapterHolder(worker_id=worker)],
            )
        ],
    )
    (line,) = out.getvalue().splitlines()[1:]
    assert all(part in line for part in ("a" * 60, path, worker))


def test_traces_are_whole_in_pipes() -> None:
    span = trace_pb2.Span(name="s" * 70, service="x" * 70, trace_id=b"t" * 16, span_id=b"s" * 8)
    for show in (trace.show, trace.show_timeline):
        out = io.StringIO()
        show(Console(file=out, width=80), [span])
        assert "…" not in out.getvalue()
    out = io.StringIO()
    trace.show(Console(file=out, width=80), [span])
    assert any("s" * 70 in line and "x" * 70 in line for line in out.getvalue().splitlines())
