"""A worker's defaults for adapters: what those that are registered or expected need."""

from __future__ import annotations

import logging

from weft.checkpoint.adapters.needs import AdapterNeeds, needs_of, with_needs
from weft.checkpoint.config import ModelConfig
from weft.common.adapters.registry import Registry
from weft.common.worker.settings import WorkerSettings
from weft.contract.errors import WeftError
from weft.engine.base.config import EngineConfig

_log = logging.getLogger(__name__)


def with_adapter_needs(
    settings: WorkerSettings, config: EngineConfig, *, is_strict: bool = False
) -> EngineConfig:
    """The engine's settings, in which a worker without `lora_projections` can hold the adapters
    that are registered for its model and those in `expected_adapters`.

    Args:
        settings: The worker's.
        config: The engine's settings that follow from them.
        is_strict: Whether an expected adapter that cannot be read is an error; else it is logged,
            and its load will fail.

    Raises:
        WeftError: The registry cannot be read, or see `is_strict`.
    """
    root = settings.adapter_root
    if root is None or settings.lora_projections:
        return config
    registry = Registry(root)
    registered = [
        registry.directory(entry.digest_bytes)
        for entry in registry.read().entries
        if entry.model == settings.served_name and entry.state != "retired"
    ]
    expected = [root / path for path in settings.expected_adapters]
    if not registered and not expected:
        return config
    model = ModelConfig.load(config.model_dir)
    needs: list[AdapterNeeds] = []
    for folder in (*registered, *expected):
        try:
            needs.append(needs_of(folder, config.model_dir, model))
        except WeftError as error:
            if is_strict and folder in expected:
                raise
            _log.warning("what an adapter needs is not known: %s", error.message)
    return with_needs(config, model, needs)
