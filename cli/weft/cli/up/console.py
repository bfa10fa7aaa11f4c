"""The terminal output of `weft up`."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from weft.cli.up.plan import BACK, MeshPlan
from weft.engine.base.tasks import Task


class ConsoleReporter:
    """Shows services coming up, on a terminal as a live list, and later events as lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begin_s = time.monotonic()

    @contextlib.contextmanager
    def coming_up(self) -> Iterator[None]:
        """Live until the mesh is ready or failed; the banner ends it early."""
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[state]}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._progress.start()
        try:
            yield
        finally:
            self._finish()

    def _finish(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def starting(self, name: str) -> None:
        """See `Reporter`."""
        if self._progress is not None and name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None, state="starting")

    def loading(self, name: str, done: int, total: int, what: str) -> None:
        """See `Reporter`."""
        if self._progress is not None:
            self._progress.update(self._tasks[name], completed=done, total=total, state=what)

    def ready(self, name: str, seconds: float) -> None:
        """See `Reporter`."""
        if self._progress is not None:
            self._progress.update(self._tasks[name], completed=1, total=1, state="[green]ready")
        else:
            self._line(f"{name} is ready after {seconds:.1f} s")

    def died(self, name: str, how: str) -> None:
        """See `Reporter`."""
        self._line(f"[red]{name} {escape(how)}")

    def stalled(self, name: str, seconds: float) -> None:
        """See `Reporter`."""
        self._line(f"[red]{name} has stood still for {seconds:g} s and is killed")

    def restarting(self, name: str, delay_s: float) -> None:
        """See `Reporter`."""
        self._line(f"{name} starts again in {delay_s:.1f} s")

    def killed(self, name: str) -> None:
        """See `Reporter`."""
        self._line(f"[yellow]{name} did not stop in time and was killed")

    def notice(self, text: str) -> None:
        """Shows a notice that is not a failure."""
        self._line(f"[yellow]{escape(text)}")

    def _line(self, text: str) -> None:
        stamp = f"[dim]{time.strftime('%H:%M:%S')}[/]"
        self._console.print(f"{stamp} {text}", highlight=False, soft_wrap=True)

    def banner(self, plan: MeshPlan, logs: Path) -> None:
        """Shows that the mesh is ready, with its addresses and a first request."""
        self._finish()
        seconds = time.monotonic() - self._begin_s
        workers = [service.name for service in plan.services if service.stop_phase == BACK]
        rows = [
            ("gRPC", ", ".join(plan.gateways.values())),
            ("models" if plan.model_names[1:] else "model", ", ".join(plan.model_names)),
            ("workers", ", ".join(workers)),
            ("logs", str(logs)),
        ]
        if plan.rest_address is not None:
            edges = [f"{plan.rest_scheme}://{at}/v1" for at in plan.rest_edges.values()]
            rows.insert(0, ("REST", ", ".join(edges)))
        self._console.print(
            f"\n[bold green]Weft is ready[/] after {seconds:.1f} s", highlight=False
        )
        for name, value in rows:
            self._plain(f"  {name:<8} {value}")
        self._plain("\nTry it:\n")
        self._plain(first_request(plan) + "\n")
        self._plain("Ctrl-C ends it.")

    def _plain(self, text: str) -> None:
        # Lines are not wrapped, since users copy them.
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


_PAIR: dict[str, object] = {
    "query": "What is a loom?",
    "documents": ["A loom weaves.", "A fish swims."],
}
_FIRST_REQUESTS: dict[Task, tuple[str, dict[str, object]]] = {
    "generate": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "What is a loom?"}], "max_tokens": 100},
    ),
    "embed": ("embeddings", {"input": ["What is a loom?"]}),
    "classify": ("classify", {"input": ["What is a loom?"]}),
    "score": ("rerank", _PAIR),
}
"""Path and body of a request of each task."""


def first_request(plan: MeshPlan) -> str:
    """A command line that asks the mesh something."""
    if plan.rest_address is None and plan.first_task == "generate":
        key = "WEFT_API_KEY=KEY " if plan.needs_key else ""
        tls = "" if plan.tls_dir is None else f" --tls-dir {shlex.quote(str(plan.tls_dir))}"
        return f"{key}weft chat --address {plan.grpc_address}{tls}"
    if plan.rest_address is None:
        return f"gRPC calls of the task `{plan.first_task}` at {plan.grpc_address}"
    path, asked = _FIRST_REQUESTS[plan.first_task]
    body = {"model": plan.model_names[0], **asked}
    url = f"{plan.rest_scheme}://{plan.rest_address}/v1/{path}"
    words = ["curl", url, "-H", "Content-Type: application/json"]
    if plan.tls_dir is not None:
        words += ["--cacert", str(plan.tls_dir / "ca.pem")]
    if plan.needs_key:
        words += ["-H", "Authorization: Bearer KEY"]
    return shlex.join([*words, "-d", json.dumps(body)])
