"""The id of an NCCL communicator out of a trainer's store, and nothing else."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import ConfigError
from weft.engine.parallel.nccl_id import read_pickled_id

MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
NUMBER = bytes(range(128))


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """A class that vLLM's trainers pickle, under its name."""
    found = type(
        "ncclUniqueId",
        (ctypes.Structure,),
        {"_fields_": [("internal", ctypes.c_byte * 128)], "__module__": MODULE},
    )
    parts = MODULE.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules[MODULE], "ncclUniqueId", found, raising=False)
    return found


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_id_is_read_from_what_vllms_trainers_store(kind: type[Any], protocol: int) -> None:
    data = pickle.dumps(kind.from_buffer_copy(NUMBER), protocol)
    assert read_pickled_id(data) == NUMBER


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-run",)


def test_no_other_object_is_made(
    kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    right = pickle.dumps(kind.from_buffer_copy(NUMBER))
    others = [Runs(), NUMBER, [kind.from_buffer_copy(NUMBER)], None, {"a": NUMBER}]
    for data in [b"", b"x" * 4096, right[:-2], *map(pickle.dumps, others)]:
        with pytest.raises(ConfigError, match="something else than an NCCL id"):
            read_pickled_id(data)
    assert not (tmp_path / "was-run").exists()
    # Any class of that name may stand there, since it is never looked up; another may not.
    with pytest.raises(ConfigError):
        read_pickled_id(right.replace(b"ncclUniqueId", b"ncclUniqueIx"))
