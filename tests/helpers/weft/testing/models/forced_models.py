"""Models that Weft has a reader for, computed by transformers' code all the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_CODE = """from transformers import {config}, {model}


class ForcedConfig({config}):
    model_type = "forced"


class ForcedForCausalLM({model}):
    config_class = ForcedConfig
"""


def forced_copy(source: Path, target: Path, model: str) -> Path:
    """A copy of a model's directory, with or without weights, whose architecture is one of its own:
    a class in a file of the directory. So it needs `trust_remote_code`.

    Args:
        model: The class of transformers that it derives from, such as Qwen3ForCausalLM.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.safetensors"):
        shutil.copy(path, target)
    fields = json.loads((source / "config.json").read_text())
    fields |= {
        "architectures": ["ForcedForCausalLM"],
        "model_type": "forced",
        "auto_map": {
            "AutoConfig": "forced.ForcedConfig",
            "AutoModelForCausalLM": "forced.ForcedForCausalLM",
        },
    }
    (target / "config.json").write_text(json.dumps(fields))
    config = model.removesuffix("ForCausalLM") + "Config"
    (target / "forced.py").write_text(_CODE.format(config=config, model=model))
    return target
