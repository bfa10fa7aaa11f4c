"""A checked PEFT `adapter_config.json` of a LoRA adapter. No torch.

Names are matched as PEFT matches them (peft 0.21: `check_target_module_exists` and
`get_pattern_key`), so that an adapter changes the same modules here as there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.adapters.files import CONFIG_FILE
from weft.checkpoint.adapters.patterns import is_quick, match
from weft.contract.errors import AdapterError

ALL_LINEAR = "all-linear"

_UNLIKE_RE = re.compile(r"\[\[:|(?<!\\)\{(?!\d+(?:,\d*)?\}|,\d+\})")
"""Forms that `regex`, the library used here, reads differently from PEFT's `re`."""
_LAYER_OF = r".*?\.[^.]*\.(?P<layer>\d+)\."

VARIANTS: Mapping[str, str] = {
    "use_dora": "DoRA",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "layer_replication": "layer replication",
    "lora_bias": "a bias of lora_B",
    "monteclora_config": "Monte Carlo LoRA",
    "megatron_config": "Megatron's layers",
}
"""Fields of LoRA variants with different arithmetic; a falsy value means that the variant is
off.
"""

_INITIALISED = "init_lora_weights"
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of initialisations with which PEFT also changes the base's weights, even on load."""


def variants_of(raw: Mapping[str, Any]) -> dict[str, str]:
    """Fields of a configuration that select an unsupported variant, with the variant's name."""
    found = {name: meaning for name, meaning in VARIANTS.items() if raw.get(name)}
    kind = raw.get(_INITIALISED)
    if isinstance(kind, str) and kind.lower().startswith(_BASE_CHANGING):
        found[_INITIALISED] = (
            f"{kind[:40]}, which changes the base model's weights (save the adapter with "
            "path_initial_model_for_weight_conversion),"
        )
    return found


Patterns = tuple[tuple[str, float], ...]
"""Values by module name pattern; the first match applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The fields of adapter_config.json that inference needs."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Patterns
    alpha_pattern: Patterns
    target_modules: tuple[str, ...] | str | None
    """Names, a regular expression, or `all-linear`; None: the file has none."""
    target_parameters: tuple[str, ...]
    exclude_modules: tuple[str, ...] | str
    modules_to_save: tuple[str, ...]
    layers_to_transform: tuple[int, ...]
    """Indices of the adapted layers; empty: all."""
    layers_pattern: tuple[str, ...]
    """Regular expressions that give the layer of a name."""
    token_indices: Mapping[str, tuple[int, ...]]
    """Embedding module -> ids of the tokens whose rows were trained."""
    ties_weights: bool
    """Whether a change of the embedding also applies to the LM head tied to it."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any], directory: Path) -> PeftConfig:
        """Checks a parsed adapter_config.json."""
        fields = _Fields(raw, f"adapter {directory}: {CONFIG_FILE}")
        kind = fields.raw.get("peft_type")
        if kind != "LORA":
            raise fields.error("peft_type", f"only LORA is supported, not {kind!r}")
        for name, meaning in variants_of(fields.raw).items():
            raise fields.error(name, f"{meaning} is not supported")
        return cls(
            rank=fields.positive("r"),
            alpha=fields.number("lora_alpha"),
            use_rslora=bool(fields.raw.get("use_rslora")),
            rank_pattern=_patterns(fields, "rank_pattern", fields.whole),
            alpha_pattern=_patterns(fields, "alpha_pattern", fields.real),
            target_modules=_targets(fields),
            target_parameters=fields.texts("target_parameters"),
            exclude_modules=fields.texts_or_pattern("exclude_modules") or (),
            modules_to_save=fields.texts("modules_to_save"),
            layers_to_transform=_layers(fields),
            layers_pattern=tuple(
                fields.pattern("layers_pattern", key, r"(?:^|.*?\.){}\.(?P<layer>\d+)\.")
                for key in fields.texts("layers_pattern")
            ),
            token_indices=_token_indices(fields),
            ties_weights=bool(fields.raw.get("ensure_weight_tying")),
        )

    def rank_of(self, names: Sequence[str]) -> int:
        """Rank of a module with these names."""
        return int(_first_match(self.rank_pattern, self._pattern_names(names), self.rank))

    def scaling_of(self, names: Sequence[str], rank: int) -> float:
        """The factor on the module's product B A: alpha / r, or alpha / sqrt(r) with rsLoRA
        (Kalajdzievski 2023, arXiv:2312.03732).
        """
        alpha = _first_match(self.alpha_pattern, self._pattern_names(names), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def is_targeted(self, names: Sequence[str]) -> bool:
        """Whether the configuration targets a module with these names.

        Names are full, such as model.layers.0.self_attn.q_proj, or those of a wrapped parameter.
        """
        # As in PEFT, nothing excludes parameters, and layers do not exclude modules that are named
        # in full.
        if any(_lists(self.target_parameters, name) for name in names):
            return True
        if any(_lists(self.exclude_modules, name) for name in names):
            return False
        if self.target_modules is None:
            return not self.target_parameters
        if self.target_modules == ALL_LINEAR:
            return True
        if not any(_lists(self.target_modules, name) for name in names):
            return False
        if not self.layers_to_transform or isinstance(self.target_modules, str):
            return True
        return any(name in self.target_modules or self._has_layer(name) for name in names)

    def _pattern_names(self, names: Sequence[str]) -> Sequence[str]:
        """Patterns of ranks and alphas match the parameter's name if PEFT wraps a parameter, as for
        routers that are not linear modules; else the module's name.
        """
        return [name for name in names if _lists(self.target_parameters, name)] or names

    def _has_layer(self, name: str) -> bool:
        for pattern in self.layers_pattern or (_LAYER_OF,):
            if found := match(pattern, name):
                return int(found["layer"]) in self.layers_to_transform
        return False


def _lists(targets: tuple[str, ...] | str, name: str) -> bool:
    if isinstance(targets, str):
        return match(targets, name, is_whole=True) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _first_match(patterns: Patterns, names: Sequence[str], default: float) -> float:
    for pattern, value in patterns:
        if any(match(pattern, name) for name in names):
            return value
    return default


def _patterns(fields: _Fields, name: str, read: Callable[[str, Any], float]) -> Patterns:
    return tuple(
        (fields.pattern(name, key, r"(.*\.)?({})$"), read(name, value))
        for key, value in fields.mapping(name).items()
    )


def _targets(fields: _Fields) -> tuple[str, ...] | str | None:
    value = fields.raw.get("target_modules")
    if isinstance(value, str) and value.lower() == ALL_LINEAR:
        return ALL_LINEAR
    return fields.texts_or_pattern("target_modules")


def _layers(fields: _Fields) -> tuple[int, ...]:
    value = fields.raw.get("layers_to_transform")
    values = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in values):
        raise fields.error("layers_to_transform", f"expected numbers of layers, got {value!r}")
    return tuple(values)


