"""Declares structures and functions of the C sources for ctypes, as the sources have them."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any, TypeVar

_FOLDER = Path(__file__).parent.parent / "csrc"
_NUMBERS: dict[str, Any] = {
    "float": ctypes.c_float,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "void": None,
}
_STRUCTURES: dict[str, type[ctypes.Structure]] = {}
S = TypeVar("S", bound=ctypes.Structure)


def from_c(structure: type[S]) -> type[S]:
    """Gives a class the fields of the C structure whose name is the class's without `Struct`.
    Structures that it holds must have their classes already.
    """
    name = structure.__name__.removesuffix("Struct")
    (body,) = re.findall(rf"typedef struct {{([^{{}}]*)}} {name};", _text())
    structure._fields_ = [field for line in body.split(";") for field in _fields(line)]
    _STRUCTURES[name] = structure
    return structure


def c_function(library: ctypes.CDLL, name: str) -> ctypes._NamedFuncPointer:
    """A function of csrc/cpu.c or csrc/sampling.c in its compiled form."""
    result, arguments = _functions()[name]
    function: ctypes._NamedFuncPointer = getattr(library, name)
    function.restype = _NUMBERS[result]
    given = [] if arguments == "void" else arguments.split(",")
    function.argtypes = [kind for one in given for _, kind in _fields(one)]
    return function


def _fields(declaration: str) -> list[tuple[str, Any]]:
    """Names and types of what is declared, such as `const float *first, *second[SIZE]`."""
    kind, _, names = declaration.strip().removeprefix("const ").partition(" ")
    fields = []
    for one in names.split(",") if kind else ():
        name, size = re.findall(r"(\w+)(?:\[(\w+)\])?$", one)[0]
        own = ctypes.c_void_p if "*" in one else _NUMBERS.get(kind) or _STRUCTURES[kind]
        fields.append((name, own * c_number(size) if size else own))
    return fields


def c_number(name: str) -> int:
    """A number that the sources define."""
    (number,) = re.findall(rf"^#define {name} (\d+)$", _text(), re.MULTILINE)
    return int(number)


@functools.cache
def _functions() -> dict[str, tuple[str, str]]:
    """Of each function its result and its arguments."""
    found = re.findall(r"^(\w+) (\w+)\(([^)]*)\) {", _text(), re.MULTILINE)
    return {name: (result, arguments) for result, name, arguments in found}


@functools.cache
def _text() -> str:
    """The sources without comments."""
    sources = *sorted(_FOLDER.glob("*.h")), *sorted(_FOLDER.glob("*.c"))
    whole = "\n".join(path.read_text() for path in sources)
    return re.sub(r"[ ]*(/\*.*?\*/|//[^\n]*)", "", whole, flags=re.DOTALL)
