"""Which workers change their role, so that there are as many as a plan wants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.planner.observe import DECODES, PREFILLS
from weft.planner.policy import Plan
from weft.v1 import mesh_pb2


class RoleOrder(NamedTuple):
    member_id: str
    role: str


def role_orders(members: Iterable[mesh_pb2.MeshMember], plan: Plan) -> list[RoleOrder]:
    """The roles that workers of both should have, those first that change. The idlest change, and
    all are told, since each order renews a lease. With fewer workers than wanted, both roles lack
    alike, and one always decodes.
    """
    known = list(members)
    able = [one for one in known if one.HasField("role_state") and one.healthy]
    if not able:
        return []
    fixed = [one for one in known if not one.HasField("role_state")]
    fixed_prefill = sum(one.role in PREFILLS for one in fixed)
    fixed_decode = sum(one.role in DECODES for one in fixed)
    prefill = max(0, plan.prefill - fixed_prefill)
    decode = max(0, plan.decode - fixed_decode)
    if prefill + decode > len(able):
        prefill = round(len(able) * prefill / (prefill + decode))
    if not fixed_decode:
        prefill = min(prefill, len(able) - 1)
    # What is not wanted decodes: nobody is stopped here.
    order = sorted(able, key=lambda one: (one.role not in PREFILLS, one.running_requests))
    wanted = [
        RoleOrder(one.member_id, "prefill" if at < prefill else "decode")
        for at, one in enumerate(order)
    ]
    now = {one.member_id: one.role for one in able}
    names = {mesh_pb2.MEMBER_ROLE_PREFILL: "prefill", mesh_pb2.MEMBER_ROLE_DECODE: "decode"}
    # A worker begins to decode before another one ceases to.
    return sorted(
        wanted, key=lambda one: (names.get(now[one.member_id]) == one.role, one.role == "prefill")
    )
