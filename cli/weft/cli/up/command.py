"""`weft up`: a mesh on this machine, watched over until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import indent
from typing import IO, cast

import grpc
from rich.console import Console
from rich.markup import escape
from weft.cli.channel import cli_identity, explain
from weft.cli.operators import Operators, find_services
from weft.cli.output import SteadyOutput, finish_output
from weft.cli.rest_binary import find_rest_binary
from weft.cli.up.checks import check_workers
from weft.cli.up.console import ConsoleReporter
from weft.cli.up.devices import with_devices, with_gateways
from weft.cli.up.elastic import ElasticWorkers, drainer
from weft.cli.up.exits import report_exit
from weft.cli.up.flags import check_flags
from weft.cli.up.liveness import health_checker
from weft.cli.up.mesh import run_mesh
from weft.cli.up.orders import serving
from weft.cli.up.plan import FirstTask, MeshPlan, ModelFolder, plan_mesh
from weft.cli.up.ports import check_free
from weft.cli.up.process import ExitedEarly
from weft.cli.up.readiness import wait_for_mesh, wait_for_workers
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder, locked_state_folder
from weft.cli.up.summary import keep_summary
from weft.cli.up.supervisor import Supervisor
from weft.common.admin import read_token
from weft.common.settings import load_settings, require_paths
from weft.contract.cores import num_cores
from weft.contract.errors import AdapterError, ConfigError
from weft.engine.base.gpus import num_usable_gpus
from weft.engine.base.triton_compiler import ensure_triton_compiles
from weft.gateway.admission.keys import read_keys
from weft.v1 import gateway_pb2, gateway_pb2_grpc

_TAIL_LINES = 25
_ADAPTER_TIMEOUT_S = 600.0


def main(argv: Sequence[str]) -> int:
    settings = load_settings(UpSettings, argv)
    require_paths(settings)
    check_flags(settings)
    console = Console(file=cast("IO[str]", SteadyOutput()))
    try:
        _check_platform()
        # Read here so that a file that is missing is named before services start.
        cli_identity(settings.tls_dir)
        if settings.api_keys_file is not None:
            read_keys(settings.api_keys_file)
        _check_grpc_ports(settings, 0)
        with locked_state_folder(settings.state_folder()) as state:
            return _run(settings, state, console)
    finally:
        finish_output()


def _check_grpc_ports(settings: UpSettings, first: int) -> None:
    for index in range(first, settings.num_gateways):
        check_free(settings.host, settings.grpc_port + index, "--grpc-port")


def _run(settings: UpSettings, state: StateFolder, console: Console) -> int:
    reporter = ConsoleReporter(console, is_plain=settings.plain)
    settings = with_devices(settings, num_usable_gpus(), reporter.notice)
    if settings.gateways == "auto":
        settings = with_gateways(settings, num_cores())
        _check_grpc_ports(settings, 1)
    if any(device.startswith("cuda") for device in settings.device):
        ensure_triton_compiles()
    rest_binary = _rest_binary(settings, reporter)
    models = _models(settings, console)
    _tell_kv_dtype(settings, models, reporter)
    plan = plan_mesh(settings, state, models, rest_binary)
    check_workers(plan.services)
    try:
        with reporter.live():
            asyncio.run(_serve(settings, state, plan, reporter))
    except ExitedEarly as error:
        _show_failure(console, error, state.logs / f"{error.name}.log")
        return 1
    except TimeoutError as error:
        sys.stderr.write(f"weft up: {error}; the services' logs are in {state.logs}\n")
        return 1
    return 0


async def _serve(
    settings: UpSettings, state: StateFolder, plan: MeshPlan, reporter: ConsoleReporter
) -> None:
    identity = cli_identity(settings.tls_dir)

    async def tell_workers(worker_id: str, epoch: int) -> None:
        others = {name: at for name, at in plan.worker_addresses.items() if name != worker_id}
        released = await report_exit(others, worker_id, epoch, identity)
        if pages := sum(released.values()):
            reporter.notice(f"{pages} pages that {worker_id} was filling are free again")

    async def wait_ready() -> None:
        if settings.adapter:
            # Gateways are ready once these are loaded.
            first = next(iter(plan.gateways))
            await wait_for_workers(plan.gateways[first], settings.ready_timeout_s, identity)
            operators = Operators(
                find_services(state, [first]), read_token(state.admin_token), identity
            )
            await _load_adapters(settings, operators, reporter.notice)
        edges = plan.rest_edges.values() or [None] * len(plan.gateways)
        for gateway, edge in zip(plan.gateways.values(), edges, strict=True):
            url = None if edge is None else f"{plan.rest_scheme}://{edge}"
            await wait_for_mesh(gateway, url, settings.ready_timeout_s, identity, reporter.notice)

    is_up = asyncio.Event()

    elastic: ElasticWorkers | None = None
    if plan.workers_file is not None:
        drain = drainer(settings.drain_grace_s, identity)
        elastic = ElasticWorkers(
            plan.workers, plan.workers_file, plan.worker_addresses, drain, settings.drain_grace_s
        )

    def on_ready(supervisor: Supervisor) -> None:
        reporter.banner(plan, state.logs)
        if elastic is not None:
            elastic.begin(supervisor)
        is_up.set()

    async def summarise() -> None:
        await is_up.wait()
        if reporter.is_live:
            first = next(iter(plan.gateways))
            await keep_summary(state, first, identity, reporter.summarise)

    summary = asyncio.create_task(summarise())
    try:
        async with contextlib.AsyncExitStack() as stack:
            if elastic is not None:
                token = read_token(state.admin_token)
                address = await stack.enter_async_context(serving(elastic, token, identity))
                stack.enter_context(state.supervised_at(address))
            await run_mesh(
                plan.services,
                reporter,
                tell_workers,
                wait_ready,
                on_ready,
                settings.ready_grace_s + settings.drain_grace_s,
                is_alive=health_checker(identity),
                stall_timeout_s=settings.stall_timeout_s,
                max_restart_delay_s=settings.max_restart_delay_s,
                ready_timeout_s=settings.ready_timeout_s,
            )
    finally:
        summary.cancel()
        await asyncio.gather(summary, return_exceptions=True)


async def _load_adapters(
    settings: UpSettings, operators: Operators, tell: Callable[[str], None]
) -> None:
    """Adapters that are registered already stay as they are."""
    (address,) = operators.addresses.values()
    async with operators.open_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for text in settings.adapter:
            model, name, path = settings.parse_adapter(text)
            request = gateway_pb2.LoadAdapterRequest(
                name=name, path=path, model=model, replace=True
            )
            try:
                await stub.LoadAdapter(
                    request, timeout=_ADAPTER_TIMEOUT_S, metadata=operators.metadata
                )
            except grpc.aio.AioRpcError as error:
                raise AdapterError(f"--adapter {text}: {explain(error, address)}") from error
            tell(f"adapter {name} is loaded from {path}")


def _check_platform() -> None:
    if not hasattr(os, "pidfd_open"):
        raise ConfigError(
            "weft up watches its processes through pidfds, which this system lacks (Linux 5.3 or "
            "later has them); start the services one by one with `weft serve`"
        )


def _rest_binary(settings: UpSettings, reporter: ConsoleReporter) -> Path | None:
    if not settings.rest:
        return None
    binary = find_rest_binary()
    if binary is None:
        reporter.notice(
            "REST is off: there is no weft-rest; in a checkout `make rest` builds it (needs Go)"
        )
    else:
        for index in range(settings.num_gateways):
            check_free(settings.host, settings.rest_port + index, "--rest-port")
    return binary


def _models(settings: UpSettings, console: Console) -> list[ModelFolder]:
    # Imported here, so that `weft up --help` is quick.
    from weft.checkpoint.config import ModelConfig
    from weft.checkpoint.kv_formats import why_not_8_bits
    from weft.checkpoint.pooling import load_pooling
    from weft.checkpoint.resolve import default_name, resolve_model
    from weft.checkpoint.whisper_config import WhisperConfig
    from weft.cli.model import progress_bar

    models: list[ModelFolder] = []
    for number, model in enumerate(settings.model):
        with progress_bar(console, "converting the demo model") as progress:
            path = resolve_model(model, progress)
        config = ModelConfig.load(path)
        given = settings.model_name[number] if number < len(settings.model_name) else ""
        task: FirstTask = load_pooling(path, settings.task).task
        if isinstance(config, WhisperConfig):
            task = "transcribe"
        name = given or default_name(model, path)
        models.append(ModelFolder(name, path, task, why_not_8_bits(config), config.has_windows))
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"each model needs a name of its own, and these are {', '.join(names)}; give "
            "--model-name for each"
        )
    return models


def _tell_kv_dtype(
    settings: UpSettings, models: Sequence[ModelFolder], reporter: ConsoleReporter
) -> None:
    without = [f"{model.name} ({model.no_8_bits})" for model in models if model.no_8_bits]
    if settings.kv_dtype == "auto" or not without:
        return
    told = f"--kv-dtype {settings.kv_dtype} is not for {', '.join(without)}"
    if len(without) == len(models):
        raise ConfigError(f"{told}; leave the flag out")
    reporter.notice(told)


def _show_failure(console: Console, error: ExitedEarly, log: Path) -> None:
    try:
        tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        tail = []
    head = f"[bold red]{escape(str(error))}[/]; the end of {escape(str(log))}:"
    console.print(head, highlight=False, soft_wrap=True)
    for line in tail:
        console.print(indent(_readable(line), "  "), markup=False, highlight=False, soft_wrap=True)


def _readable(line: str) -> str:
    """A line of a service's log for a person: of JSON the time, level, message and traceback."""
    try:
        entry = json.loads(line)
        told = f"{entry['time']} {entry['level']} {entry['message']}"
    except (ValueError, KeyError, TypeError):
        return line
    return "\n".join([told, *str(entry.get("exception", "")).splitlines()])
