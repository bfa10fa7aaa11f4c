"""Loading of a rank's share of the model and of the pool; all ranks run this code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from weft.engine.base.config import EngineConfig
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.checkpoint.dtypes import resolve_dtype
from weft.engine.executor.kv_format import dtype_of
from weft.engine.executor.local import RankPool
from weft.engine.executor.states import RankBlocks
from weft.engine.memory.layout import CacheLayout
from weft.engine.model.loader import LoadedModel, load_model
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shards import kv_heads_of, layout_of_rank
from weft.engine.parallel.shared import SharedGroup
from weft.kernels.peers import Peers

if TYPE_CHECKING:
    from weft.engine.parallel.device_peers import DevicePeers


class Others(Protocol):
    """One rank's interface to the other ranks during the start."""

    rank: int
    size: int
    group: SharedGroup
    store_path: str
    """See `weft.engine.parallel.device_peers.join`."""

    def agree(self, phase: str, number: int = 0, text: str = "") -> int:
        """See `Ranks.agree`."""
        ...

    def share(self, size: int) -> Segment:
        """See `Ranks.share`; the other ranks map the memory that rank 0 makes."""
        ...


def load_share(config: EngineConfig, others: Others, peers: Peers) -> LoadedModel:
    """This rank's share of the model's weights.

    Raises:
        ModelError, ConfigError: The weights cannot be used.
    """
    loaded = load_model(
        config.model_dir,
        config.dtype,
        config.device,
        quantization=config.quantization,
        dummy=config.dummy_weights,
        task=config.task,
        peers=peers,
    )
    others.agree("model", text=loaded.digest.hex())
    return loaded


def peers_of(
    others: Others, config: EngineConfig, device: torch.device
) -> SharedGroup | DevicePeers:
    """The means by which ranks add up partial sums: memory that all of them map, on GPUs that of
    the GPUs.

    Raises:
        ConfigError: The GPUs cannot map each other's memory.
    """
    if device.type == "cpu":
        return others.group
    from weft.engine.parallel.device_peers import DevicePeers, join

    model = ModelConfig.load(config.model_dir)
    dtype: torch.dtype = getattr(torch, resolve_dtype(config.dtype, config.device))
    sizes = model.hidden_size, dtype, model.num_embeddings
    ranks = join(others.rank, others.size, others.store_path)
    peers = DevicePeers(others.group, device, ranks, *sizes)
    others.agree("peers")
    return peers


def pool_of(
    others: Others, layout: CacheLayout, num_pages: int, device: torch.device
) -> tuple[CacheLayout, RankPool | None]:
    """The layout of this rank's pages, and its pool; None: the executor allocates it.

    On a CPU all ranks share one pool, in which each rank has its heads of every page. Code that
    moves whole pages therefore need not know of ranks.
    """
    if device.type != "cpu":
        return layout_of_rank(layout, others.size), None
    segment = others.share(num_pages * layout.page_bytes)
    whole = segment.tensor(layout.pool_shape(num_pages), dtype_of(layout.plane))
    heads = kv_heads_of(layout.plane.heads, others.rank, others.size)
    return layout, RankPool(whole, whole[:, heads])


def blocks_of(others: Others, layout: CacheLayout, num_blocks: int) -> RankBlocks | None:
    """The blocks of recurrent layers, which all ranks on a CPU share like the pool; None: the model
    has none.
    """
    if layout.states is None:
        return None
    whole: list[torch.Tensor] = []
    for part in layout.states.parts:
        shape = (num_blocks, layout.states.layers, *part.shape)
        segment = others.share(num_blocks * layout.states.layers * part.num_bytes)
        dtype: torch.dtype = getattr(torch, part.dtype)
        whole.append(segment.tensor(shape, dtype))
    own = tuple(part.chunk(others.size, dim=2)[others.rank] for part in whole)
    return RankBlocks(tuple(whole), own)
