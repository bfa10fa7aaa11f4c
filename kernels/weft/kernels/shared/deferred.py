"""Forms that are loaded when they are first used: they need Triton or a library, which a process on
a CPU may lack.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def deferred(user: str, path: str) -> Any:
    """Stands in for a module in the namespace of another until one of its names is asked for. From
    then on the module itself is there, so that no later call pays for an import.

    Args:
        user: `__name__` of the module that binds the result. It binds it to another name than the
            module's own, by which others import the module itself.
        path: The module to load.
    """
    return _StandIn(user, path)


class _StandIn:
    __slots__ = ("_path", "_user")

    def __init__(self, user: str, path: str) -> None:
        self._user, self._path = user, path

    def __getattr__(self, name: str) -> Any:
        module, names = import_module(self._path), vars(sys.modules[self._user])
        for bound in [bound for bound, value in names.items() if value is self]:
            names[bound] = module
        return getattr(module, name)
