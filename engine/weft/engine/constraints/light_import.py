"""Imports xgrammar for compiling alone, in a process that does nothing else."""

from __future__ import annotations

import sys
from types import ModuleType

STAND_INS = ("torch", "transformers")
"""Modules that xgrammar imports for features unused here: tensor masks and its own tokenizers."""


class _StandIn(ModuleType):
    """A module whose every name is an empty class, which is enough to annotate and define with."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


def import_xgrammar_lightly() -> None:
    """Imports xgrammar without torch and transformers, which cost ten times its own.

    Compiling and serialising grammars uses neither (decision 0012). If xgrammar comes to need them
    after all it is left for the caller to import as usual.
    """
    absent = [name for name in STAND_INS if name not in sys.modules]
    try:
        # Without torch, tvm_ffi leaves out what it has for it; a stand-in would not do.
        sys.modules.update(dict.fromkeys(absent, None))  # type: ignore[arg-type]
        import tvm_ffi  # noqa: F401

        sys.modules.update({name: _StandIn(name) for name in absent})
        import xgrammar  # noqa: F401
    except Exception:
        for name in [n for n in sys.modules if n.partition(".")[0] in ("xgrammar", "tvm_ffi")]:
            del sys.modules[name]
    finally:
        for name in absent:
            del sys.modules[name]
