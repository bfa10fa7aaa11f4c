"""The projections that adapters may change under an engine's settings. No torch."""

from __future__ import annotations

from weft.checkpoint.adapters.names import VOCABULARY
from weft.checkpoint.adapters.projections import Projection, projections_of
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ConfigError
from weft.engine.base.config import EngineConfig


def adapted_projections(config: EngineConfig, model: ModelConfig) -> tuple[Projection, ...]:
    """Raises ConfigError if the model lacks projections that the settings name."""
    found = projections_of(model, config.lora_projections, config.tp, config.ep)
    kinds = {part.kind for part in found}
    missing = [name for name in VOCABULARY if name not in kinds]
    if config.lora_whole_matrices and len(missing) == len(VOCABULARY):
        raise ConfigError(
            f"lora_whole_matrices = {config.lora_whole_matrices}: lora_projections names neither "
            f"{' nor '.join(VOCABULARY)}",
            param="lora_whole_matrices",
        )
    if config.lora_added_tokens and missing:
        raise ConfigError(
            f"lora_added_tokens = {config.lora_added_tokens}: lora_projections does not name "
            f"{' and '.join(missing)}",
            param="lora_added_tokens",
        )
    return found
