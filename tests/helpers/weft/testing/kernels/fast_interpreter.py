"""Triton's interpreter, without work that it repeats.

It replaces the functions of `triton.language` by its own for each call of a device function, also
where the launch that the call belongs to has done so: half of the time of kernels that are made of
many functions. It looks up each value's dtype in a table that it makes anew. It builds the type of
each intermediate value, and checks its shape, though a kernel has few types. It looks in sums and
products of integers for overflows, and drops what it finds. And it converts floats by dozens of
operations, of 8 and 16 bits where there are few that differ, to bfloat16 where it cuts bits off.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Hashable
from types import ModuleType
from typing import Any

import numpy as np
from triton import language as tl
from triton.language.semantic import TritonSemantic
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
        element = given.element_ty if type(given) is tl.block_type else given
        return found(element) if type(element) is tl.dtype else find(given)

    interpreter._get_np_dtype = find_once
    interpreter._patch_attr = _replace_builtin
    _build_types_once()
    _compare_types_once()
    _broadcast_unlike_shapes()
    _skip_dropped_checks()
    _convert_by_tables()


@functools.cache
def _modules(fn: Any) -> tuple[ModuleType, ...]:
    """Modules of the language that a kernel's or device function's module uses."""
    used = (one for one in fn.__globals__.values() if inspect.ismodule(one))
    return tuple(one for one in used if one in (tl, tl.core))


def _replace_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As the interpreter does, which copies the arguments of each call."""

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **named)

    scope.set_attr(obj, name, call)


def _build_types_once() -> None:
    """Gives a type of blocks, and a value, what the first one of the same type was built with."""
    build_block, build_value = tl.core.block_type.__init__, tl.core.tensor.__init__
    blocks: dict[Hashable, dict[str, Any]] = {}

    def block(self: Any, element: Any, shape: Any) -> None:
        key = _block_key(element, shape)
        if key not in blocks:
            build_block(self, element, shape)
            # What values of this type have in common, once there is one.
            vars(self)["common"] = {}
            if key is not None:
                blocks[key] = dict(vars(self))
        else:
            vars(self).update(blocks[key])

    def value(self: Any, handle: Any, type: Any) -> None:
        common = vars(type).setdefault("common", {})
        if not common:
            build_value(self, handle, type)
            common.update(vars(self))
            del common["handle"]
        else:
            vars(self).update(common)
            self.handle = handle

    tl.core.block_type.__init__ = block
    tl.core.tensor.__init__ = value


def _block_key(element: Any, shape: Any) -> Hashable:
    """None for what is rare; types of pointers and blocks have no hash."""
    sizes = tuple([getattr(size, "value", size) for size in shape])
    if type(element) is tl.dtype:
        return element.name, sizes
    if type(element) is tl.pointer_type and type(element.element_ty) is tl.dtype:
        return element.name, element.address_space, sizes
    return None


def _compare_types_once() -> None:
    """Looks up what types two operands are computed in, and knows a type for itself."""
    compute = TritonSemantic.computation_type_impl
    is_equal, unwrap = tl.dtype.__eq__, tl.core._unwrap_if_constexpr
    found: dict[Hashable, tl.dtype] = {}
    plain = {tl.core.tensor, tl.dtype, int, float, bool, type(None)}

    def computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, *more: bool) -> tl.dtype:
        key = a.name, a_is_scalar, b.name, *more
        if key not in found:
            found[key] = compute(self, a, a_is_scalar, b, *more)
        return found[key]

    def equal(self: Any, other: Any) -> bool:
        return self is other or is_equal(self, other)

    def unwrapped(given: Any) -> Any:
        return given if type(given) in plain else unwrap(given)

    TritonSemantic.computation_type_impl = computation_type
    tl.dtype.__eq__ = equal
    tl.core._unwrap_if_constexpr = unwrapped


def _broadcast_unlike_shapes() -> None:
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unlike(self: Any, a: Any, b: Any) -> tuple[Any, Any]:
        are_blocks = type(a.type) is type(b.type) is tl.block_type
        if are_blocks and a.type.shape.values == b.type.shape.values:
            return a, b
        both: tuple[Any, Any] = broadcast(self, a, b)
        return both

    TritonSemantic.broadcast_impl_value = broadcast_unlike


def _skip_dropped_checks() -> None:
    """Overflows are looked for, and told by assertions that do nothing unless one debugs."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _convert_by_tables() -> None:
    """Widens each float of 8 or 16 bits once, and looks others up; cuts off what bfloat16 lacks."""
    convert = interpreter._convert_float
    tables: dict[Hashable, Any] = {}

    def converted(given: Any, before: Any, after: Any, rounding: Any) -> Any:
        if before.is_fp32() and after.is_bf16() and rounding is None:
            words = given.view(np.uint32)
            sizes = words & 0x7FFFFFFF
            # Of numbers below the normal ones the interpreter makes others.
            if not ((sizes > 0) & (sizes < 1 << 23)).any():
                return (words >> 16).astype(np.uint16)
        bits = before.primitive_bitwidth
        if bits > 16 or bits >= after.primitive_bitwidth:
            return convert(given, before, after, rounding)
        key = before.name, after.name, rounding
        unsigned = np.dtype(f"u{bits // 8}")
        if key not in tables:
            values = np.arange(1 << bits).astype(unsigned)
            tables[key] = convert(values.view(given.dtype), before, after, rounding)
        return tables[key][given.view(unsigned)]

    interpreter._convert_float = converted
