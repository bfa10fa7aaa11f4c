"""Weights that a trainer on the same machine lends: the host's form, and what is refused."""

from __future__ import annotations

import gc
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import weft.kernels.ops.content_digest as content_digest_sums
from safetensors.torch import save_file
from weft.contract.codec.pairs import SENT_TENSOR
from weft.contract.errors import ConfigError, InvalidRequest, ModelError
from weft.contract.request import StopCriteria
from weft.contract.weights import SentTensor, TensorHandle
from weft.engine.executor import refits, shared_tensors
from weft.engine.executor.rank_jobs import RankResult
from weft.engine.executor.received import copies, ranges
from weft.engine.executor.refits import WeightRefits
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.engine.model.weights.announced import (
    Handles,
    decode_tensors,
    encode_tensors,
    layouts,
)
from weft.engine.model.weights.sent import KnownTensor, SentTensors
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.models.lenders import lent_by_host
from weft.testing.models.senders import described, tensors_of
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

SIZES = {"num_attention_heads": 8, "vocab_size": 517}
PROMPTS = [list(range(3, 43)), list(range(5, 20))]
SETTINGS: dict[str, Any] = {"page_size": 8, "num_pages": 64, "dtype": "float32"}
STOP = StopCriteria(max_tokens=24, ignore_eos=True)


def model(path: Path, seed: int, **sizes: Any) -> Path:
    return make_tiny("llama", path, seed, tokenizer=True, **{**SIZES, **sizes})


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, stop=STOP)]


