"""Triton's interpreter, without work that it repeats.

It replaces the functions of `triton.language` by its own for each call of a device function, also
where the launch that the call belongs to has done so: half of the time of kernels that are made of
many functions. And it looks up each value's dtype in a table that it makes anew.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


@functools.cache
def replace_functions_once() -> None:
    """Leaves to calls within a launch what the launch has replaced, from now on."""
    replace = interpreter._patch_lang

    def replace_once(fn: Any) -> Any:
        modules = _modules(fn)
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return replace(fn)

    interpreter._patch_lang = replace_once
    find = interpreter._get_np_dtype
    found = functools.cache(find)

    def find_once(given: Any) -> Any:
        # Types of pointers and blocks have no hash.
        return found(given) if type(given) is tl.dtype else find(given)

    interpreter._get_np_dtype = find_once


@functools.cache
def _modules(fn: Any) -> tuple[ModuleType, ...]:
    """Modules of the language that a kernel's or device function's module uses."""
    used = (one for one in fn.__globals__.values() if inspect.ismodule(one))
    return tuple(one for one in used if one in (tl, tl.core))
