"""`weft serve SERVICE`: one service in this process."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from weft.cli.rest_binary import find_rest_binary
from weft.contract.startup import no_collections

MODULES = {
    "gateway": "weft.gateway.main",
    "prefill": "weft.prefill.main",
    "decode": "weft.decode.main",
    "kvstore": "weft.kvstore.main",
    "planner": "weft.planner.main",
}


def main(argv: Sequence[str]) -> int:
    names = ", ".join([*MODULES, "rest"])
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: weft serve SERVICE [flags]\n\nSERVICE is one of {names}.\n")
        return 0 if argv else 2
    service, flags = argv[0], list(argv[1:])
    if service == "rest":
        return _become_rest(flags)
    if service not in MODULES:
        sys.stderr.write(f"weft serve: no service {service!r}; there are {names}\n")
        return 2
    with no_collections():
        run: Callable[[Sequence[str]], int] = importlib.import_module(MODULES[service]).main
    return run(flags)


def _become_rest(flags: Sequence[str]) -> int:
    binary = find_rest_binary()
    if binary is None:
        sys.stderr.write("weft serve: the REST edge is not built; run `make rest` (it needs Go)\n")
        return 1
    os.execv(binary, [str(binary), *flags])
