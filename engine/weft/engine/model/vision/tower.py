"""A tower: from pixels of pictures to rows of the language model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from weft.checkpoint.vision_config import NUM_CHANNELS, VisionConfig
from weft.engine.model.layers.encoder import (
    EncoderAttention,
    EncoderMLP,
    PreNormLayer,
    Ragged,
)
from weft.engine.model.vision.budgets import PatchBudgets
from weft.engine.model.vision.connectors import (
    AnyNorm,
    Connector,
    product_spec,
    read_connector,
    read_norm,
)
from weft.engine.model.vision.layouts import Grid, Layout, PatchBatch, layout_of
from weft.engine.model.vision.patches import PatchEmbedding
from weft.engine.model.vision.positions import read_class_row
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights

_KEPT_LAYOUTS = 2
"""A layout has some hundred bytes for each patch."""


class VisionTower:
    """A `MediaEncoder` of a vision transformer and its connector, whole on every rank."""

    def __init__(
        self,
        config: VisionConfig,
        embedding: PatchEmbedding,
        first_norm: AnyNorm | None,
        layers: Sequence[PreNormLayer],
        last_norm: AnyNorm | None,
        connector: Connector,
        taps: Mapping[int, Connector],
        device: torch.device,
        class_row: torch.Tensor | None = None,
    ) -> None:
        """`taps` are the connectors of further rows by the layers whose results they take,
        `class_row`, [hidden], is before each picture's patches.
        """
        self.config = config
        self.digest = b""
        """Empty until all of the model is loaded."""
        self._embedding = embedding
        self._first_norm, self._last_norm = first_norm, last_norm
        self._layers = layers
        self._connector = connector
        self._taps = taps
        self._class_row = class_row

        def layout(grids: tuple[Grid, ...]) -> Layout:
            return layout_of(config, grids, device)

        self._layout = lru_cache(_KEPT_LAYOUTS)(layout)

    @classmethod
    def read(cls, weights: Weights, config: VisionConfig) -> VisionTower:
        """Reads a tower by its names in a checkpoint, of which `weights` has all parameters. A
        reader may note missing tensors until it is finished.
        """
        vit, names, taps = config.vit, config.names, config.taps
        body = _below(weights, names.towers, names.patches)
        in_connector = names.connector_norm or names.projection
        connector = _below(weights, names.connectors, in_connector)
        layers = body.at(names.layers)

        def norm(name: str) -> AnyNorm | None:
            return read_norm(body, name, vit.hidden_size, vit.norm) if name else None

        def tap(number: int) -> Connector:
            assert taps is not None, "only called for its layers"
            of_tap = body.at(names.taps).at(number)
            return read_connector(taps.connector, vit.hidden_size, names, of_tap, body)

        return cls(
            config,
            PatchEmbedding.read(body, config),
            norm(names.first_norm),
            [_layer(config, number, layers.at(number)) for number in range(vit.num_layers)],
            norm(names.last_norm),
            read_connector(config.connector, vit.hidden_size, names, connector, body),
            {layer: tap(number) for number, layer in enumerate(taps.layers if taps else ())},
            weights.device,
            read_class_row(body, config),
        )

    @property
    def row_width(self) -> int:
        return self.config.row_width

    @property
    def sees_both_ways(self) -> bool:
        return self.config.sees_both_ways

    def max_shape(self, num_rows: int) -> tuple[int, ...]:
        config = self.config
        if config.most_pixels is None:
            return (config.tile_size, config.tile_size, NUM_CHANNELS)
        side = config.square_size
        squares = max(1, min(num_rows, config.most_pixels // side**2))
        rows = math.isqrt(squares)
        return (rows * side, squares // rows * side, NUM_CHANNELS)

    def rows_of(self, shape: Sequence[int]) -> int:
        return self.cost_of(shape) // self.config.connector.factor**2

    def cost_of(self, shape: Sequence[int]) -> int:
        rows, columns = self.config.patches_of(shape)
        return rows * columns

    def encode(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows of pictures, in the model's dtype. On a CPU, and where products are in one order, a
        picture's rows do not depend on the others. Raises InvalidRequest for other pixels than the
        tower takes.
        """
        batch, order = self._batch_of(pictures)
        rows = self._compute(batch)
        return rows if order is None else rows.index_select(0, order)

    def budgets(self, max_cost: int) -> PatchBudgets:
        dtype, device = self._embedding.dtype, self._embedding.middle.device
        parts = self.config, self._batch_of, self._compute
        return PatchBudgets(*parts, max_cost, dtype, device)

    def _batch_of(self, pictures: Sequence[torch.Tensor]) -> tuple[PatchBatch, torch.Tensor | None]:
        """The batch, and the place of each of its rows in the order of pictures; None: they are in
        that order.
        """
        grids = tuple(self.config.patches_of(picture.shape) for picture in pictures)
        layout = self._layout(grids)
        x = self._embedding(pictures, grids, layout)
        batch = PatchBatch(
            x=x if self._class_row is None else layout.with_class(x, self._class_row),
            pictures=layout.pictures,
            windows=layout.windows,
            turns=layout.turns,
            patches=layout.patches,
        )
        return batch, layout.back

    def _compute(self, batch: PatchBatch) -> torch.Tensor:
        """[squares, row_width], in the batch's order."""
        whole = Ragged(batch.pictures, turns=batch.turns)
        windowed = whole
        if batch.windows is not None:
            windowed = Ragged(batch.windows, turns=batch.turns)
        windows, found = self.config.vit.windows, list[torch.Tensor]()
        x = batch.x if self._first_norm is None else self._first_norm(batch.x)
        for number, layer in enumerate(self._layers):
            is_full = windows is None or number in windows.full_layers
            x = layer(x, whole if is_full else windowed)
            if number in self._taps:
                found.append(self._taps[number](x))
        x = x if self._last_norm is None else self._last_norm(x)
        x = x if batch.patches is None else x.index_select(0, batch.patches)
        rows = self._connector(x)
        return rows if not found else torch.cat((rows, *found), dim=1)


