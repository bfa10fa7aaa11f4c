"""Describes an engine to its worker, when it starts."""

from __future__ import annotations

import importlib.metadata
import os
import secrets

from weft.contract.layout import CacheLayout
from weft.contract.reports import EngineInfo
from weft.contract.start_work import START_WORK
from weft.engine.base.config import EngineConfig
from weft.engine.model.loader import LoadedModel
from weft.engine.transfer.transport import Transport
from weft.pages.transfer.nixl_binding import nixl_version


def describe_engine(
    config: EngineConfig,
    loaded: LoadedModel,
    layout: CacheLayout,
    num_pages: int,
    max_tokens: int,
    transport: Transport,
    notices: list[str],
) -> EngineInfo:
    """Describes an engine to its worker.

    Args:
        num_pages: Pages of the pool, the null page included.
        max_tokens: Length of the longest request.
    """
    return EngineInfo(
        epoch=secrets.randbits(64) | 1,
        model_digest=loaded.digest,
        dtype=loaded.dtype,
        weight_format=loaded.described_format,
        vocab_size=loaded.config.vocab_size,
        max_context_tokens=max_tokens,
        num_pages=num_pages - 1,
        page_size=config.page_size,
        page_bytes=layout.page_bytes,
        layers=layout.plane.layers,
        kv_heads=layout.plane.heads,
        draft=layout.plane.draft,
        head_dim=layout.plane.dim,
        kv_parts=layout.plane.parts,
        further_planes={
            plane.name: (plane.layers, plane.heads, plane.dim)
            for plane in [plane for group in layout.groups for plane in group.planes][1:]
        },
        states=layout.states,
        transports=transport.transports,
        transport_detail=transport.describe(),
        incoming=transport.incoming,
        outgoing=transport.outgoing,
        versions=_versions(),
        notices=notices,
        start_work_seconds=START_WORK.seconds(),
        engine_pid=os.getpid(),
        task=loaded.pooling.task,
        embedding_size=loaded.embedding_size if loaded.pooling.task == "embed" else 0,
        num_labels=loaded.config.num_labels,
        lacks_encoder=loaded.encoder is None and loaded.config.tower is not None,
        max_loras=config.max_loras if config.enable_lora else 0,
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
    )


def _versions() -> dict[str, str]:
    versions = {"nixl": nixl_version()}
    for name in ("weft", "torch"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return versions
