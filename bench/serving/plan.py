"""Chooses the systems that take part, and their sections."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from weft.pages.transfer.nixl import nixl_available

from serving.answers import Streaming, System
from serving.first_token import FirstToken
from serving.flush import find_flush
from serving.grpc_client import GrpcClient
from serving.llama import Llama, find_gguf
from serving.load import LoadSystem
from serving.mesh import MeshError, MeshProcess
from serving.rest_client import RestClient
from serving.sections import (
    FAILURES,
    GRPC,
    REST,
    Mixed,
    PromptSpeed,
    Section,
    Throughput,
)
from serving.series import Ledger
from serving.shipping import Shipping
from serving.systems import EngineSystem, TransformersSystem
from serving.workload import Prompts

STORE_BYTES = 64 << 20
UP_FLAGS = (
    f"--local-prefill-max-tokens 128 --kvstore 1 --kvstore-args '--memory-bytes {STORE_BYTES}'"
)
"""Short prompts run where they are decoded, long ones are shipped; computed pages are kept. The
store is so small that the warm-up fills it: the first use of memory costs much processor time in a
virtual machine, and a store that has run for long uses none for the first time.
"""
MIXED_STREAMS, MIXED_TOKENS, MIXED_ARRIVING, MIXED_INTERVAL_S = 4, 320, 3, 0.9
CHUNK_MIB = 48
DEFAULT_PAGE_BYTES = 360 << 10

T = TypeVar("T")


@dataclass(slots=True)
class Systems:
    """The systems that could be started."""

    rest: LoadSystem | None = None
    grpc: LoadSystem | None = None
    engine: EngineSystem | None = None
    transformers: TransformersSystem | None = None
    mesh_flags: str = ""
    flush_workers: Callable[[], None] | None = None
    """Empties the caches of prefill and decode workers once the store has what they computed."""
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def all(self) -> list[System]:
        """The systems that generate, in the order of the table."""
        every = (self.rest, self.grpc, self.engine, self.transformers)
        return [system for system in every if system is not None]


def open_systems(
    stack: ExitStack,
    arguments: argparse.Namespace,
    model_dir: Path,
    dtype: str,
    runner: asyncio.Runner,
) -> Systems:
    """Starts and loads what was asked for; what fails is noted.

    Args:
        stack: Closes them.
        arguments: Flags of the benchmark.
        model_dir: Hugging Face directory.
        dtype: Resolved.
        runner: Event loop of the clients.
    """
    systems = Systems()
    process: MeshProcess | None = None
    wants_mesh = {"rest", "grpc"} & set(arguments.systems)
    if wants_mesh and not (arguments.url or arguments.address):
        systems.mesh_flags = UP_FLAGS if arguments.up_flags is None else arguments.up_flags
        process = MeshProcess(str(model_dir), dtype, systems.mesh_flags)
        stack.callback(process.stop)
    elif wants_mesh:
        systems.mesh_flags = "is not known: it ran already"
    # While the mesh starts, the others load.
    if "transformers" in arguments.systems:
        systems.transformers = _start(
            systems,
            "transformers",
            lambda: TransformersSystem(model_dir, dtype, arguments.threads),
        )
    if "engine" in arguments.systems:
        systems.engine = _start(
            systems, "engine", lambda: EngineSystem(model_dir, dtype, arguments.threads)
        )
    for system in (systems.transformers, systems.engine):
        if system is not None:
            stack.callback(system.close)
    if wants_mesh:
        _open_mesh(stack, systems, arguments, process, runner)
    return systems


def _open_mesh(
    stack: ExitStack,
    systems: Systems,
    arguments: argparse.Namespace,
    process: MeshProcess | None,
    runner: asyncio.Runner,
) -> None:
    url, address = arguments.url, arguments.address
    if process is not None:
        try:
            process.wait_until_ready()
        except MeshError as error:
            systems.failures.append(f"the mesh did not start: {error}")
            systems.notes.append(systems.failures[-1])
            return
        url, address = process.url, process.grpc_address
        systems.flush_workers = find_flush(process.state)
    if "rest" in arguments.systems and url:
        client = _start(systems, REST, lambda: RestClient(url))
        systems.rest = LoadSystem(REST, client, runner) if client else None
    if "grpc" in arguments.systems and address:
        typed = _start(systems, GRPC, lambda: GrpcClient(address, runner))
        if typed is not None:
            stack.callback(typed.close)
            systems.grpc = LoadSystem(GRPC, typed, runner)


def _start(systems: Systems, name: str, action: Callable[[], T]) -> T | None:
    try:
        return action()
    except FAILURES as error:
        systems.failures.append(f"{name} did not start: {type(error).__name__}: {error}")
        systems.notes.append(systems.failures[-1])
        return None


def build_sections(
    ledger: Ledger, systems: Systems, prompts: Prompts, arguments: argparse.Namespace
) -> Sequence[Section]:
    """The sections that were asked for and have a system to run on."""
    parts: list[Section] = []
    rows = arguments.rows
    if "throughput" in rows and systems.all():
        parts.append(
            Throughput(
                ledger,
                systems.all(),
                prompts,
                arguments.streams,
                arguments.tokens,
                arguments.single,
            )
        )
    if "prompts" in rows and (systems.engine or systems.grpc or systems.transformers):
        parts.append(
            PromptSpeed(
                ledger,
                prompts,
                arguments.prompt_tokens,
                systems.engine,
                systems.grpc,
                systems.transformers,
            )
        )
    if arguments.llama_bench:
        parts.append(_llama(ledger, arguments))
    streaming: list[Streaming] = [s for s in (systems.rest, systems.engine) if s is not None]
    if "mixed" in rows and streaming:
        parts.append(
            Mixed(
                ledger,
                streaming,
                prompts,
                MIXED_STREAMS,
                MIXED_TOKENS,
                MIXED_ARRIVING,
                arguments.long_tokens,
                MIXED_INTERVAL_S,
            )
        )
    if "first-token" in rows and systems.grpc:
        num_prompts = 1 if arguments.quick else 2
        parts.append(
            FirstToken(
                ledger,
                systems.grpc,
                prompts,
                arguments.long_tokens,
                num_prompts,
                systems.flush_workers,
            )
        )
        if systems.flush_workers is None:
            systems.notes.append("No store hits: this mesh has no KV store or cannot be flushed.")
    has_nixl, reason = nixl_available()
    if "shipping" in rows and not has_nixl:
        systems.notes.append(f"No shipping: {reason}.")
    elif "shipping" in rows:
        page_bytes = systems.engine.page_bytes if systems.engine else DEFAULT_PAGE_BYTES
        parts.append(Shipping(ledger, page_bytes, CHUNK_MIB))
    return parts


def _llama(ledger: Ledger, arguments: argparse.Namespace) -> Llama:
    gguf = arguments.gguf or find_gguf()
    if gguf is None:
        raise SystemExit("--llama-bench: no GGUF found; name one with --gguf")
    rows = arguments.rows
    return Llama(
        ledger,
        arguments.llama_bench,
        gguf,
        arguments.streams if "throughput" in rows else [],
        arguments.prompt_tokens if "prompts" in rows else [],
        arguments.tokens,
        arguments.threads,
    )
