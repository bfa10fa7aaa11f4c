"""Handles and commands of an engine to a filler."""

from __future__ import annotations

from weft.contract.fills import FillCommand
from weft.contract.handle import KvHandle, NixlTargetInfo
from weft.contract.token_ids import token_ids


def nixl_target(page_bytes: int, num_pages: int, *, memory_type: str = "DRAM") -> NixlTargetInfo:
    """Memory of an agent that is nowhere."""
    return NixlTargetInfo(
        version="1",
        agent_name="a",
        agent_metadata=b"m",
        agent_metadata_digest=bytes(32),
        base_address=page_bytes,
        page_bytes=page_bytes,
        num_pages=num_pages,
        memory_type=memory_type,
    )


def fill_handle(
    lease_id: bytes,
    *,
    page_size: int = 4,
    filler_epoch: int = 2,
    lease_s: float = 10.0,
    nixl: NixlTargetInfo | None = None,
) -> KvHandle:
    """Asks for four tokens."""
    return KvHandle(
        owner_id="owner",
        owner_epoch=1,
        lease_id=lease_id,
        lease_s=lease_s,
        namespace=bytes(32),
        cache_salt="",
        page_size=page_size,
        tokens=token_ids([1, 2, 3, 4]),
        start_token=0,
        end_token=4,
        pages=list(range(1, 1 + 4 // page_size)),
        filler_epoch=filler_epoch,
        nixl=nixl,
    )


def fill_command(action: str, lease_id: bytes, address: str) -> FillCommand:
    """A command to a prefill worker."""
    return FillCommand(
        lease_id=lease_id,
        worker_id="p0",
        address=address,
        kind="prefill",
        action=action,
        handle=fill_handle(lease_id) if action == "start" else None,
    )
