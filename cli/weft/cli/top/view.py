"""The screen of `weft top`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from weft.cli.top.picture import MeshPicture
from weft.cli.top.summary import (
    describe_latency,
    percent,
    printable,
    problems,
    seconds,
)
from weft.contract.codec.pairs import FLOW_KINDS, MEMBER_ROLES
from weft.contract.reports import tells_of_stages
from weft.v1 import mesh_pb2

_BARS = "▁▂▃▄▅▆▇█"
_FULL_COLUMNS, _WIDE_COLUMNS = 72, 110
"""Widths from which all numbers are shown, and addresses and models too."""
_FEW_NUMBERS = ("run", "wait", "tok/s", "used")
_NUMBERS = ("run", "wait", "fill", "queued", "tok/s", "used", "cached", "quar.", "hits")

Sort = Literal["role", "running", "tokens", "used"]
SORTS: tuple[Sort, ...] = ("role", "running", "tokens", "used")
"""Orders of the members, in the order of the key `s`."""


@dataclass(slots=True)
class TopState:
    """The user's choices by keys."""

    sort: Sort = "role"
    reverses: bool = False
    first_member: int = 0
    """Number of members above the first one shown."""
    shows_plans: bool = False
    """Whether the screen is that of the planners, and not the mesh's."""
    notice: str = ""
    """Why the picture is stale; empty: it is fresh."""


