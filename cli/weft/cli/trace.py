"""`weft trace ID`: what happened to one request, as a tree with times and sizes; with `--timeline`
as one line of time up to its first token, gaps named.

The spans come from the services themselves, which keep those of recent requests; no collector is
needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from weft.cli.channel import Metadata, add_gateway_flags, call_gateway, open_channel
from weft.cli.tables import print_table
from weft.cli.trace_timeline import first_token_pieces
from weft.cli.trace_tree import SpanNode, build_trees
from weft.common.rpc.tls import Identity
from weft.v1 import trace_pb2, trace_pb2_grpc

_TIMEOUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="weft trace", description=__doc__)
    parser.add_argument(
        "id", help="`id` of the answer (chatcmpl-..., cmpl-...), or a trace id (32 hex digits)"
    )
    add_gateway_flags(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the spans as JSON")
    form.add_argument(
        "--timeline",
        action="store_true",
        help="what the time to the first token consists of, with what lies between processes",
    )
    arguments = parser.parse_args(argv)

    def tell(address: str, identity: Identity | None, metadata: Metadata) -> int:
        return _tell(arguments, asyncio.run(read_spans(address, arguments.id, identity, metadata)))

    return call_gateway("weft trace", arguments, tell)


def _tell(arguments: argparse.Namespace, found: trace_pb2.ListSpansResponse) -> int:
    for silent in found.silent:
        sys.stderr.write(f"{silent.address} does not answer: {silent.problem}\n")
    if not found.spans:
        sys.stderr.write(
            f"weft trace: no spans of {arguments.id}; it is unknown here, too long ago, or the "
            "services run with --no-tracing\n"
        )
        return 1
    if arguments.json:
        spans = [MessageToDict(span, preserving_proto_field_name=True) for span in found.spans]
        sys.stdout.write(json.dumps(spans, indent=2) + "\n")
    elif arguments.timeline:
        show_timeline(Console(), list(found.spans))
    else:
        show(Console(), list(found.spans))
    if not arguments.json:
        for profile in found.profiles:
            sys.stdout.write(f"profiled meanwhile: {profile.path}\n")
    return 0


async def read_spans(
    address: str, wanted: str, identity: Identity | None, metadata: Metadata
) -> trace_pb2.ListSpansResponse:
    """Reads the spans of a request or trace from a gateway and from the services that it uses.
    Raises grpc.aio.AioRpcError if the gateway does not answer.
    """
    async with open_channel(address, "gateway", identity) as channel:
        stub = trace_pb2_grpc.TraceServiceStub(channel)
        request = trace_pb2.ListSpansRequest(id=wanted, fan_out=True)
        answer: trace_pb2.ListSpansResponse = await stub.ListSpans(
            request, timeout=_TIMEOUT_S, metadata=metadata
        )
        return answer


def show(console: Console, spans: Sequence[trace_pb2.Span]) -> None:
    requests = sorted({span.request_id for span in spans if span.request_id}, key=len)
    console.print(
        f"request {requests[0] if requests else '?'}  trace {spans[0].trace_id.hex()}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("span", no_wrap=True)
    table.add_column("service", no_wrap=True)
    table.add_column("after", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("")
    for root in build_trees(spans):
        _add(table, root, "", "")
    print_table(console, table)


def show_timeline(console: Console, spans: Sequence[trace_pb2.Span]) -> None:
    """Prints the pieces of the time to the first token, gaps in yellow, and their sums."""
    for root in build_trees(spans):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("at", justify="right", no_wrap=True)
        table.add_column("took", justify="right", no_wrap=True)
        table.add_column("what", no_wrap=True)
        table.add_column("where", no_wrap=True)
        pieces = first_token_pieces(root)
        for piece in pieces:
            what = f"[yellow]{escape(piece.what)}[/]" if piece.is_gap else escape(piece.what)
            table.add_row(_ms(piece.begin_s), _ms(piece.duration_s), what, escape(piece.where))
        print_table(console, table)
        between_s = sum(piece.duration_s for piece in pieces if piece.is_between)
        within_s = sum(piece.duration_s for piece in pieces if piece.is_gap) - between_s
        console.print(
            f"{_ms(sum(piece.duration_s for piece in pieces))} in all, of which {_ms(between_s)} "
            f"between processes and {_ms(within_s)} between stages of one",
            highlight=False,
            soft_wrap=True,
        )


def _add(table: Table, node: SpanNode, lead: str, below: str) -> None:
    span = node.span
    name = f"[red]{escape(span.name)}[/]" if span.error else escape(span.name)
    after = "" if node.after_s is None else f"{'~' if node.is_shifted else ''}{_ms(node.after_s)}"
    details = Text.from_markup(_details(span))
    # Details are cut on a narrow terminal, except errors.
    details.no_wrap, details.overflow = not span.error, "fold" if span.error else "ellipsis"
    table.add_row(
        f"[dim]{lead}[/]{name}",
        escape(span.instance or span.service),
        after,
        _ms(node.duration_s),
        details,
    )
    for index, child in enumerate(node.children):
        is_last = index == len(node.children) - 1
        _add(
            table,
            child,
            below + ("└ " if is_last else "├ "),
            below + ("  " if is_last else "│ "),
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.2f} s"


def _details(span: trace_pb2.Span) -> str:
    values = dict(span.attributes.items())
    words = [say(values[name]) for name, say in _WORDS.items() if values.get(name)]
    if "weft.pages_asked" in values:
        words.append(f"{values['weft.pages']:.0f} of {values['weft.pages_asked']:.0f} pages held")
    text = escape(", ".join(word for word in words if word))
    return f"[red]{escape(span.error)}[/]{'; ' if text else ''}{text}" if span.error else text


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "B" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


def _counted(what: str) -> Callable[[Any], str]:
    return lambda value: f"{value:,.0f} {what}"


_WORDS: dict[str, Callable[[Any], str]] = {
    "weft.worker_id": str,
    "weft.source": lambda source: "" if source == "prefill" else str(source),
    "weft.transport": str,
    "gen_ai.usage.input_tokens": _counted("prompt tokens"),
    "weft.prompt_tokens": _counted("prompt tokens"),
    "weft.matched_tokens": _counted("matched"),
    "weft.cached_tokens": _counted("cached"),
    "gen_ai.usage.output_tokens": _counted("output tokens"),
    "weft.completion_tokens": _counted("output tokens"),
    "weft.tokens": _counted("tokens"),
    "weft.bytes": _size,
    "weft.steps": _counted("steps"),
    "weft.preemptions": _counted("pre-emptions"),
    "weft.drafted_tokens": _counted("drafted"),
    "weft.accepted_tokens": _counted("accepted"),
    "weft.tree_steps": _counted("tree steps"),
    "weft.sample": lambda sample: f"sample {sample:.0f}",
    "weft.finish_reason": str,
}
"""Attributes to show, in this order, with their formats."""
