"""Commands of an engine to a filler."""

from __future__ import annotations

from weft.engine.messages import FillCommand
from weft.engine.transfer.handle import KvHandle


def fill_command(action: str, lease_id: bytes, address: str) -> FillCommand:
    handle = KvHandle(
        owner_id="owner",
        owner_epoch=1,
        lease_id=lease_id,
        lease_s=10.0,
        namespace=bytes(32),
        cache_salt="",
        page_size=4,
        tokens=[1, 2, 3, 4],
        start_token=0,
        end_token=4,
        pages=[1],
        filler_epoch=2,
        nixl=None,
    )
    return FillCommand(
        lease_id=lease_id,
        worker_id="p0",
        address=address,
        kind="prefill",
        action=action,
        handle=handle if action == "start" else None,
    )
