"""Dispatches what arrived over the data transport since the last turn."""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.base import faults
from weft.engine.sources.filler import Filler
from weft.engine.sources.owner import OwnerFills
from weft.engine.sources.store import StoreLink
from weft.engine.transfer.chunks import ChunkPosted, ShipResult
from weft.engine.transfer.nixl_wire import Notification
from weft.engine.transfer.transport import Transport


def take_transfers(
    transport: Transport, fills: OwnerFills, filler: Filler, store: StoreLink | None
) -> None:
    """Takes fillers' notifications, requested digests, and the outcomes of shipping."""
    if fills.num_open:
        for notification in transport.notifications():
            arrived: Sequence[Notification] = (notification,)
            if faults.FILL_NOTIFY.is_armed:
                arrived = faults.FILL_NOTIFY.repeat(notification)
            for found in arrived:
                fills.on_notification(found)
    for tag, digests, pages in transport.port.take():
        if isinstance(tag, tuple):
            fills.on_digested(*tag, digests)
        elif store is not None:
            store.on_digested(tag, digests, pages)
    for item in transport.shipper.take():
        if isinstance(item, ShipResult):
            filler.on_shipped(item)
        elif isinstance(item, ChunkPosted):
            filler.on_posted(item)
        else:
            filler.on_data(*item)
