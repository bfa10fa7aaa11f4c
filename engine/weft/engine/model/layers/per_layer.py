"""A second embedding, of which each layer adds a different part."""

from __future__ import annotations

import torch
from weft.engine.model.layers.layer import shape_of
from weft.engine.model.step import Step
from weft.kernels.ops.activation import activate
from weft.kernels.ops.activation.spec import Activation
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.stream.additions import Normed, Sum


class PerLayerEmbedding:
    """Additions of layers by token: a row of a table and a projection of the usual embedding, in
    equal parts (Gemma 3n's per-layer embeddings).
    """

    def __init__(
        self, table: torch.Tensor, proj: LinearWeight, norm: Norm, num_layers: int, dim: int
    ) -> None:
        """`P` is the number of elements of a layer's part (`dim`).

        Args:
            table: [vocab, layers * P].
            proj: [hidden] -> [layers * P].
            norm: Norm of the projection, for each layer's part by itself.
        """
        self._table, self._proj, self._norm = table, proj, norm
        self._shape = num_layers, dim
        self._factors = table.new_tensor([dim**0.5, proj.in_features**-0.5, 2**-0.5])

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Token ids, [T] int64, and the embeddings as they enter the stream, [T, hidden] -> [T,
        layers, P].
        """
        of_table, of_projection, of_both = self._factors.unbind()
        # Tokens of images and audio have no rows. In Gemma 3n and 4 they use row 0.
        token_ids = torch.where(token_ids < self._table.shape[0], token_ids, 0)
        by_token = self._table.index_select(0, token_ids) * of_table
        projected = (linear(hidden, self._proj) * of_projection).view(-1, self._shape[1])
        both: torch.Tensor = self._norm(projected).view(by_token.shape) + by_token
        both = both * of_both
        return both.view(-1, *self._shape)


class PerLayerPart:
    """proj(activation(gate(x)) * part), where the step brings the layer's part: a `FeedForward`."""

    def __init__(
        self,
        layer: int,
        columns: slice,
        gate: LinearWeight,
        proj: LinearWeight,
        activation: Activation,
    ) -> None:
        """`columns` of the layer's part are this rank's."""
        self._layer, self._columns, self._gate, self._proj = layer, columns, gate, proj
        self._activation: Activation = activation

    def __call__(self, x: Normed, step: Step) -> Sum:
        assert step.per_layer is not None, "the stack computes the parts of all layers"
        gate = activate(x.linear(self._gate, None), self._activation, is_gated=False)
        return Sum(gate * step.per_layer[:, self._layer, self._columns], self._proj, None)

    def folds(self, rows: int, step: Step) -> bool:
        return False

    def shape_key(self) -> object:
        return PerLayerPart, shape_of(self._gate), shape_of(self._proj)
