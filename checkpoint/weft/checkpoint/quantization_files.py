"""Files next to a config.json that say how weights are quantised if config.json does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.fields import Fields, read_json_file
from weft.contract.errors import ModelError

_Document = Mapping[str, Any]


def with_quantization(raw: _Document, model_dir: Path) -> tuple[_Document, Path | None]:
    """The content of config.json with the `quantization_config` of another file, and the path of
    that file; None: config.json is complete, or there is no such file.
    """
    if any(name in raw for name in ("quantization_config", "compression_config")):
        return raw, None
    for name, section_of in _FILES.items():
        if (path := model_dir / name).is_file():
            section = section_of(read_json_file(path))
            if not isinstance(section, dict):
                raise ModelError(f"{path}: expected an object of quantisation settings")
            return {**raw, "quantization_config": section}, path
    return raw, None


def declared_quantization(fields: Fields) -> Fields | None:
    """The section of a config.json that says how weights are quantised; None: there is none.

    Older files of compressed-tensors have another name for it, and models that also take images may
    have it in their text model's section.
    """
    for where in (fields, fields.section("text_config")):
        for name in ("quantization_config", "compression_config"):
            if where.get(name):
                return where.section(name)
    return None


def _of_gptq(content: _Document) -> object:
    return {"quant_method": "gptq", **content}


def _of_awq(content: _Document) -> object:
    own = {"bits": content.get("w_bit"), "group_size": content.get("q_group_size")}
    return {"quant_method": "awq", **own, **content}


def _of_modelopt(content: _Document) -> object:
    section = content.get("quantization")
    return {"quant_method": "modelopt", **section} if isinstance(section, dict) else None


_FILES: Mapping[str, Callable[[_Document], object]] = {
    "quantize_config.json": _of_gptq,
    "quant_config.json": _of_awq,
    "hf_quant_config.json": _of_modelopt,
}
"""The files that AutoGPTQ, AutoAWQ and ModelOpt write, and how each becomes a
`quantization_config`.
"""
