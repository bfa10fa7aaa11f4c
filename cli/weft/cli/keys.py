"""`weft keys`: the API keys of a gateway's tenants.

A gateway that was started with `--api-keys-file FILE` follows changes by itself. The file holds
digests: a key is shown once, when it is added.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from weft.cli.numbers import MAX_DAYS, whole_number
from weft.cli.tables import print_table
from weft.contract.errors import ConfigError
from weft.gateway.admission.keys import KeyEntry, locked_keys, new_key, read_keys, write_keys

DEFAULT_FILE = "api-keys.json"


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    path: Path = arguments.file
    if arguments.action == "add":
        lifetime = None if arguments.days is None else datetime.timedelta(days=arguments.days)
        key, entry = new_key(
            arguments.tenant,
            arguments.cache_group,
            lifetime,
            manages_adapters=arguments.adapters,
        )
        with locked_keys(path):
            write_keys(path, [*_entries(path), entry])
        sys.stderr.write(f"{path}: added {entry.id} for {entry.tenant}; its only showing:\n")
        sys.stdout.write(f"{key}\n")
    elif arguments.action == "revoke":
        with locked_keys(path):
            write_keys(path, _without(_entries(path), arguments.key))
        sys.stdout.write(f"{path}: revoked {arguments.key}\n")
    elif arguments.hashes:
        for entry in read_keys(path):
            sys.stdout.write(f"{entry.tenant}:{entry.id}:{entry.sha256}\n")
    else:
        _show(read_keys(path))
    return 0


def _entries(path: Path) -> list[KeyEntry]:
    return read_keys(path) if path.exists() else []


def _without(entries: Sequence[KeyEntry], key_id: str) -> list[KeyEntry]:
    left = [entry for entry in entries if entry.id != key_id]
    if len(left) == len(entries):
        raise ConfigError(f"there is no key {key_id}; `weft keys list` shows them")
    return left


def _show(entries: Sequence[KeyEntry]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("key", "tenant", "cache group", "adapters", "created", "expires"):
        table.add_column(name, no_wrap=True)
    for entry in entries:
        dates = [f"{day:%Y-%m-%d}" if day else "never" for day in (entry.created, entry.expires)]
        adapters = "manages" if entry.manages_adapters else ""
        table.add_row(entry.id, entry.tenant, entry.cache_group or "its own", adapters, *dates)
    print_table(Console(), table)


def _parser() -> argparse.ArgumentParser:
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="weft keys", description=first, epilog=rest.strip())
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key and print it")
    add.add_argument("tenant", help="whose it is")
    add.add_argument("--cache-group", default="", help="share cached prefixes within this group")
    add.add_argument(
        "--adapters", action="store_true", help="let its owner load and unload LoRA adapters"
    )
    add.add_argument("--days", type=whole_number(1, MAX_DAYS), help="lifetime; default: no end")
    listing = actions.add_parser("list", help="show keys, without their secrets")
    listing.add_argument(
        "--hashes", action="store_true", help="as the setting `api_key_hashes` takes them"
    )
    revoke = actions.add_parser("revoke", help="forget a key")
    revoke.add_argument("key", metavar="ID", help="as `weft keys list` shows it")
    for action in (add, listing, revoke):
        action.add_argument(
            "--file",
            type=Path,
            default=Path(os.environ.get("WEFT_GATEWAY_API_KEYS_FILE", DEFAULT_FILE)),
            help=f"default $WEFT_GATEWAY_API_KEYS_FILE, else {DEFAULT_FILE}",
        )
    return parser
