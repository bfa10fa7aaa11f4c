"""What gateways tell, as observations, and the roles that follow from a plan."""

from __future__ import annotations

import pytest
from weft.contract.codec.walk import duration
from weft.gateway.telemetry.demand import ModelDemand
from weft.planner.actuators.roles import RoleOrder, role_orders
from weft.planner.forecast import Counts
from weft.planner.observe import MeshPicture
from weft.v1 import mesh_pb2

BOTH = mesh_pb2.MEMBER_ROLE_BOTH
PREFILL = mesh_pb2.MEMBER_ROLE_PREFILL
DECODE = mesh_pb2.MEMBER_ROLE_DECODE
MODEL = "m"


def member(
    name: str, role: mesh_pb2.MemberRole.ValueType, *, able: bool = True, running: int = 0
) -> mesh_pb2.MeshMember:
    made = mesh_pb2.MeshMember(
        member_id=name,
        role=role,
        model=MODEL,
        healthy=True,
        running_requests=running,
        queued_tokens=100,
        pages=mesh_pb2.PageCounts(total=100, used=10 * running),
        speed=mesh_pb2.WorkerSpeed(
            prefill_tokens_per_second=1000.0 + running,
            step_base=duration(0.01),
            step_request=duration(0.001),
        ),
    )
    if able:
        made.role_state.changes = 1
    return made


def message(demand: ModelDemand, *members: mesh_pb2.MeshMember) -> mesh_pb2.WatchMeshResponse:
    return mesh_pb2.WatchMeshResponse(members=members, demand=[demand.describe(MODEL)])


def test_arrivals_of_all_gateways_are_one_demand() -> None:
    picture = MeshPicture()
    assert picture.observe(MODEL) is None
    demands = {"a": ModelDemand(), "b": ModelDemand()}
    members = (member("w0", PREFILL, running=1), member("w1", DECODE, running=3))
    for name, demand in demands.items():
        picture.take(name, 1.0, message(demand, *members))
    for at_s in range(2, 40):
        for name, demand in demands.items():
            for _ in range(3):
                demand.arrived()
                demand.sized(1500)
            demand.ended(2, 3000, 600, 80)
            picture.take(name, float(at_s), message(demand, *members))
    seen = picture.observe(MODEL)
    assert seen is not None
    assert seen.requests == 2 * 3 * 38
    lengths = seen.lengths[0]
    ((tokens, share),) = lengths.sizes
    # A fifth is cached, and need not be computed.
    assert (tokens, share) == (pytest.approx(1200, rel=0.01), 1.0)
    assert lengths.output_tokens == pytest.approx(40, rel=0.01)
    assert (seen.prefill, seen.decode, seen.ready, seen.queued_tokens) == (1, 1, 2, 200)
    assert seen.speed.prefill_tokens_per_s == 1001.0
    assert (seen.worst_share, seen.mean_share) == (pytest.approx(0.3), pytest.approx(0.2))
    # What a silent gateway gets is not known.
    picture.take("a", 60.0, message(demands["a"], *members))
    silent = picture.observe(MODEL)
    assert silent is not None
    assert silent.time_s == 39.0


def test_a_restarted_gateway_takes_nothing_back() -> None:
    picture, demand = MeshPicture(), ModelDemand()
    picture.take("a", 1.0, message(demand))
    for _ in range(5):
        demand.arrived()
    picture.take("a", 2.0, message(demand))
    picture.take("a", 3.0, message(ModelDemand()))
    seen = picture.observe(MODEL)
    assert seen is not None
    assert seen.requests == 5


def test_the_idlest_workers_change() -> None:
    members = [member(f"w{at}", BOTH, running=at) for at in range(4)]
    orders = role_orders(members, Counts(1, 3))
    assert [one.member_id for one in orders if one.role == "prefill"] == ["w0"]
    assert len(orders) == 4
    # Who has the role keeps it, and is told again for its lease.
    members[2] = member("w2", PREFILL, running=9)
    orders = role_orders(members, Counts(1, 3))
    assert [one.member_id for one in orders if one.role == "prefill"] == ["w2"]


def test_changes_come_before_renewals_and_decoders_first() -> None:
    members = [member("w0", PREFILL), member("w1", DECODE), member("w2", PREFILL, running=5)]
    orders = role_orders(members, Counts(1, 2))
    assert orders[0] == RoleOrder("w2", "decode")


def test_workers_that_are_not_apart_all_have_both_roles_and_none_loses_one_first() -> None:
    members = [member("w0", PREFILL), member("w1", DECODE), member("d", DECODE, able=False)]
    assert role_orders(members, None) == [RoleOrder("w0", "both"), RoleOrder("w1", "both")]


@pytest.mark.parametrize(("able", "prefill"), [(1, 0), (2, 1), (4, 3)])
def test_one_worker_always_decodes(able: int, prefill: int) -> None:
    members = [member(f"w{at}", BOTH) for at in range(able)]
    orders = role_orders(members, Counts(9, 1))
    assert sum(one.role == "prefill" for one in orders) == prefill


def test_workers_of_one_role_count_and_stay() -> None:
    members = [member("p", PREFILL, able=False), member("d", DECODE, able=False)]
    assert role_orders(members, Counts(2, 0)) == []
    members.append(member("w0", BOTH))
    assert role_orders(members, Counts(2, 1)) == [RoleOrder("w0", "prefill")]


def test_a_worker_without_news_is_missing_and_no_more() -> None:
    """llm-d-router#2547: the stale metrics of one blocked everything."""
    picture, demand = MeshPicture(), ModelDemand()
    silent = member("w1", DECODE)
    silent.healthy, silent.problem = False, "no load report for 9.0 s"
    silent.ClearField("speed")
    silent.ClearField("pages")
    picture.take("a", 1.0, message(demand, member("w0", PREFILL), silent, member("w2", DECODE)))
    seen = picture.observe(MODEL)
    assert seen is not None
    assert (seen.prefill, seen.decode, seen.ready) == (1, 2, 2)
    assert seen.speed.is_known
    # It gets no role while it is silent, and the others get theirs.
    orders = role_orders(picture.workers(MODEL).values(), Counts(1, 2))
    assert {order.member_id for order in orders} == {"w0", "w2"}


def test_a_gateway_that_is_gone_is_not_waited_for() -> None:
    picture, demand = MeshPicture(), ModelDemand()
    for name in ("a", "b"):
        picture.take(name, 1.0, message(demand, member("w0", PREFILL)))
    for _ in range(3):
        demand.arrived()
    for name in ("a", "b"):
        picture.take(name, 2.0, message(demand, member("w0", PREFILL)))
    picture.forget("a")
    picture.take("b", 9.0, message(demand, member("w0", PREFILL)))
    seen = picture.observe(MODEL)
    assert seen is not None
    assert (seen.time_s, seen.requests) == (9.0, 6)
