"""How a config.json says that products have weights of bitsandbytes."""

from __future__ import annotations

from weft.checkpoint.fields import Fields
from weft.checkpoint.module_names import anywhere, names_in

METHOD = "bitsandbytes"
"""Value of `quant_method`."""


def read_bitsandbytes(section: Fields) -> tuple[str, ...] | str:
    """Patterns of modules that stay in floats; a text says what is not supported. Tensors tell 4
    from 8 bits, and which numbers 4 bits stand for.
    """
    if not section.flag("load_in_4bit", False) and not section.flag("load_in_8bit", False):
        return "neither load_in_4bit nor load_in_8bit is true"
    storage = section.text("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        return f"bnb_4bit_quant_storage {storage!r} is not supported (uint8 is)"
    return tuple(anywhere(name) for name in names_in(section, "llm_int8_skip_modules"))
