"""`weft chaos`: injects faults, drawn from a seed, into a mesh on this machine under load, and
checks invariants.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table
from weft.chaos.mesh import MeshNotReady
from weft.chaos.report import show, write
from weft.chaos.run import ChaosPlan, ChaosResult, run_chaos
from weft.chaos.sabotage.classes import SABOTAGES
from weft.chaos.schedule import RANK_TIMEOUT_S
from weft.chaos.tiny import TINY_NAME, make_tiny_model
from weft.cli.numbers import number, whole_number
from weft.cli.up.ports import free_run
from weft.cli.up.process import ExitedEarly
from weft.cli.up.settings import UpSettings
from weft.contract.errors import WeftError
from weft.contract.settings import TransportName

# Stalled fills are given up soon and pages are few, so that the effects of faults overlap.
_FILLS = "--lease-s 4 --renew-interval-s 1 --fill-progress-timeout-s 1.5 --poison-free-pages"
_WORKERS = f"--max-step-tokens 256 --max-running-requests 32 {_FILLS}"
_TINY_WORKERS = f"--num-pages 160 --prefill-chunk-tokens 64 --num-threads 1 {_WORKERS}"
_DEMO_WORKERS = f"--num-pages 200 --prefill-chunk-tokens 64 {_WORKERS}"
_RANKS = f" --rank-timeout-s {RANK_TIMEOUT_S:g}"

ALL = "all"
_MOST = 100_000


def main(argv: Sequence[str]) -> int:
    """Runs `weft chaos`; returns 0 when all invariants held, 1 when one did not, 2 when the run
    itself failed.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.images and arguments.model == TINY_NAME:
        parser.error("--images needs a model that takes some: add --model")
    if arguments.only == "ranks" and arguments.tp == 1:
        parser.error("--only ranks needs workers of several ranks: add --tp 2")
    if arguments.only == "ranks" and arguments.sabotage is not None:
        parser.error("--only ranks and --sabotage exclude each other")
    console = Console()
    if arguments.sabotage == ALL:
        return _sabotage_all(argv, console)
    plan = _plan(arguments)
    # SIGTERM ends the mesh like Ctrl-C, so that no process outlives the run.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        if arguments.json is not None:  # Fails before the run if the report cannot be written.
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.open("a").close()
        with tempfile.TemporaryDirectory(prefix="weft-chaos-") as folder:
            state = arguments.state_dir or Path(folder) / "state"
            result = _run(arguments, plan, Path(folder), state, console)
    except (WeftError, ExitedEarly, MeshNotReady, TimeoutError, OSError) as error:
        sys.stderr.write(f"weft chaos: {error}\n")
        return 2
    show(console, plan, result)
    if arguments.json is not None:
        write(arguments.json, plan, result, shlex.join(["weft", "chaos", *argv]))
    return int(bool(result.red))


def _sabotage_all(argv: Sequence[str], console: Console) -> int:
    is_noticed: dict[str, bool] = {}
    for name, sabotage in SABOTAGES.items():
        arguments = _parser().parse_args([*argv, "--sabotage", name])
        plan = _plan(arguments)
        console.rule(f"{name}: {sabotage.what}")
        with tempfile.TemporaryDirectory(prefix="weft-chaos-") as folder:
            try:
                result = _run(arguments, plan, Path(folder), Path(folder) / "state", console)
            except (WeftError, ExitedEarly, MeshNotReady, TimeoutError) as error:
                sys.stderr.write(f"weft chaos: {error}\n")
                return 2
        show(console, plan, result)
        is_noticed[name] = sabotage.invariant in result.red
    table = Table(box=None, pad_edge=False)
    for column in ("sabotage", "invariant", ""):
        table.add_column(column)
    for name, noticed in is_noticed.items():
        state = "[green]noticed[/]" if noticed else "[red]NOT NOTICED[/]"
        table.add_row(name, str(SABOTAGES[name].invariant), state)
    console.print(table)
    return int(not all(is_noticed.values()))


def _run(
    arguments: argparse.Namespace, plan: ChaosPlan, folder: Path, state: Path, console: Console
) -> ChaosResult:
    has_experts = arguments.attention_dp > 1
    model_dir, model_name = _model(arguments.model, folder, plan.seed, has_experts=has_experts)
    settings = mesh_settings(
        state,
        is_tiny=arguments.model == TINY_NAME,
        transport=arguments.transport,
        gateways=arguments.gateways,
        workers=arguments.workers,
        stores=arguments.kvstore,
        draft_dir=arguments.draft_dir,
        device=arguments.device,
        tp=arguments.tp,
        attention_dp=arguments.attention_dp,
    )

    def tell(line: str) -> None:
        if not arguments.quiet:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return asyncio.run(run_chaos(plan, settings, model_dir, model_name, tell))


