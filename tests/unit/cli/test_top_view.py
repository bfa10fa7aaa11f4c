"""What `weft top` draws, and which keys it knows."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from weft.checkpoint.config import ModelConfig
from weft.cli.top.keys import split_keys
from weft.cli.top.picture import MeshPicture
from weft.cli.top.summary import summarise
from weft.cli.top.view import SORTS, Sort, TopState, TopView, chart, describe_plan
from weft.contract.reports import describe_bubbles
from weft.engine.parallel.stages import describe_stages
from weft.testing.models.tiny_models import make_tiny
from weft.v1 import mesh_pb2

HOSTILE = "[bold]\x1b]0;gone\x07\u202edecode\n-1"


def mesh(num_decode: int, names: str = "decode-{}") -> MeshPicture:
    """A picture of a busy mesh."""
    message = mesh_pb2.WatchMeshResponse(gateway_id="gateway-0")
    message.time.GetCurrentTime()
    message.members.add(
        member_id="gateway-0", role=mesh_pb2.MEMBER_ROLE_GATEWAY, healthy=True, waiting_requests=7
    )
    for at in range(num_decode):
        one = message.members.add(
            member_id=names.format(at),
            role=mesh_pb2.MEMBER_ROLE_DECODE,
            healthy=True,
            running_requests=at,
            waiting_requests=1,
            decode_tokens_per_second=10 * random.random(),
        )
        one.pages.total, one.pages.used, one.pages.cached = 1000, at, 500
        message.flows.add(
            source_id="gateway-0",
            target_id=one.member_id,
            kind=mesh_pb2.FLOW_KIND_REQUESTS,
            per_second=at,
        )
        message.running_requests.add(request_id=f"cmpl-{at:032x}", worker_id=one.member_id)
    for _ in range(20):
        point = message.points.add(output_tokens_per_second=random.uniform(1, 99))
        point.first_token.p50_s, point.first_token.p90_s = 0.25, 1.5
    picture = MeshPicture()
    picture.take(message)
    return picture


def lines(
    picture: MeshPicture, state: TopState, width: int, height: int, *, is_whole: bool = False
) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height)
    view = TopView(picture, state, "127.0.0.1:50051", is_whole=is_whole)
    console.print(view, height=height)
    return out.getvalue().rstrip("\n").splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("num_decode", [1, 64])
def test_the_screen_fits_and_numbers_are_whole(width: int, num_decode: int) -> None:
    picture = mesh(num_decode)
    drawn = lines(picture, TopState(), width, 24)
    assert len(drawn) <= 24
    assert all(cell_len(line) <= width for line in drawn)
    (heading,) = (line for line in drawn if line.startswith("member"))
    wanted = ["run", "wait", "tok/s", "used"]
    if width >= 80:
        wanted = ["run", "wait", "fill", "queued", "tok/s", "used", "cached", "quar.", "hits"]
    assert [word for word in heading.split() if word in wanted] == wanted
    first = next(line for line in drawn if line.startswith("decode-0"))
    assert first.split()[:4] == ["decode-0", "ok", "0", "1"]
    assert f"{sum(range(num_decode))} running" in drawn[1].replace(",", "")
    assert "TTFT p50 250 ms, p90 1.5 s" in drawn[3]
    whole = lines(picture, TopState(), width, 24, is_whole=True)
    assert sum(line.startswith("decode-") for line in whole) == num_decode


@pytest.mark.parametrize("sort", SORTS)
def test_members_are_sorted_and_scrolled(sort: Sort) -> None:
    picture = mesh(64)
    state = TopState(sort=sort)

    def shown() -> list[str]:
        drawn = lines(picture, state, 80, 24)
        first = next(at for at, line in enumerate(drawn) if line.startswith("member")) + 1
        return [line.split()[0] for line in drawn[first : drawn.index("", first)]]

    first = shown()[0]
    if sort == "tokens":
        most = max(picture.members, key=lambda one: one.decode_tokens_per_second)
        assert first == most.member_id
    else:
        assert first == {"role": "gateway-0", "running": "decode-63", "used": "decode-63"}[sort]
    state.reverses = True
    assert shown()[0] != first
    state.first_member = 10_000
    assert shown()[-1] == first
    assert state.first_member < 65


def test_a_speed_that_a_member_does_not_tell_is_no_zero() -> None:
    picture, told = MeshPicture(), {"prefill-old": None, "prefill-idle": 0.0, "prefill-busy": 512.0}
    message = mesh_pb2.WatchMeshResponse(gateway_id="gateway-0")
    message.time.GetCurrentTime()
    for name, rate in told.items():
        message.members.add(
            member_id=name,
            role=mesh_pb2.MEMBER_ROLE_PREFILL,
            healthy=True,
            prefill_tokens_per_second=rate,
        )
    picture.take(message)
    drawn = lines(picture, TopState(), 120, 24)
    head = next(line.split() for line in drawn if line.startswith("member"))
    rows = {line.split()[0]: line.split() for line in drawn if line.startswith("prefill-")}
    shown = {name: row[head.index("tok/s")] for name, row in rows.items()}
    assert shown == {"prefill-old": "-", "prefill-idle": "0", "prefill-busy": "512"}


@pytest.mark.parametrize("width", [60, 200])
def test_stages_their_hosts_and_bubbles_are_shown(width: int, tmp_path: Path) -> None:
    picture = mesh(3)
    places = ["host 10.0.0.1", "host 10.0.0.2"]
    config = ModelConfig.load(make_tiny("llama", tmp_path, 0))
    share = random.randrange(1, 99)
    told = [
        "the model takes images",
        describe_stages(config, 2, places),
        describe_bubbles({"stage_us": 100, "bubble_us": share}),
    ]
    picture.newest.members[2].notices.extend(told)
    for is_whole in (False, True):
        drawn = lines(picture, TopState(), width, 24, is_whole=is_whole)
        assert len(drawn) <= 24 or is_whole
        of_stages = [line for line in drawn if line.startswith("decode-1: ")]
        assert [line[:59] for line in of_stages] == [f"decode-1: {one}"[:59] for one in told[1:]]


def test_names_cannot_control_the_terminal() -> None:
    picture = mesh(2, names=HOSTILE + "{}")
    member = picture.newest.members[1]
    member.healthy, member.problem, member.model = False, HOSTILE, HOSTILE
    picture.newest.running_requests[0].request_id = HOSTILE
    picture.newest.flows[0].source_id = HOSTILE
    for width in (80, 200):
        text = "\n".join(lines(picture, TopState(notice=HOSTILE), width, 24))
        assert "[bold]" in text
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert not {"\x1b", "\x07", "\u202e"} & set(summarise(picture).plain)


def test_a_summary_says_who_starts_and_who_drains() -> None:
    picture = mesh(8)
    for at, member in enumerate(picture.newest.members):
        member.healthy, member.problem = at < 2, "draining"
    start = picture.newest.members[2].start
    start.phase, start.fraction = "loading the model", 0.345
    start.elapsed.FromSeconds(12)
    first, second, *others = summarise(picture).plain.splitlines()
    assert first == "28 running, 15 waiting · " + first.partition(" · ")[2]
    assert "pages 0% used, 50% cached" in first
    assert second.startswith("TTFT p50 250 ms, p90 1.5 s")
    assert others[0] == "decode-1: loading the model, 34%, 12 s"
    assert others[1:] == ["decode-2: draining", "decode-3: draining", "and 4 more"]


def test_workers_that_operators_put_aside_are_no_failures() -> None:
    picture = mesh(8)
    problems = ["asleep (kv_cache, weights)", "draining", "no load report for 9.1 s"]
    for member, problem in zip(picture.newest.members[1:], problems, strict=False):
        member.healthy, member.problem = False, problem
    shown = [
        line.removeprefix(name).strip().split("  ")[0]
        for name in ("decode-0", "decode-1", "decode-2")
        for line in lines(picture, TopState(), 200, 30)
        if line.startswith(f"{name} ")
    ]
    assert shown == ["asleep", "draining", "not ok"]


def test_charts_show_the_newest_values() -> None:
    assert chart([9.0, 0.0, 1.0, 2.0, 4.0], 4) == ("▁▃▅█", 4.0)
    assert chart([0.0, 0.0], 10) == ("▁▁", 0.0)
    assert chart([], 10) == ("", 0.0)


def test_keys_are_told_apart() -> None:
    assert split_keys(b"qs\x1b[A\x1bOBr\x1b[5~\x1b[6~") == [
        *("q", "s", "up", "down", "r", "page up", "page down"),
    ]
    assert split_keys(b"\x1b[1;5Cq\xc3\xa9s\x1b[") == ["q", "s"]


@pytest.mark.parametrize("acts", [True, False])
def test_plans_are_told_in_a_line(acts: bool) -> None:
    plan = mesh_pb2.MeshPlan(
        model="m",
        acts=acts,
        wanted_prefill=2,
        wanted_decode=3,
        seen_prefill=1,
        seen_decode=3,
        alarms=["nothing is heard"],
        history=[mesh_pb2.PlannerAct(text="worker-0: prefill (was both)")],
        why="prompts keep 1.8 workers busy",
    )
    told = describe_plan(plan)
    assert told.startswith("plan m: 2 prefill" if acts else "plan (advice) m: 2 prefill")
    assert "there are 1 and 3" in told
    # What is wrong comes first, where a narrow terminal still shows it.
    assert told.endswith(
        "alarm: nothing is heard; last: worker-0: prefill (was both); prompts keep 1.8 workers busy"
    )


def test_the_page_of_plans_has_every_word_of_them() -> None:
    picture = mesh(2)
    why = " ".join(f"word-{at}" for at in range(60))
    plan = picture.newest.plans.add(
        planner_id="planner-0", model="m", acts=True, wanted_decode=3, seen_decode=2, why=why
    )
    plan.alarms.append(HOSTILE)
    for hour in (9, 8):
        act = plan.history.add(text=f"worker-{hour}: prefill (was both)")
        act.time.FromJsonString(f"2026-01-01T0{hour}:30:05Z")
    page = lines(picture, TopState(shows_plans=True), 60, 40)
    assert all(cell_len(line) <= 60 for line in page)
    assert "m, by planner-0, which acts" in page[2]
    told = " ".join(" ".join(page).split())
    assert all(f"word-{at}" in told.split() for at in range(60))
    assert "did 09:30:05 UTC worker-9: prefill (was both) 08:30:05 UTC worker-8" in told
    assert "decode-0" not in told, "members have the other page"
    assert not any("\x1b" in line or "\x07" in line for line in page)
    # Where nobody can press a key, both are shown.
    whole = " ".join(lines(picture, TopState(), 60, 40, is_whole=True))
    assert "word-59" in whole
    assert "decode-0" in whole


def test_without_planners_the_page_says_how_to_have_one() -> None:
    assert any(
        "weft serve planner" in line for line in lines(mesh(1), TopState(shows_plans=True), 80, 24)
    )
