"""Reads the id of an NCCL communicator as vLLM's trainers put it into a store: as a pickled ctypes
structure of 128 bytes. Its opcodes are walked and nothing is unpickled, so that no other object is
ever made.
"""

from __future__ import annotations

import pickletools

from weft.contract.errors import ConfigError
from weft.contract.weights import NCCL_ID_BYTES

_MAX_BYTES = 1024
_IGNORED = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "PUT", "STOP"}
_NAMES = {"SHORT_BINUNICODE", "BINUNICODE"}
_GLOBALS = {"GLOBAL", "STACK_GLOBAL"}
_BYTES = {"SHORT_BINBYTES", "BINBYTES"}
_REBUILD = ("_ctypes", "_unpickle")
_CLASS = "ncclUniqueId"
_SHAPE = ["global", "class", "dict", "bytes", "TUPLE2", "TUPLE2", "REDUCE"]


def read_pickled_id(data: bytes) -> bytes:
    """128 bytes. Raises ConfigError for any other object."""
    refused = ConfigError(
        "the group's store has something else than an NCCL id; give nccl_unique_id_b64",
        param="nccl_unique_id_b64",
    )
    if len(data) > _MAX_BYTES:
        raise refused
    found, names, numbers = list[str](), list[str](), b""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _IGNORED:
                continue
            if opcode.name in _NAMES:
                names.append(str(argument))
            elif opcode.name in _GLOBALS:
                if opcode.name == "GLOBAL":
                    names += str(argument).split(" ")
                module, name = names[-2:]
                is_rebuild = (module, name) == _REBUILD
                found.append("global" if is_rebuild else "class" if name == _CLASS else "other")
            elif opcode.name == "EMPTY_DICT":
                found.append("dict")
            elif opcode.name in _BYTES:
                numbers = argument if isinstance(argument, bytes) else b""
                found.append("bytes")
            else:
                found.append(opcode.name)
    except Exception as error:  # Whatever the walk stumbles over.
        raise refused from error
    if found != _SHAPE or len(numbers) != NCCL_ID_BYTES:
        raise refused
    return numbers