def mesh_settings(
    state: Path,
    *,
    is_tiny: bool,
    transport: str = "auto",
    gateways: int = 1,
    workers: int = 2,
    stores: int = 2,
    draft_dir: Path | None = None,
    device: Sequence[str] = ("cpu",),
    tp: int = 1,
    attention_dp: int = 1,
) -> UpSettings:
    """Settings of a mesh in which faults have many effects: few pages, short leases, and every
    prompt shipped. `workers` is the number of prefill workers, and of decode workers. Without
    `draft_dir`, an EAGLE-3 head's, drafts come from the text so far.
    """
    flags = _TINY_WORKERS if is_tiny else _DEMO_WORKERS
    if tp * attention_dp > 1:
        flags += _RANKS
    return UpSettings.model_validate(
        {
            "prefill": workers,
            "decode": workers,
            "gateways": gateways,
            "kvstore": stores,
            "dtype": "float32",
            "tp": tp,
            "attention_dp": attention_dp,
            "device": list(device),
            "rest": False,
            "grpc_port": free_run("127.0.0.1", gateways),
            "state_dir": state,
            "local_prefill_max_tokens": 0,
            "kvstore_memory_bytes": (8 if is_tiny else 64) << 20,
            "transport": transport,
            "drain_grace_s": 0.5,
            "enable_faults": True,
            "draft_dir": draft_dir,
            "drafter": "eagle3" if draft_dir else "ngram",
            "prefill_args": flags,
            "decode_args": flags,
            "kvstore_args": "--put-timeout-s 2 --put-data-timeout-s 3",
        }
    )


def _model(name: str, folder: Path, seed: int, *, has_experts: bool) -> tuple[Path, str]:
    if name == TINY_NAME:
        return make_tiny_model(folder / TINY_NAME, seed, has_experts=has_experts), TINY_NAME
    # Imported here, so that `--help` is quick.
    from weft.checkpoint.resolve import resolve_model

    path = resolve_model(name)
    return path, path.name


def _plan(arguments: argparse.Namespace) -> ChaosPlan:
    is_tiny = arguments.model == TINY_NAME
    num_faults = arguments.faults
    if num_faults is None and arguments.minutes is None:
        num_faults = 20
    return ChaosPlan(
        seed=arguments.seed,
        num_faults=num_faults,
        minutes=arguments.minutes,
        num_clients=arguments.clients,
        max_prompt_tokens=500 if is_tiny else 300,
        max_new_tokens=80 if is_tiny else 32,
        sabotage=arguments.sabotage,
        only=arguments.only,
        num_ranks=arguments.tp,
        num_together=arguments.attention_dp,
        checks_hit_rate=arguments.hit_rate,
        has_images=arguments.images,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft chaos",
        description="Starts a mesh of its own on this machine, makes services and links fail by "
        "chance while clients ask, and checks what must hold (docs/operations.md). The exit "
        "status is 0 when it did, 1 when not.",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    parser.add_argument(
        "--faults", type=whole_number(1, _MOST), metavar="K", help="end after K faults (default 20)"
    )
    parser.add_argument(
        "--minutes", type=number(0.1, _MOST), metavar="M", help="end after M minutes"
    )
    parser.add_argument(
        "--model", default=TINY_NAME, help="tiny (random, the default), demo, or a directory"
    )
    parser.add_argument(
        "--device",
        type=lambda text: text.split(","),
        default=["cpu"],
        metavar="A,B,...",
        help="of the workers, as of `weft up` (default cpu)",
    )
    parser.add_argument(
        "--tp", type=whole_number(1, 64), default=1, help="ranks of each worker (default 1)"
    )
    parser.add_argument(
        "--attention-dp",
        type=whole_number(1, 64),
        default=1,
        help="workers that share the experts of a model (default 1); --workers is a multiple",
    )
    parser.add_argument(
        "--transport", choices=get_args(TransportName), default="auto", help="how pages travel"
    )
    parser.add_argument(
        "--gateways", type=whole_number(1, 64), default=2, help="gateways (default 2)"
    )
    parser.add_argument(
        "--workers",
        type=whole_number(1, 64),
        default=2,
        help="prefill and decode workers, each (default 2)",
    )
    parser.add_argument(
        "--kvstore", type=whole_number(0, 64), default=2, help="KV stores (default 2)"
    )
    parser.add_argument(
        "--draft-dir",
        type=Path,
        metavar="DIR",
        help="EAGLE-3 head that drafts; without one drafts come from the text so far",
    )
    parser.add_argument(
        "--clients", type=whole_number(1, 1000), default=6, help="that ask at once (default 6)"
    )
    parser.add_argument(
        "--sabotage",
        choices=[*sorted(SABOTAGES), ALL],
        metavar="NAME",
        help="break an invariant on purpose, so that the run must fail: "
        + "; ".join(f"{name}: {each.what}" for name, each in sorted(SABOTAGES.items()))
        + f"; {ALL}: one after the other, and the exit status is 0 when each was noticed",
    )
    parser.add_argument(
        "--only",
        choices=("transfer", "ranks"),
        help="disturb the hand-over of pages alone: workers, stores and the links between them; or "
        "kill and stop single ranks of workers (with --tp)",
    )
    parser.add_argument(
        "--images", action="store_true", help="half of the requests have an image (with --model)"
    )
    parser.add_argument(
        "--hit-rate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check the hit rate after a gateway's restart",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as well")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="for logs; default: kept for the run only"
    )
    parser.add_argument("--quiet", action="store_true", help="print the report only")
    return parser