def _token_indices(fields: _Fields) -> Mapping[str, tuple[int, ...]]:
    value = fields.raw.get("trainable_token_indices")
    if value is None:
        return {}
    by_module = value if isinstance(value, dict) else {"embed_tokens": value}
    for ids in by_module.values():
        if not isinstance(ids, list) or not all(type(item) is int and item >= 0 for item in ids):
            raise fields.error("trainable_token_indices", "expected lists of token ids")
        if len(set(ids)) != len(ids):
            raise fields.error("trainable_token_indices", "names a token twice")
    return {str(module): tuple(ids) for module, ids in by_module.items()}


class _Fields:
    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self._where = where

    def error(self, name: str, problem: str) -> AdapterError:
        return AdapterError(f"{self._where}: {name}: {problem}", param=name)

    def whole(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"expected a positive whole number, got {value!r}")
        return value

    def real(self, name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) < 1e30:
            raise self.error(name, f"expected a number below 1e30, got {repr(value)[:40]}")
        return float(value)

    def positive(self, name: str) -> int:
        return self.whole(name, self.raw.get(name))

    def number(self, name: str) -> float:
        return self.real(name, self.raw.get(name))

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(name, f"expected an object, got {value!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.raw.get(name) or []
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise self.error(name, f"expected names, got {value!r}")
        return tuple(values)

    def texts_or_pattern(self, name: str) -> tuple[str, ...] | str | None:
        value = self.raw.get(name)
        if isinstance(value, str):
            return self.pattern(name, value)
        return None if value is None else self.texts(name)

    def pattern(self, name: str, pattern: str, around: str = "{}") -> str:
        """A regular expression must compile by itself and within `around`, and must not have a slow
        form. Returns it within `around`.
        """
        whole = around.replace("{}", pattern)
        try:
            for text in (pattern, whole):
                re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise self.error(name, f"{pattern[:80]!r} is no regular expression: {error}") from error
        if _UNLIKE_RE.search(pattern):
            raise self.error(
                name, f"{pattern[:80]!r} has a form that only some libraries read: [[: or {{...}}"
            )
        if not is_quick(pattern):
            raise self.error(
                name,
                f"{pattern[:80]!r} may take very long to match: repeats stand inside repeats, "
                "or too many one after another",
            )
        return whole
