"""Heads that turn pooled hidden states into vectors: dense layers and classification heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional
from weft.checkpoint.pooling import ActivationName, DenseConfig, PoolingConfig
from weft.contract.errors import ModelError
from weft.contract.tasks import Output
from weft.engine.model.weights.checkpoint import Checkpoint
from weft.engine.model.weights.random_weights import RandomWeights
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice
from weft.engine.model.weights.weights import Weights

ACTIVATIONS: Mapping[ActivationName, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """norm(activation(weight @ x + bias)) in float32, since rows are few and are final results."""

    weight: torch.Tensor
    """[out, in] float32."""
    bias: torch.Tensor | None = None
    """[out] float32."""
    activation: ActivationName = "identity"
    norm: torch.Tensor | None = None
    """[out] float32: weight of a layer norm after the activation, or None."""
    norm_bias: torch.Tensor | None = None
    norm_eps: float = 1e-5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[P, in] float32 -> [P, out] float32."""
        y = ACTIVATIONS[self.activation](functional.linear(x, self.weight, self.bias))
        if self.norm is None:
            return y
        return functional.layer_norm(y, self.norm.shape, self.norm, self.norm_bias, self.norm_eps)


class DenseLayers:
    """A sequence of dense layers. An empty one leaves vectors unchanged."""

    def __init__(self, layers: Sequence[DenseLayer] = ()) -> None:
        self._layers = tuple(layers)

    @property
    def out_features(self) -> int | None:
        """Width of the output; None: the width of the input."""
        return self._layers[-1].weight.shape[0] if self._layers else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[P, in] float32 -> [P, out] float32."""
        for layer in self._layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class PooledHeads:
    embedding: DenseLayers
    """Head of embeddings, one vector per prompt."""
    classes: DenseLayers | None
    """None: the model has no classification head."""
    tokens: Mapping[Output, DenseLayers] = field(default_factory=dict)
    """Heads of single tokens, by their output."""


def read_dense(
    weights: Weights,
    name: str,
    out_features: int,
    in_features: int,
    *,
    bias: bool = True,
    activation: ActivationName = "identity",
) -> DenseLayer:
    part = weights.read(
        [TensorSlice(f"{name}.weight", (out_features, in_features))], dtype=torch.float32
    )
    added = None
    if bias:
        added = weights.read([TensorSlice(f"{name}.bias", (out_features,))], dtype=torch.float32)
    return DenseLayer(weight=part, bias=added, activation=activation)


def read_embedding_head(
    config: PoolingConfig, device: torch.device, *, dummy: bool = False
) -> DenseLayers:
    """Reads the dense layers of a model's embeddings, each from a separate folder. Raises
    ModelError if a file is missing, or has other shapes.
    """
    layers = []
    for dense in config.dense:
        if dummy:
            layers.append(_dense_layer(RandomWeights(device), dense, device))
            continue
        with Checkpoint(dense.folder) as file:
            layers.append(_dense_layer(file, dense, device))
            file.finish()
    return DenseLayers(layers)


def _dense_layer(reader: CheckpointReader, dense: DenseConfig, device: torch.device) -> DenseLayer:
    shape = (dense.out_features, dense.in_features)
    return DenseLayer(
        weight=_read(reader, "linear.weight", shape, device),
        bias=_read(reader, "linear.bias", shape[:1], device) if dense.bias else None,
        activation=dense.activation,
    )


def read_token_heads(
    config: PoolingConfig, in_features: int, device: torch.device, *, dummy: bool = False
) -> dict[Output, DenseLayers]:
    """Reads the heads of single tokens, in the arithmetic of BGE-M3 (arXiv 2402.03216, 3.2). Raises
    ModelError if a file is malformed, or has other tensors.
    """
    heads: dict[Output, DenseLayers] = {}
    for output, path in config.token_heads.items():
        width = 1 if output == "sparse" else None
        if dummy:
            shape = (width or in_features, in_features)
            tensors = {"weight": torch.randn(shape), "bias": torch.randn(shape[:1])}
        else:
            tensors = _load_tensors(path)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        rows = width or shapes.get("weight", (0,))[0]
        if shapes != {"weight": (rows, in_features), "bias": (rows,)}:
            wanted = f"weight [{width or 'any'}, {in_features}] and a bias"
            raise ModelError(f"{path}: expected {wanted}, but it has {shapes}")
        heads[output] = DenseLayers(
            [
                DenseLayer(
                    weight=tensors["weight"].to(device, torch.float32),
                    bias=tensors["bias"].to(device, torch.float32),
                    activation="relu" if output == "sparse" else "identity",
                )
            ]
        )
    return heads


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a file by name. A file in torch's format may contain nothing but tensors."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # bge-m3 publishes its heads in torch's pickled format alone. With `weights_only`, torch's
        # restricted reader builds tensors and plain containers; it calls nothing a file names.
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        hint = "save its tensors `weight` and `bias` as safetensors"
        raise ModelError(f"{path}: cannot be read; {hint}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(v, torch.Tensor) for v in found.values()):
        raise ModelError(f"{path}: expected named tensors")
    return {str(name): tensor for name, tensor in found.items()}


def _read(
    reader: CheckpointReader, name: str, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    out = torch.empty(shape, dtype=torch.float32, device=device)
    reader.read_into(TensorSlice(name, shape), out)
    return out
