"""The terminal output of `weft up`."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text
from weft.cli.up.board import Board
from weft.cli.up.plan import BACK, FirstTask, MeshPlan
from weft.cli.up.supervisor import Reporter

_STARTING_PER_S, _SERVING_PER_S = 8, 2
"""Pictures a second."""


class ConsoleReporter(Reporter):
    """Shows services as they start, on a terminal as a live list, and later events as lines. With
    `is_plain` events are lines on a terminal too.
    """

    def __init__(self, console: Console, *, is_plain: bool = False) -> None:
        self._console = console
        self._is_plain = is_plain or not console.is_terminal or console.is_dumb_terminal
        self._board = Board()
        self._live: Live | None = None
        self._begin_s = time.monotonic()
        self._is_up = False

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """A context in which the list is live, until the mesh begins to end or has failed to
        start.
        """
        self._begin()
        try:
            yield
        finally:
            self._finish()

    @property
    def is_live(self) -> bool:
        """Whether the state of the mesh can be shown live."""
        return self._live is not None

    def summarise(self, summary: Text) -> None:
        """Shows the state of the whole mesh until the next summary."""
        self._board.summary = summary

    def _begin(self) -> None:
        if not self._is_plain:
            self._live = Live(
                self._board,
                console=self._console,
                refresh_per_second=_SERVING_PER_S if self._is_up else _STARTING_PER_S,
                transient=self._is_up,
                # Output of other threads goes to the logs.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def _finish(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def starting(self, name: str) -> None:
        self._board.starting(name)

    def loading(self, name: str, done: int, total: int, what: str) -> None:
        self._board.loading(name, done, total, what)

    def ready(self, name: str, seconds: float) -> None:
        self._board.ready(name)
        if self._is_plain or self._is_up:
            self._board.forget(name)
            self._line(f"{name} is ready after {seconds:.1f} s")

    def failed(self, name: str, how: str) -> None:
        self._board.failed(name, how)

    def stopping(self, grace_s: float) -> None:
        if self._live is not None:
            self._finish()
            self._line(
                f"stopping: running requests have {grace_s:g} s; another Ctrl-C ends them at once"
            )

    def died(self, name: str, how: str) -> None:
        self._board.forget(name)
        self._line(f"[red]{name} {escape(how)}")

    def stalled(self, name: str, seconds: float) -> None:
        self._line(f"[red]{name} has stood still for {seconds:g} s and is killed")

    def restarting(self, name: str, delay_s: float) -> None:
        self._line(f"{name} starts again in {delay_s:.1f} s")

    def killed(self, name: str, *, is_late: bool) -> None:
        how = "did not stop in time and was killed" if is_late else "was interrupted and killed"
        self._line(f"[yellow]{name} {how}")

    def notice(self, text: str) -> None:
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
            console = f"{plan.rest_scheme}://{plan.rest_address}/console"
            rows[:0] = [("REST", ", ".join(edges)), ("console", console)]
        self._console.print(
            f"\n[bold green]Weft is ready[/] after {seconds:.1f} s", highlight=False
        )
        for name, value in rows:
            self._plain(f"  {name:<8} {value}")
        self._plain("\nTry it:\n")
        self._plain(first_request(plan) + "\n")
        self._plain("Ctrl-C ends it.")
        self._board.forget_ended()
        self._is_up = True
        self._begin()

    def _plain(self, text: str) -> None:
        # Lines are not wrapped, since users copy them.
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


_PAIR: dict[str, object] = {
    "query": "What is a loom?",
    "documents": ["A loom weaves.", "A fish swims."],
}
_FIRST_REQUESTS: dict[FirstTask, tuple[str, dict[str, object]]] = {
    "generate": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "What is a loom?"}], "max_tokens": 100},
    ),
    "embed": ("embeddings", {"input": ["What is a loom?"]}),
    "classify": ("classify", {"input": ["What is a loom?"]}),
    "score": ("rerank", _PAIR),
}
"""Path and body of a first request, by task."""


def first_request(plan: MeshPlan) -> str:
    if plan.rest_address is None and plan.first_task == "generate":
        key = "WEFT_API_KEY=KEY " if plan.needs_key else ""
        tls = "" if plan.tls_dir is None else f" --tls-dir {shlex.quote(str(plan.tls_dir))}"
        return f"{key}weft chat --address {plan.grpc_address}{tls}"
    if plan.rest_address is None:
        return f"gRPC calls of the task `{plan.first_task}` at {plan.grpc_address}"
    base = f"{plan.rest_scheme}://{plan.rest_address}/v1"
    if plan.first_task == "transcribe":
        fields = ["-F", f"model={plan.model_names[0]}", "-F", "file=@speech.wav"]
        return shlex.join([*_curl(plan, f"{base}/audio/transcriptions"), *fields])
    path, asked = _FIRST_REQUESTS[plan.first_task]
    body = {"model": plan.model_names[0], **asked}
    words = [*_curl(plan, f"{base}/{path}"), "-H", "Content-Type: application/json"]
    return shlex.join([*words, "-d", json.dumps(body)])


def _curl(plan: MeshPlan, url: str) -> list[str]:
    words = ["curl", url]
    if plan.tls_dir is not None:
        words += ["--cacert", str(plan.tls_dir / "ca.pem")]
    if plan.needs_key:
        words += ["-H", "Authorization: Bearer KEY"]
    return words
