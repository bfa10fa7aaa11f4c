"""A worker's defaults for adapters: what those that are registered or expected need."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from weft.checkpoint.adapters.needs import AdapterNeeds, needs_of
from weft.checkpoint.adapters.projections import EXPERTS, SHARED_EXPERTS, default_projections
from weft.checkpoint.config import ModelConfig
from weft.common.adapters.registry import Registry
from weft.common.worker.settings import WorkerSettings
from weft.contract.errors import WeftError
from weft.engine.base.config import SETTINGS, EngineConfig

_log = logging.getLogger(__name__)
_MAX_RANK = int(SETTINGS["max_lora_rank"].le or 0)
_MAX_READ = 256
"""Most registered adapters that are read at a start, the newest ones: each takes about 20 ms."""


def with_adapter_needs(
    settings: WorkerSettings, config: EngineConfig, *, is_strict: bool = False
) -> EngineConfig:
    """The engine's settings, in which a worker without `lora_projections` can hold the adapters
    that are registered for its model and those in `expected_adapters`.

    An adapter that cannot be read is logged, and its load will fail. With `is_strict`, an expected
    one raises.

    Raises:
        WeftError: The registry, or with `is_strict` an expected adapter, cannot be read.
    """
    root = settings.adapter_root
    if root is None or settings.lora_projections:
        return config
    registry = Registry(root)
    entries = [
        entry
        for entry in registry.read().entries
        if entry.model == settings.served_name and entry.state != "retired"
    ]
    newest = sorted(entries, key=lambda entry: entry.generation)[-_MAX_READ:]
    registered = list(dict.fromkeys(registry.directory(entry.digest_bytes) for entry in newest))
    expected = [root / path for path in settings.expected_adapters]
    if not registered and not expected:
        return config
    model = ModelConfig.load(config.model_dir)
    needs: list[AdapterNeeds] = []
    for folder in (*registered, *expected):
        try:
            needs.append(needs_of(folder, config.model_dir, model, _MAX_RANK))
        except WeftError as error:
            if is_strict and folder in expected:
                raise
            _log.warning("what an adapter needs is not known: %s", error.message)
    return with_needs(config, model, needs)


def with_needs(
    config: EngineConfig, model: ModelConfig, needs: Iterable[AdapterNeeds]
) -> EngineConfig:
    """Settings under which the default projections and all of these adapters can be held."""
    every = list(needs)
    names = {name for one in every for name in one.projections}
    if EXPERTS in names:
        names.discard(SHARED_EXPERTS)  # They hold every form of adapters of experts.
    values: dict[str, Any] = {}
    if names:
        values["lora_projections"] = (*default_projections(model), *sorted(names))
    if (rank := max((one.rank for one in every), default=0)) > config.max_lora_rank:
        values["max_lora_rank"] = rank
    num_whole = min(sum(one.has_whole_matrix for one in every), config.max_loras)
    if config.tp == 1 and num_whole > config.lora_whole_matrices:
        values["lora_whole_matrices"] = num_whole
    added = max((one.num_added_tokens for one in every), default=0)
    if added > config.lora_added_tokens:
        values["lora_added_tokens"] = added
    return replace(config, **values)
