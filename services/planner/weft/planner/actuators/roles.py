"""Changes the roles of workers that can prefill and decode. No worker is started or stopped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.contract.codec.pairs import MEMBER_ROLES
from weft.contract.errors import PeerUnavailable, WeftError
from weft.planner.actuators.base import Members
from weft.planner.forecast import Counts
from weft.planner.gateways import GatewayCalls
from weft.planner.observe import DECODES, PREFILLS
from weft.v1 import mesh_pb2


class RoleOrder(NamedTuple):
    member_id: str
    role: str


class RoleActuator:
    """Sets roles with leases: without a planner, workers are of both roles again."""

    def __init__(self, calls: GatewayCalls, lease_s: float) -> None:
        self._calls = calls
        self._lease_s = lease_s

    async def ordered(self, model: str, workers: Members) -> Counts | None:
        """None: a role belongs to its worker, and ends with it or with its lease."""
        return None

    async def order(
        self, model: str, wanted: Counts, workers: Members, *, apart: bool = True
    ) -> str:
        done: list[str] = []
        failed: list[str] = []
        for order in role_orders(workers.values(), wanted if apart else None):
            try:
                before = await self._calls.set_role(order.member_id, order.role, self._lease_s)
            except WeftError as error:
                failed.append(f"{order.member_id}: {error.message}")
                continue
            if before != order.role:
                done.append(f"{order.member_id}: {order.role} (was {before})")
        if failed:
            raise PeerUnavailable(f"roles were not set: {'; '.join(failed)}", stage="role")
        return "; ".join(done)

    async def close(self) -> None:
        pass


def role_orders(members: Iterable[mesh_pb2.MeshMember], wanted: Counts | None) -> list[RoleOrder]:
    """The roles that workers of both should have, those first that change. The idlest change, and
    all are told, since each order renews a lease. With fewer workers than wanted, both roles lack
    alike, and one always decodes. None: all have both roles.
    """
    known = list(members)
    able = [one for one in known if one.HasField("role_state") and one.healthy]
    if not able:
        return []
    if wanted is None:
        return [RoleOrder(one.member_id, "both") for one in able]
    fixed = [one for one in known if not one.HasField("role_state")]
    fixed_prefill = sum(one.role in PREFILLS for one in fixed)
    fixed_decode = sum(one.role in DECODES for one in fixed)
    prefill = max(0, wanted.prefill - fixed_prefill)
    decode = max(0, wanted.decode - fixed_decode)
    if prefill + decode > len(able):
        prefill = round(len(able) * prefill / (prefill + decode))
    if not fixed_decode:
        prefill = min(prefill, len(able) - 1)
    # What is not wanted decodes: nobody is stopped here.
    order = sorted(able, key=lambda one: (one.role not in PREFILLS, one.running_requests))
    orders = [
        RoleOrder(one.member_id, "prefill" if at < prefill else "decode")
        for at, one in enumerate(order)
    ]
    now = {one.member_id: one.role for one in able}
    # A worker begins to decode before another one ceases to.
    return sorted(
        orders,
        key=lambda one: (MEMBER_ROLES[now[one.member_id]] == one.role, one.role == "prefill"),
    )