def lend(llm: LLM, tensors: list[SentTensor], **options: Any) -> None:
    sent = [SENT_TENSOR.decode(SENT_TENSOR.encode(one)) for one in tensors]
    llm.command_weights("receive", tensors=sent, **options)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"quantization": "int8"}, marks=pytest.mark.full),
        pytest.param({"tp": 2}, marks=pytest.mark.full),
    ],
)
def test_text_after_lent_weights_is_a_fresh_workers(
    settings: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    first, second = model(tmp_path / "first", seed), model(tmp_path / "second", seed + 1)
    with LLM(second, **(SETTINGS | settings)) as fresh:
        right, packed = texts(fresh), fresh.engine.parts.local.refits.packed_digest()
    with LLM(first, **(SETTINGS | settings)) as llm:
        before = texts(llm)
        with lent_by_host(tensors_of(second)) as tensors:
            # In two calls, of which the last ends the update; nothing is read afterwards.
            lend(llm, tensors[:5], version="lent")
            lend(llm, tensors[5:], version="lent")
        assert (llm.weights.state, llm.weights.version) == ("ready", "lent")
        assert llm.engine.parts.local.refits.packed_digest() == packed
        assert texts(llm) == right
        assert right != before
        digest = llm.weights.model_digest
        llm.command_weights("begin")
        with lent_by_host(tensors_of(first)) as tensors:
            lend(llm, tensors)
            assert llm.command_weights("end").model_digest != digest
        assert texts(llm) == before


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_each_update_is_by_its_own_list(
    is_on_gpu: bool, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the lists before it were: in names, order, dtypes, places and number of calls."""
    reference = SimpleNamespace(weighted_sums=content_digest_sums.weighted_sums_reference)
    monkeypatch.setattr(content_digest_sums, "_triton_sums", reference)
    torch.manual_seed(seed)
    folder = make_tiny("qwen3_moe", tmp_path / "model", seed, num_experts=random.randrange(3, 9))
    shapes = {name: one.shape for name, one in tensors_of(folder).items()}
    with as_on_gpu() if is_on_gpu else nullcontext():
        model = load_model(folder, "float32")
        local = WeightRefits(model.refit, torch.device("cpu"))

        def update(tensors: dict[str, torch.Tensor]) -> bytes:
            names, firsts = list(tensors), random.sample(range(1, len(tensors)), 2)
            random.shuffle(names)
            with lent_by_host({name: tensors[name] for name in names}) as lent:
                wrong = replace(lent[-1], **random.choice(WRONG))
                assert received(local, [*lent[:-1], wrong]).reason == ModelError.reason
                for first, end in pairwise([0, *sorted(firsts), len(lent)]):
                    result = received(local, lent[first:end])
                    assert not result.problem
            return result.digest

        for number in range(3):
            kinds = [torch.float32, torch.bfloat16, torch.float16]
            tensors = {
                name: torch.randn(shape).to(random.choice(kinds)) for name, shape in shapes.items()
            }
            digest = update(tensors)
            right = tmp_path / str(number)
            shutil.copytree(folder, right)
            for file in right.glob("*.safetensors*"):
                file.unlink()
            save_file(tensors, right / "model.safetensors")
            fresh = load_model(right, "float32").refit.packed_digest()
            assert model.refit.packed_digest() == fresh
            assert update(tensors) == digest
            assert model.refit.packed_digest() == fresh


WRONG: list[dict[str, Any]] = [
    {"name": "model.nothing.weight"},
    {"shape": [7, 7, 7]},
    {"dtype": "int64"},
    {"dtype": "nothing"},
    {"handles": [TensorHandle(shm="weft-test-nothing")]},
]


def received(local: WeightRefits, tensors: list[SentTensor]) -> RankResult:
    local.receive("", encode_tensors(tensors), 0, ends=True)
    while (result := local.jobs.take()) is None:
        time.sleep(0.001)
    return result


def test_what_names_no_memory_is_refused_and_the_old_weights_stay(
    tmp_path: Path, seed: int
) -> None:
    first = model(tmp_path / "first", seed)
    tensors = described(tensors_of(first))
    named = f"weft-test-{os.urandom(8).hex()}"
    small, link, pipe = (Path("/dev/shm", f"{named}-{kind}") for kind in ("small", "link", "pipe"))
    small.write_bytes(bytes(100))
    link.symlink_to(tmp_path / "first" / "model.safetensors")
    os.mkfifo(pipe)
    uuid, handle = "GPU-0", os.urandom(64)
    bad: list[tuple[TensorHandle, str]] = [
        (TensorHandle(shm=small.name), "ends"),
        (TensorHandle(shm=small.name, offset=1 << 40), "ends"),
        (TensorHandle(shm=link.name), "cannot be read"),
        (TensorHandle(shm=pipe.name), "cannot be read"),
        (TensorHandle(shm=f"{named}-none"), "cannot be read"),
        (TensorHandle(shm="../etc/passwd"), "no name"),
        (TensorHandle(gpu=uuid, handle=handle), "no handle for the host's memory"),
    ]
    try:
        with LLM(first, **SETTINGS) as llm:
            right = texts(llm)
            for wrong, told in bad:
                with pytest.raises(ModelError, match=told):
                    lend(llm, [replace(one, handles=[wrong]) for one in tensors])
                assert llm.weights.state == "ready"
            half = [replace(tensors[0], handles=[TensorHandle(shm=small.name)]), *tensors[1:]]
            with pytest.raises(ConfigError, match="of all tensors, or of none"):
                lend(llm, half)
            assert texts(llm) == right
    finally:
        for path in (small, link, pipe):
            path.unlink()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"gpu": "GPU-0"},
        {"gpu": "GPU-0", "handle": bytes(63)},
        {"handle": bytes(64)},
        {"shm": "x", "gpu": "GPU-0", "handle": bytes(64)},
        {"shm": "x", "offset": -1},
        {"shm": "x", "offset": 1 << 62},
    ],
)
def test_handles_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="handles"):
        TensorHandle(**wrong)


def test_a_tensor_may_be_of_any_dtype_and_shape(tmp_path: Path, seed: int) -> None:
    """A scalar and an empty tensor too, at any offset."""
    from weft.engine.executor.shared_tensors import opened

    torch.manual_seed(seed)
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "b": torch.tensor(7, dtype=torch.int64),
        "c": torch.empty(0, 4),
        "d": torch.randint(0, 255, (17,), dtype=torch.uint8),
    }
    with lent_by_host(tensors) as lent:
        own, handles = decode_tensors(encode_tensors(lent))
        with opened(torch.device("cpu"), own.names, handles) as shared:
            (layout,) = layouts(own, own.sizes(), 1 << 30)
            for found, expected in zip(shared.read(layout), tensors.values(), strict=True):
                assert torch.equal(found, expected.view(-1))


def test_memory_of_a_trainer_is_closed_only_once_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if reading fails: the GPU may still be at a copy."""
    done: list[str] = []
    lent = torch.randint(0, 256, (40,), dtype=torch.uint8)

    class Memory:
        def __init__(self, handle: bytes, device_id: int) -> None: ...

        def close(self) -> None:
            done.append("closed")

    stream = SimpleNamespace(synchronize=lambda: done.append("copied"))
    monkeypatch.setattr(shared_tensors, "ForeignMemory", Memory)
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: lent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    properties = SimpleNamespace(uuid="GPU-0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    handle = TensorHandle(gpu="GPU-0", handle=bytes(64), offset=8)

    def read(*counts: int) -> list[torch.Tensor]:
        tensors = [
            SentTensor(name=f"x{at}", dtype="uint8", shape=[count], handles=[handle])
            for at, count in enumerate(counts)
        ]
        own, handles = decode_tensors(encode_tensors(tensors))
        with shared_tensors.opened(torch.device("cuda", 0), own.names, handles) as shared:
            parts = layouts(own, own.sizes(), 0)
            return [found for layout in parts for found in shared.read(layout)]

    assert torch.equal(read(32)[0], lent[8:])
    assert done == ["copied", "closed"]
    done.clear()

    with pytest.raises(ModelError, match=r"x1.*of memory of 40"):
        read(32, 33)
    assert done == ["copied", "closed"]


@pytest.mark.parametrize("multiple", [1, 2, 4, 8])
def test_copies_are_of_the_same_numbers_wherever_they_lie(multiple: int, seed: int) -> None:
    torch.manual_seed(seed)
    count = random.randrange(1, 40)
    pieces = {at: torch.randint(0, 256, (4099,), dtype=torch.uint8) for at in range(3)}
    kinds = [torch.uint8, torch.int16, torch.int32, torch.int64]
    sent, right, which, offsets = list[SentTensor](), list[torch.Tensor](), list[int](), list[int]()
    at, piece = 0, 0
    for number in range(count):
        dtype = random.choice([kind for kind in kinds if kind.itemsize <= multiple])
        size = random.choice([0, 1, random.randrange(40)]) * 8
        # Many lie one after another, some at any place of any piece.
        if random.random() < 0.3 or at + size > 4096:
            piece, at = random.randrange(3), multiple * random.randrange(400)
        right.append(pieces[piece][at : at + size].clone().view(dtype))
        shape = [size // dtype.itemsize]
        name = str(dtype).removeprefix("torch.")
        sent.append(SentTensor(name=str(number), dtype=name, shape=shape))
        which.append(piece)
        offsets.append(at)
        at += size if random.random() < 0.5 else -(-size // 256) * 256
    own, _ = decode_tensors(encode_tensors(sent))
    handles = Handles(("a", "b", "c"), np.array(which), np.array(offsets))
    parts = list(layouts(own, own.sizes(), random.choice([0, 1, 300, 1 << 20])))
    found = [one for layout in parts for one in copies(layout, ranges(layout, handles), pieces)]
    for memory in pieces.values():
        memory.zero_()
    assert [one.dtype for one in found] == [one.dtype for one in right]
    assert all(map(torch.equal, found, right))


def test_memory_of_a_trainer_is_closed_when_the_model_refuses_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the trainer is told, not when Python collects garbage."""
    tensors = {name: torch.randn(random.randrange(1, 99)) for name in "abcd"}
    known = {
        name: KnownTensor(tuple(one.shape), one.dtype, 1, is_used=True)
        for name, one in tensors.items()
    }

    def refuse(sent: SentTensors) -> bytes:
        raise ModelError("the model refuses it")

    refit: Any = SimpleNamespace(
        expect=lambda: SentTensors(known), from_sent=refuse, has_written=False
    )
    opened, closed = shared_tensors.opened, list[str]()

    @contextmanager
    def noted(*args: Any) -> Iterator[shared_tensors.SharedTensors]:
        try:
            with opened(*args) as shared:
                yield shared
        finally:
            closed.append("closed")

    monkeypatch.setattr(refits, "opened", noted)
    monkeypatch.setattr(refits, "TOGETHER_BYTES", 1)
    local = WeightRefits(refit, torch.device("cpu"))
    gc.collect()
    gc.disable()
    try:
        with lent_by_host(tensors) as lent:
            result = received(local, lent)
        assert (result.problem, closed) == ("the model refuses it", ["closed"])
    finally:
        gc.enable()