class TopView:
    """Draws a picture on as many lines as the terminal has, or with `is_whole` on as many as it
    needs. `title` names the watched mesh.
    """

    def __init__(
        self, picture: MeshPicture, state: TopState, title: str, *, is_whole: bool = False
    ) -> None:
        self._picture = picture
        self._state = state
        self._title = title
        self._is_whole = is_whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self._state.shows_plans:
            yield from self._title_lines(width)
            yield Text()
            yield _plan_page(self._picture.newest.plans)
            return
        left = 10_000 if self._is_whole else options.height or console.height
        header = self._header(width)
        left -= len(header)
        yield from header
        members = self._members()
        flows = sorted(self._picture.newest.flows, key=_flow_size, reverse=True)
        requests = list(self._picture.newest.running_requests)
        # A blank line and a heading go before each table.
        some = sum(2 + min(len(rows), 3) for rows in (flows, requests) if rows)
        fitting = max(1, min(len(members), left - 2 - min(some, left // 2)))
        self._state.first_member = max(0, min(self._state.first_member, len(members) - fitting))
        first = self._state.first_member
        yield Text()
        shown_members = members[first : first + fitting]
        yield _member_table(shown_members, width)
        left -= 2 + fitting
        stages = _stage_lines(shown_members, width)
        if not self._is_whole:
            stages = stages[: max(0, min(left - some, left // 3) - 1)]
        if stages:
            yield Text()
            yield from stages
            left -= 1 + len(stages)
        share = left - 2 - min(len(requests), 3) - 2 if requests else left - 2
        if flows and (shown := flows[: max(0, share)]):
            yield Text()
            yield _flow_table(shown, width)
            left -= 2 + len(shown)
        if requests and (newest := requests[: max(0, left - 2)]):
            yield Text()
            yield _request_table(newest, width)
        if self._is_whole and (plans := self._picture.newest.plans):
            yield Text()
            yield _plan_page(plans)

    def _title_lines(self, width: int) -> list[Text]:
        clock = self._picture.newest.time.ToDatetime().strftime("%H:%M:%S UTC")
        title = Text.assemble((printable(self._title), "bold"), f"  {clock}")
        title.append("  q quit  p the mesh", "dim")
        lines = [title, Text(printable(self._state.notice), "yellow")]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines if self._state.notice else lines[:1]

    def _header(self, width: int) -> list[Text]:
        picture, newest = self._picture, self._picture.newest
        point = picture.points[-1] if picture.points else mesh_pb2.MeshPoint()
        pages = picture.pages
        clock = newest.time.ToDatetime().strftime("%H:%M:%S UTC") if newest.members else ""
        title = Text.assemble((printable(self._title), "bold"), f"  {clock}")
        if not self._is_whole:
            order = self._state.sort + (" reversed" if self._state.reverses else "")
            plans = "  p plans" if newest.plans else ""
            title.append(f"  q quit{plans}  s sort: {order}  r reverse  ↑↓ scroll", "dim")
        goodput = f"  goodput {point.goodput:.0%}" if point.HasField("goodput") else ""
        lines = [
            title,
            Text(
                f"requests {picture.running:,} running  {picture.waiting:,} waiting  "
                f"{point.requests_per_second:.1f}/s ended  "
                f"{point.failures_per_second:.1f}/s failed{goodput}"
            ),
            Text(
                f"tokens/s {picture.tokens_per_second:,.0f} out  "
                f"{point.prompt_tokens_per_second:,.0f} in  pages "
                f"{percent(pages.used, pages.total)} used  "
                f"{percent(pages.cached, pages.total)} cached  {pages.quarantined:,} quarantined"
            ),
            Text(
                describe_latency("TTFT", picture.latency("first_token"))
                + "  "
                + describe_latency("ITL", picture.latency("between_tokens"))
            ),
            *self._charts(width),
            *(
                Text(describe_plan(plan), "red" if plan.alarms else "")
                for plan in newest.plans
                if not self._is_whole
            ),
        ]
        if self._state.notice:
            lines.append(Text(printable(self._state.notice), "yellow"))
        lines += [Text(line, "yellow") for line in problems(picture)]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines

    def _charts(self, width: int) -> list[Text]:
        points = list(self._picture.points)
        columns = max(0, width // 2 - 25)
        tokens = [point.output_tokens_per_second for point in points]
        first = [
            point.first_token.p90_s if point.HasField("first_token") else 0.0 for point in points
        ]
        tokens_chart, most_tokens = chart(tokens, columns)
        first_chart, most_first = chart(first, columns)
        if columns < 10 or not most_tokens + most_first:
            return []
        return [
            Text.assemble(
                "tokens/s ",
                (tokens_chart, "cyan"),
                f" max {most_tokens:,.0f}  TTFT p90 ",
                (first_chart, "magenta"),
                f" max {seconds(most_first)}",
            )
        ]

    def _members(self) -> list[mesh_pb2.MeshMember]:
        members = sorted(self._picture.members, key=lambda one: (one.role, one.member_id))
        by: dict[Sort, Callable[[mesh_pb2.MeshMember], float]] = {
            "running": lambda one: -one.running_requests,
            "tokens": lambda one: -(_tokens_per_second(one) or 0.0),
            "used": lambda one: -(one.pages.used / one.pages.total if one.pages.total else 0.0),
        }
        if self._state.sort in by:
            members.sort(key=by[self._state.sort])
        return members[::-1] if self._state.reverses else members


def chart(values: Sequence[float], columns: int) -> tuple[str, float]:
    """Draws the newest values as at most `columns` bars. Returns the bars and the largest value.
    Values are not negative, the oldest first.
    """
    shown = values[-columns:]
    most = max(shown, default=0.0)
    top = len(_BARS) - 1
    bars = (_BARS[min(top, round(top * value / most))] if most else _BARS[0] for value in shown)
    return "".join(bars), most


def _table(names: Sequence[str], numbers: Sequence[str], longest: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for at, name in enumerate(names):
        table.add_column(
            name,
            no_wrap=True,
            overflow="ellipsis",
            justify="right" if name in numbers else "left",
            max_width=None if name in numbers or at else max(6, longest),
        )
    return table


def _member_table(members: Sequence[mesh_pb2.MeshMember], width: int) -> Table:
    numbers = _NUMBERS if width >= _FULL_COLUMNS else _FEW_NUMBERS
    names = ["member", "state", *numbers]
    table = _table(names, numbers, width - (62 if numbers is _NUMBERS else 32))
    if width >= _WIDE_COLUMNS:
        for name in ("address", "model"):
            table.add_column(name, no_wrap=True, overflow="ellipsis")
    for one in members:
        pages = one.pages
        cells = {
            "run": f"{one.running_requests:,}",
            "wait": f"{one.waiting_requests:,}",
            "fill": f"{one.filling_requests:,}",
            "queued": f"{one.queued_tokens:,}",
            "tok/s": "-" if (rate := _tokens_per_second(one)) is None else f"{rate:,.0f}",
            "used": percent(pages.used, pages.total),
            "cached": percent(pages.cached, pages.total),
            "quar.": f"{pages.quarantined:,}",
            "hits": f"{one.hit_rate:.0%}" if one.HasField("hit_rate") else "-",
        }
        row: list[str | Text] = [_name(one), _state(one), *(cells[name] for name in numbers)]
        if width >= _WIDE_COLUMNS:
            row += [Text(printable(one.address)), Text(printable(one.model))]
        table.add_row(*row)
    return table


def _stage_lines(members: Sequence[mesh_pb2.MeshMember], width: int) -> list[Text]:
    """The stages of workers that have some: their layers and hosts, and how long they were idle."""
    lines = [
        Text(printable(f"{one.member_id}: {notice}"), "dim")
        for one in members
        for notice in one.notices
        if tells_of_stages(notice)
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def describe_plan(plan: mesh_pb2.MeshPlan) -> str:
    """What a planner wants for a model, and what it did."""
    wanted = (plan.wanted_prefill, plan.wanted_decode)
    seen = (plan.seen_prefill, plan.seen_decode)
    there = "as there are" if wanted == seen else f"there are {seen[0]} and {seen[1]}"
    what = "" if plan.acts else " (advice)"
    done = f"; last: {plan.history[0].text}" if plan.history else ""
    alarms = "".join(f"; alarm: {alarm}" for alarm in plan.alarms)
    why = f"; {plan.why}" if plan.why else ""
    return printable(
        f"plan{what} {plan.model}: {wanted[0]} prefill, {wanted[1]} decode, "
        f"{there}{alarms}{done}{why}"
    )


def _plan_page(plans: Sequence[mesh_pb2.MeshPlan]) -> Table:
    """All that planners want and did, wrapped."""
    page = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    page.add_column(no_wrap=True, style="bold")
    page.add_column(overflow="fold")
    if not plans:
        page.add_row("plans", "No planner has told what it wants: weft serve planner.")
    for number, plan in enumerate(plans):
        if number:
            page.add_row()
        does = "acts" if plan.acts else "advises"
        page.add_row("plan", Text(printable(f"{plan.model}, by {plan.planner_id}, which {does}")))
        page.add_row("  wants", f"{plan.wanted_prefill} prefill, {plan.wanted_decode} decode")
        page.add_row("  there are", f"{plan.seen_prefill} prefill, {plan.seen_decode} decode")
        for alarm in plan.alarms:
            page.add_row("  alarm", Text(printable(alarm), "red"))
        page.add_row("  why", Text(printable(plan.why)))
        for at, act in enumerate(plan.history):
            when = act.time.ToDatetime().strftime("%H:%M:%S UTC")
            page.add_row("" if at else "  did", Text(printable(f"{when}  {act.text}")))
        if not plan.history:
            page.add_row("  did", "nothing yet")
    return page


def _name(member: mesh_pb2.MeshMember) -> Text:
    name, role = printable(member.member_id), MEMBER_ROLES[member.role] or "?"
    return Text(name if name.startswith(role) else f"{name} ({role})")


def _state(member: mesh_pb2.MeshMember) -> Text:
    if member.healthy:
        return Text("ok", "green")
    if member.HasField("start"):
        return Text("starting", "cyan")
    wanted = "draining" if member.draining else wanted_state(member.problem)
    return Text(wanted, "yellow") if wanted else Text("not ok", "red")


def wanted_state(problem: str) -> str:
    """draining or asleep, if an operator wants the worker to serve nothing; else empty."""
    state = problem.partition(" ")[0]
    return state if state in ("draining", "asleep") else ""


def _tokens_per_second(member: mesh_pb2.MeshMember) -> float | None:
    """The speed of a member's own task: a decode worker generates, a prefill worker reads prompts.
    None: it does not report its speed.
    """
    if member.role in (mesh_pb2.MEMBER_ROLE_DECODE, mesh_pb2.MEMBER_ROLE_BOTH):
        return member.decode_tokens_per_second
    tells = member.HasField("prefill_tokens_per_second")
    return member.prefill_tokens_per_second if tells else None


def _flow_size(flow: mesh_pb2.MeshFlow) -> tuple[float, float]:
    return flow.bytes_per_second, flow.tokens_per_second + flow.per_second


def _flow_table(flows: Sequence[mesh_pb2.MeshFlow], width: int) -> Table:
    numbers = ("open", "/s", "pages/s", "MB/s", "tok/s")
    ends = max(6, (width - 44) // 2)
    table = _table(("from", "to", "flow", *numbers), numbers, ends)
    table.columns[1].max_width = ends
    for one in flows:
        is_requests = one.kind == mesh_pb2.FLOW_KIND_REQUESTS
        table.add_row(
            Text(printable(one.source_id)),
            Text(printable(one.target_id)),
            FLOW_KINDS[one.kind] or "?",
            f"{one.open:,}" if is_requests else "-",
            f"{one.per_second:.1f}",
            "-" if is_requests else f"{one.pages_per_second:,.1f}",
            "-" if is_requests else f"{one.bytes_per_second / 1e6:,.1f}",
            f"{one.tokens_per_second:,.0f}" if is_requests else "-",
        )
    return table


def _request_table(requests: Sequence[mesh_pb2.MeshRequest], width: int) -> Table:
    is_full = width >= _FULL_COLUMNS
    numbers = ("age", "TTFT", "prompt", "cached", "out") if is_full else ("age", "out")
    names = ["request", "worker", "state", *numbers]
    table = _table(names, numbers, width - (60 if is_full else 36))
    table.columns[1].max_width = 14
    if width >= _WIDE_COLUMNS:
        table.add_column("model", no_wrap=True, overflow="ellipsis")
    for one in requests:
        first = one.first_token.ToNanoseconds() / 1e9 if one.HasField("first_token") else None
        cells = {
            "age": seconds(one.duration.ToNanoseconds() / 1e9),
            "TTFT": "-" if first is None else seconds(first),
            "prompt": f"{one.prompt_tokens:,}",
            "cached": f"{one.cached_tokens:,}",
            "out": f"{one.output_tokens:,}",
        }
        row: list[str | Text] = [
            Text(printable(one.request_id)),
            Text(printable(one.worker_id) or "-"),
            Text(printable(one.outcome)),
            *(cells[name] for name in numbers),
        ]
        table.add_row(*row, *([Text(printable(one.model))] if width >= _WIDE_COLUMNS else []))
    return table