def _below(weights: Weights, prefixes: tuple[str, ...], name: str) -> Weights:
    """The parameters below the first prefix that exists; the first one if none does."""
    found = (prefix for prefix in prefixes if weights.at(prefix).has(f"{name}.weight"))
    return weights.at(next(found, prefixes[0]))


def _layer(config: VisionConfig, number: int, weights: Weights) -> PreNormLayer:
    vit, names = config.vit, config.names
    size, has_bias, of_qk = vit.hidden_size, vit.has_bias, vit.qk_norm
    is_fused = len(names.qkv) == 1
    qkv = LinearSpec(
        names=names.qkv * 3 if is_fused else names.qkv,
        in_features=size,
        rows=(size,) * 3,
        bias=has_bias and vit.has_qkv_bias,
        fused=names.qkv[0] if is_fused else None,
    )
    return PreNormLayer(
        read_norm(weights, names.attention_norm, size, vit.norm),
        EncoderAttention(
            layer=number,
            num_heads=vit.num_heads,
            qkv=weights.linear(qkv),
            out=weights.linear(product_spec(names.o, size, size, bias=has_bias)),
            q_norm=None if of_qk is None else read_norm(weights, names.q_norm, size, of_qk),
            k_norm=None if of_qk is None else read_norm(weights, names.k_norm, size, of_qk),
            order=_order_of_pairs(config, weights.device) if vit.has_adjacent_pairs else None,
        ),
        read_norm(weights, names.mlp_norm, size, vit.norm),
        _mlp(config, number, weights),
        *(_scale(weights, name, size) for name in (names.attention_scale, names.mlp_scale) if name),
    )


def _order_of_pairs(config: VisionConfig, device: torch.device) -> torch.Tensor:
    """[3 * hidden]: where a file that has the elements of a rotated pair next to each other, and
    pairs of columns first, has those of q, k and v: halves of heads apart, and pairs of rows first.
    """
    size, dim = config.vit.hidden_size, config.vit.head_dim
    pairs = torch.arange(dim).view(2, dim // 4, 2).flip(0).permute(2, 0, 1).reshape(-1)
    rotated = (torch.arange(0, 2 * size, dim)[:, None] + pairs).reshape(-1)
    return torch.cat((rotated, torch.arange(2 * size, 3 * size))).to(device)


def _scale(weights: Weights, name: str, size: int) -> torch.Tensor:
    return weights.read([TensorSlice(name, (size,))])


def _mlp(config: VisionConfig, number: int, weights: Weights) -> EncoderMLP:
    vit, names = config.vit, config.names
    size, inner, has_bias = vit.hidden_size, vit.intermediate_size, vit.has_bias
    down = weights.linear(product_spec(names.down, inner, size, bias=has_bias))
    # On a CPU rows never depend on the rest of a batch.
    up = product_spec(names.up, size, inner, bias=has_bias)
    if vit.is_gated:
        up = LinearSpec(
            names=(names.gate, names.up), in_features=size, rows=(inner, inner), bias=has_bias
        )
    return EncoderMLP(
        layer=number,
        up=weights.linear(up),
        down=down,
        activation=vit.activation,
        is_gated=vit.is_gated,
        is_fixed=True,
    )
