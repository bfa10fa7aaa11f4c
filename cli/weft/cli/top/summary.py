"""The state of a mesh in a few words."""

from __future__ import annotations

from rich.text import Text
from weft.cli.top.picture import MeshPicture
from weft.v1 import mesh_pb2

_MAX_PROBLEMS = 4


def printable(text: str) -> str:
    """A name or message from the mesh without characters that could control a terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def percent(part: float, whole: float) -> str:
    """A share in percent; `-` if `whole` is 0."""
    return f"{part / whole:.0%}" if whole else "-"


def seconds(value: float) -> str:
    """A time from milliseconds to minutes."""
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def describe_latency(name: str, quantiles: mesh_pb2.LatencyQuantiles | None) -> str:
    """Median and 90th percentile of a latency."""
    if quantiles is None:
        return f"{name} -"
    return f"{name} p50 {seconds(quantiles.p50_s)}, p90 {seconds(quantiles.p90_s)}"


def problem_of(member: mesh_pb2.MeshMember) -> str:
    """Why a member is not in service, or the progress of its start; empty: it is in service."""
    if not member.HasField("start"):
        return printable(member.problem)
    start = member.start
    done = f", {start.fraction:.0%}" if start.HasField("fraction") else ""
    return f"{printable(start.phase)}{done}, {start.elapsed.ToNanoseconds() / 1e9:.0f} s"


def problems(picture: MeshPicture, limit: int = _MAX_PROBLEMS) -> list[str]:
    """One line for each member that is not in service, at most `limit` lines."""
    lines = [
        f"{printable(member.member_id)}: {problem_of(member)}"
        for member in picture.members
        if not member.healthy
    ]
    left = len(lines) - limit
    return lines if left <= 0 else [*lines[: limit - 1], f"and {left + 1} more"]


def summarise(picture: MeshPicture) -> Text:
    """Requests, tokens, pages and latency, and the members that are not in service."""
    pages = picture.pages
    parts = [
        f"{picture.running:,} running, {picture.waiting:,} waiting",
        f"{picture.tokens_per_second:,.0f} tokens/s",
        f"pages {percent(pages.used, pages.total)} used, "
        f"{percent(pages.cached, pages.total)} cached",
    ]
    latencies = [
        describe_latency("TTFT", picture.latency("first_token")),
        describe_latency("ITL", picture.latency("between_tokens")),
    ]
    text = Text("\n".join(" · ".join(line) for line in (parts, latencies)), style="bold")
    for line in problems(picture):
        text.append(f"\n{line}", "not bold yellow")
    return text
