"""Whisper's encoder: from a log-mel spectrogram to rows for the decoder, or for the places of
embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from weft.checkpoint.audio_config import FLOAT_BYTES, AudioConfig
from weft.contract.errors import InvalidRequest
from weft.engine.model.audio.parts import mlp, norm, product
from weft.engine.model.audio.projectors import Projector, read_projector
from weft.engine.model.layers.encoder import EncoderAttention, LayerNorm, PreNormLayer, Ragged
from weft.engine.model.pooled_heads import ACTIVATIONS
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.encoder_attention.spec import Bounds

_KERNEL = 3


class AudioTower:
    """A `MediaEncoder` of clips of at most one length, whole on every rank. A clip is float32
    [mels, frames] as bytes, uint8 [mels, frames, 4].
    """

    sees_both_ways = False

    def __init__(
        self,
        config: AudioConfig,
        convolutions: Sequence[tuple[torch.Tensor, torch.Tensor]],
        positions: torch.Tensor,
        layers: Sequence[PreNormLayer],
        last_norm: LayerNorm,
        projector: Projector | None = None,
    ) -> None:
        """Assembles the tower from its parts.

        Args:
            convolutions: Weight, [hidden, inputs, 3], and bias, [hidden], of both.
            positions: [num_positions, hidden], added before the first layer.
        """
        self.config = config
        self.digest = b""
        """Empty until all of the model is loaded."""
        self._convolutions, self._positions = convolutions, positions
        self._layers, self._last_norm = layers, last_norm
        self._projector = projector

    @classmethod
    def read(cls, weights: Weights, config: AudioConfig) -> AudioTower:
        """Reads a tower by its names in a checkpoint, of which `weights` has all parameters."""
        body, size = weights.at(config.names.tower), config.hidden_size

        def convolution(name: str, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
            weight = TensorSlice(f"{name}.weight", (size, inputs, _KERNEL))
            return body.read([weight]), body.read([TensorSlice(f"{name}.bias", (size,))])

        positions = TensorSlice("embed_positions.weight", (config.num_positions, size))
        layers = [_layer(config, number, body) for number in range(config.num_layers)]
        return cls(
            config,
            [convolution("conv1", config.num_mels), convolution("conv2", size)],
            body.read([positions]),
            layers,
            norm(body, "layer_norm", size),
            read_projector(config, weights),
        )

    @property
    def row_width(self) -> int:
        return self.config.row_width

    def max_shape(self, num_rows: int) -> tuple[int, ...]:
        config = self.config
        frames = config.num_frames
        if config.takes_lengths:
            fewest = config.fewest_frames
            frames = max(fewest, min(frames, fewest * num_rows))
        return (config.num_mels, frames, FLOAT_BYTES)

    def rows_of(self, shape: Sequence[int]) -> int:
        return self.config.rows_of(self._frames(shape))

    def cost_of(self, shape: Sequence[int]) -> int:
        return self.config.positions_of(self._frames(shape))

    def encode(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows of clips, in the model's dtype. On a CPU a clip's rows do not depend on the
        others.
        """
        config = self.config
        x = torch.cat([self._embedded(clip) for clip in pictures])
        counts = [self.cost_of(clip.shape) for clip in pictures]
        ends = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        batch = Ragged(Bounds.of(ends.to(x.device)))
        for layer in self._layers:
            x = layer(x, batch)
        if self._projector is None:
            rows = self._last_norm(x).view(len(pictures), config.num_positions, -1)
            return F.pad(rows, (0, 0, 0, config.num_rows - config.num_positions)).flatten(0, 1)
        joined = self._projector.joined
        if any(count % joined for count in counts):
            # A clip's last positions that make no row are dropped.
            x = torch.cat([part[: len(part) // joined * joined] for part in torch.split(x, counts)])
        return self._projector(x, self._last_norm)

    def _frames(self, shape: Sequence[int]) -> int:
        """Raises InvalidRequest for a shape that the tower does not take."""
        config, most = self.config, self.config.num_frames
        fewest = config.fewest_frames
        is_clip = len(shape) == 3 and (shape[0], shape[2]) == (config.num_mels, FLOAT_BYTES)
        if is_clip and fewest <= shape[1] <= most:
            return shape[1]
        frames = f"{fewest} to {most}" if fewest < most else most
        raise InvalidRequest(
            f"a clip has the shape {list(shape)}; this model takes [{config.num_mels}, {frames}, "
            f"{FLOAT_BYTES}]",
            stage="validate",
            param="spans",
        )

    def _embedded(self, clip: torch.Tensor) -> torch.Tensor:
        positions = self.cost_of(clip.shape)
        (first, first_bias), (second, second_bias) = self._convolutions
        activate = ACTIVATIONS["gelu"]
        x = clip.contiguous().view(torch.float32).squeeze(-1).to(first.dtype)
        x = activate(F.conv1d(x[None], first, first_bias, padding=1))
        x = activate(F.conv1d(x, second, second_bias, stride=2, padding=1))
        return x[0].t()[:positions] + self._positions[:positions]


def _layer(config: AudioConfig, number: int, body: Weights) -> PreNormLayer:
    weights, size = body.at("layers").at(number), config.hidden_size
    attention, names = weights.at("self_attn"), ("q_proj", "k_proj", "v_proj")
    return PreNormLayer(
        norm(weights, "self_attn_layer_norm", size),
        EncoderAttention(
            layer=number,
            num_heads=config.num_heads,
            qkv=product(attention, names, size, size),
            out=product(attention, ("out_proj",), size, size),
        ),
        norm(weights, "final_layer_norm", size),
        mlp(weights, number, (size, config.intermediate_size)),
    )
