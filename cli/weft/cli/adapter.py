"""`weft adapter`: the LoRA adapters of a mesh.

Adapters lie in the folder that the gateway and its workers were started with (`--adapter-root`).
Where the gateway asks for API keys, $WEFT_API_KEY must be one that `weft keys add TENANT
--adapters` made; or ask the operators' port, with --admin-address and --token-file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from weft.cli.channel import (
    Metadata,
    add_gateway_flags,
    api_key_metadata,
    call_gateway,
    open_blocking_channel,
)
from weft.cli.numbers import MAX_SECONDS, number
from weft.cli.tables import print_table
from weft.common.rpc.tls import Identity
from weft.contract.codec.walk import duration, enum_names
from weft.v1 import gateway_pb2, gateway_pb2_grpc

_LIST_TIMEOUT_S = 10.0
_GRACE_S = 5.0
"""Seconds by which the call outlasts the gateway's own time limit, so that the gateway's error
arrives.
"""
_STATES = enum_names(gateway_pb2.RegistryState.DESCRIPTOR)


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)

    def act(address: str, identity: Identity | None, metadata: Metadata) -> int:
        with open_blocking_channel(address, "gateway", identity) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            _ACTIONS[arguments.action](stub, arguments, metadata or api_key_metadata())
        return 0

    return call_gateway("weft adapter", arguments, act)


def _load(
    stub: gateway_pb2_grpc.GatewayServiceStub, arguments: argparse.Namespace, metadata: Metadata
) -> None:
    request = gateway_pb2.LoadAdapterRequest(
        name=arguments.name,
        path=arguments.path,
        model=arguments.model,
        replace=arguments.replace,
        pinned=arguments.pin,
        lenient=arguments.lenient,
        timeout=duration(arguments.timeout),
    )
    answer = stub.LoadAdapter(request, timeout=arguments.timeout + _GRACE_S, metadata=metadata)
    adapter = answer.adapter
    workers = ", ".join(f"{one.worker_id} ({one.state})" for one in adapter.holders)
    sys.stdout.write(f"{adapter.adapter.name}: serving on {workers}\n")
    for name in sorted({name for one in adapter.holders for name in one.left_out}):
        sys.stdout.write(f"left out: {name}\n")


def _unload(
    stub: gateway_pb2_grpc.GatewayServiceStub, arguments: argparse.Namespace, metadata: Metadata
) -> None:
    request = gateway_pb2.UnloadAdapterRequest(
        name=arguments.name, timeout=duration(arguments.timeout)
    )
    stub.UnloadAdapter(request, timeout=arguments.timeout + _GRACE_S, metadata=metadata)
    sys.stdout.write(f"{arguments.name}: unloaded\n")


def _list(
    stub: gateway_pb2_grpc.GatewayServiceStub, arguments: argparse.Namespace, metadata: Metadata
) -> None:
    answer = stub.ListAdapters(
        gateway_pb2.ListAdaptersRequest(), timeout=_LIST_TIMEOUT_S, metadata=metadata
    )
    if arguments.json:
        listed = MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for shown, adapter in zip(listed["adapters"], answer.adapters, strict=True):
            shown["adapter"]["digest"] = adapter.adapter.digest.hex()
            shown["state"] = _STATES[adapter.state] or "?"
        sys.stdout.write(json.dumps(listed, indent=2) + "\n")
        return
    show(Console(), answer.adapters)


def show(console: Console, adapters: Sequence[gateway_pb2.RegisteredAdapter]) -> None:
    if not adapters:
        console.print("no adapters; `weft adapter load NAME PATH` loads one", style="dim")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("adapter", "model", "state", "content", "folder", "workers"):
        table.add_column(name, no_wrap=name in ("adapter", "state", "content"))
    for one in adapters:
        workers = ", ".join(f"{holder.worker_id} {holder.state}" for holder in one.holders)
        name = escape(one.adapter.name) + (" [dim](pinned)[/dim]" if one.pinned else "")
        content = one.adapter.digest.hex()[:12]
        state = _STATES[one.state] or "?"
        table.add_row(name, escape(one.parent), state, content, escape(one.path), escape(workers))
    print_table(console, table)
    for one in adapters:
        for holder in one.holders:
            if holder.error:
                line = f"{one.adapter.name} on {holder.worker_id}: {holder.error}"
                console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="weft adapter", description=first, epilog=rest.strip())
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    load = actions.add_parser("load", help="load an adapter on all workers")
    load.add_argument("name", help="what requests will call it, as their `model`")
    load.add_argument("path", help="folder of a PEFT adapter, relative to the adapter root")
    load.add_argument("--model", default="", help="base model, where there are several")
    load.add_argument(
        "--replace", action="store_true", help="the name may mean other content already"
    )
    load.add_argument("--pin", action="store_true", help="keep it on the device of each worker")
    load.add_argument(
        "--lenient", action="store_true", help="leave out what of it cannot be applied"
    )
    unload = actions.add_parser("unload", help="take an adapter away; its requests may end")
    unload.add_argument("name")
    listing = actions.add_parser("list", help="show adapters, and who holds them")
    listing.add_argument("--json", action="store_true", help="everything there is, as JSON")
    for action in (load, unload, listing):
        add_gateway_flags(action)
    for action in (load, unload):
        action.add_argument(
            "--timeout",
            type=number(0, MAX_SECONDS),
            default=120.0,
            metavar="S",
            help="for the workers to load it, or for its requests to end (default 120)",
        )
    return parser


_ACTIONS = {"load": _load, "unload": _unload, "list": _list}
