"""What transformers registers, from the text of its registry, since services import no torch."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_REGISTRY = "models/auto/modeling_auto.py"
_MAPPING = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_AUTO_CLASS = "AutoModelForCausalLM"


@cache
def known_to_transformers() -> Mapping[str, str]:
    """Architectures of transformers' registry of causal language models, with their `model_type`;
    empty if transformers is not installed.
    """
    spec = find_spec("transformers")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found: dict[str, str] = {}
    for folder in folders:
        path = Path(folder) / _REGISTRY
        for pair in _pairs(path.read_text()) if path.exists() else ():
            kind, names = pair
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, kind)
    return found


def _pairs(source: str) -> list[tuple[str, Any]]:
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if any(isinstance(target, ast.Name) and target.id == _MAPPING for target in node.targets):
            pairs: list[tuple[str, Any]] = ast.literal_eval(node.value.args[0])
            return pairs
    return []


def own_class(raw: Mapping[str, Any]) -> str:
    """The class in a file of the model's directory that config.json names; empty: there is none."""
    classes = raw.get("auto_map")
    name = classes.get(_AUTO_CLASS) if isinstance(classes, Mapping) else None
    return name if isinstance(name, str) else ""
