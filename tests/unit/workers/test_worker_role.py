"""The role of a worker of both, with its lease and its proof."""

from __future__ import annotations

import pytest
from weft.common.worker.role import WorkerRoleState
from weft.contract.errors import InvalidRequest, RoleFixed
from weft.contract.fills import FillReply
from weft.contract.handle import FillEvent
from weft.contract.messages import Outbox
from weft.contract.submits import Accepted, GatewayBatch
from weft.v1 import worker_pb2


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def is_proved(state: WorkerRoleState) -> bool:
    told = state.describe()
    assert told is not None
    return told.proved


ACCEPTED = Outbox(
    gateways=[GatewayBatch(gateway=1, accepted=[Accepted(request_id="r", attempt=1)])]
)
FIRST_TOKENS = Outbox(gateways=[GatewayBatch(gateway=1, has_first_tokens=True)])
FILL = Outbox(fill_replies=[FillReply(stream=1, event=FillEvent(kind="accepted"))])


def test_a_lease_ends_in_both() -> None:
    clock = Clock()
    state = WorkerRoleState("both", clock)
    assert state.set("prefill", 5.0) == "both"
    clock.now_s += 4.0
    told = state.describe()
    assert told is not None
    assert (told.role, told.lease.ToSeconds()) == (worker_pb2.WORKER_ROLE_PREFILL, 1)
    # Renewed, which is no change.
    assert state.set("prefill", 5.0) == "prefill"
    clock.now_s += 4.0
    assert (state.now, state.changes) == ("prefill", 1)
    clock.now_s += 1.0
    assert (state.now, state.changes) == ("both", 2)
    state.set("decode", None)
    clock.now_s += 1e6
    assert state.now == "decode"


def test_only_new_work_of_the_role_proves_it() -> None:
    state = WorkerRoleState("both", Clock())
    state.set("prefill", None)
    state.on_outbox(ACCEPTED)
    state.on_outbox(FIRST_TOKENS)
    assert not is_proved(state)
    state.on_outbox(FILL)
    assert is_proved(state)
    state.set("decode", None)
    # A request that ran before gets its first token.
    state.on_outbox(FIRST_TOKENS)
    state.on_outbox(FILL)
    assert not is_proved(state)
    state.on_outbox(ACCEPTED)
    state.on_outbox(FIRST_TOKENS)
    assert is_proved(state)
    state.set("decode", 60.0)
    assert is_proved(state)


def test_a_worker_of_one_role_keeps_it() -> None:
    state = WorkerRoleState("decode", Clock())
    with pytest.raises(RoleFixed, match="--role both"):
        state.set("prefill", None)
    assert state.describe() is None


@pytest.mark.parametrize("lease_s", [0.0, 1e9])
def test_leases_have_bounds(lease_s: float) -> None:
    with pytest.raises(InvalidRequest):
        WorkerRoleState("both", Clock()).set("prefill", lease_s)
