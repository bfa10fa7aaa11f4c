"""Recurrent layers and gated attention divided among ranks: their parts add up to the whole."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.parts import DecoderConfig
from weft.engine.model.archs.decoder import read_mixer
from weft.engine.model.layers.rotary import Rotaries
from weft.engine.model.model_reader import open_checkpoint
from weft.engine.model.stage import WHOLE, ModelShare
from weft.engine.model.step import Step
from weft.engine.model.weights.schemes.plain import PlainScheme
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear import linear
from weft.kernels.ops.stream.additions import Normed, Sum
from weft.testing.models.families import make_family
from weft.testing.models.paging import PagedRequest, PlainStates

ROWS, SIZE = 11, 2


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3_next", {}),
        ("qwen3_5", {}),
        ("bamba", {"mamba_n_groups": 2}),
        ("nemotron_h", {}),
        ("lfm2", {}),
        ("kimi_linear", {"linear_num_heads": 4}),
    ],
)
def test_parts_of_ranks_add_up(name: str, fields: dict[str, int], tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    path = make_family(name, tmp_path, seed, **fields)
    config = ModelConfig.load(path)
    parts = config.decoder
    assert parts is not None
    layer = parts.recurrent_layers[0]
    x = torch.randn(ROWS, config.hidden_size)
    whole = result_of(path, config, parts, layer, x)
    ranks = [ModelShare(peers=SimpleNamespace(rank=rank, size=SIZE)) for rank in range(SIZE)]
    shares = [result_of(path, config, parts, layer, x, share) for share in ranks]
    torch.testing.assert_close(sum(shares), whole, rtol=1e-4, atol=1e-5)


def result_of(
    path: Path,
    config: ModelConfig,
    parts: DecoderConfig,
    layer: int,
    x: torch.Tensor,
    share: ModelShare = WHOLE,
) -> torch.Tensor:
    """[ROWS, hidden]: a rank's part of what a layer's mixer adds to rows that begin a context."""
    with open_checkpoint(path) as checkpoint:
        weights = Weights(
            checkpoint, PlainScheme(), torch.float32, torch.device("cpu"), share=share
        )
        bodies = [weights.at(body) for body in config.names.bodies]
        body = next(b for b in bodies if b.has(f"{config.names.embedding}.weight"))
        number = config.names.blocks[layer][0] if config.names.blocks else layer
        rotaries = Rotaries(config.rotary_dim, 64, torch.device("cpu"), weights.constant)
        mixer = read_mixer(config, parts, layer, body.at("layers").at(number), rotaries)
    plane = mixer.state_plane(len(parts.recurrent_layers))  # type: ignore[attr-defined]
    empty = torch.empty(0, dtype=torch.int64)
    step = Step(
        token_ids=empty,
        positions=torch.arange(ROWS),
        groups=(),
        logits_rows=empty,
        states=PlainStates(plane, 8).step([(PagedRequest(), ROWS)]),
    )
    pending = mixer.attend(mixer.write(Normed(x), step, empty), step, empty)
    assert isinstance(pending, Sum)
    return linear(pending.x, pending.w)
