"""Stages of a pipeline: which layers each has, and which models take them. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.pooling import load_pooling
from weft.checkpoint.transformers_config import TransformersConfig
from weft.contract.errors import ConfigError
from weft.contract.reports import PIPELINE


def layers_of_stages(num_layers: int, count: int) -> list[range]:
    """The layers of each stage. Where they cannot be divided evenly, the first stages have one
    more: the last one also has the LM head.
    """
    share, more = divmod(num_layers, count)
    ends = [(stage + 1) * share + min(stage + 1, more) for stage in range(count)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def stage_of_rank(rank: int, count: int, tp: int = 1) -> int:
    """The ranks of a stage are consecutive. Rank 0 is in the last stage, since it draws the tokens;
    the other stages follow in order.
    """
    return (rank // tp - 1) % count


def check_stages(
    model_dir: Path,
    config: ModelConfig,
    task: str,
    count: int,
    *,
    has_images: bool,
    has_own_pages: bool = False,
) -> None:
    """Checks that stages can serve a model.

    Args:
        task: As in `load_pooling`.
        has_images: Whether the engine loads the model's image tower.
        has_own_pages: Whether each stage has pages for its own layers alone, as on hosts and GPUs.

    Raises:
        ModelError, ConfigError: They cannot; the message says why, and what to set instead.
    """
    if count == 1:
        return
    task = load_pooling(model_dir, task).task
    parts = config.decoder
    shares_kv = any(config.kv_source(layer) != layer for layer in config.attention_layers)
    reasons = (
        (
            isinstance(config, TransformersConfig),
            f"{config.architecture} runs by transformers' code, which is not divided",
        ),
        (config.num_layers < count, f"the model has {config.num_layers} layers"),
        (task != "generate", f"the model serves the task {task}, whose vectors stages do not make"),
        (
            parts is not None and (parts.altup is not None or parts.per_layer is not None),
            f"layers of {config.architecture} read more than the residual stream",
        ),
        (shares_kv, f"layers of {config.architecture} read the K and V of other layers"),
        (has_images, "stages take no rows of images (language_model_only leaves images out)"),
    )
    for is_so, reason in reasons:
        if is_so:
            raise ConfigError(f"pp = {count}: {reason}; take pp = 1", param="pp")
    kinds = [layers for _, planes in config.page_planes for _, _, layers in planes]
    kinds += [list(parts.recurrent_layers)] if parts is not None and parts.recurrent_layers else []
    for number, own in enumerate(layers_of_stages(config.num_layers, count)):
        if has_own_pages and not all(set(own).intersection(layers) for layers in kinds):
            raise ConfigError(
                f"pp = {count}: layers {own.start} to {own.stop - 1}, those of stage {number}, "
                "lack a kind of the model's layers; take fewer stages",
                param="pp",
            )


def names_of_neighbours(rank: int, count: int, tp: int = 1) -> tuple[str, str]:
    """Names of the stages before and after a rank's, for messages."""
    stage, (place, shard) = stage_of_rank(rank, count, tp), divmod(rank, tp)
    before, after = (
        f"stage {other} (rank {(place + step) % count * tp + shard})"
        for other, step in ((stage - 1, -1), (stage + 1, 1))
    )
    return before, after


def describe_stages(config: ModelConfig, count: int, places: Sequence[str], tp: int = 1) -> str:
    """The stages in one line, for logs and status. `places` tells where each rank runs."""
    layers = layers_of_stages(config.num_layers, count)
    first_ranks = sorted(
        (stage_of_rank(rank, count, tp), rank) for rank in range(0, len(places), tp)
    )
    told = ", ".join(
        f"layers {layers[stage].start} to {layers[stage].stop - 1} on "
        f"{' and '.join(dict.fromkeys(places[rank : rank + tp]))}"
        for stage, rank in first_ranks
    )
    return f"{PIPELINE}{count} stages, {told}, which draws"
