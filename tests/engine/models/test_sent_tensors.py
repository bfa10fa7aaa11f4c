"""Tensors that a trainer sends: their digests, and in which order and form they fill a model."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import weft.kernels.ops.content_digest as content_digest_sums
from weft.contract.errors import ModelError
from weft.engine.base.content_digest import content_digest
from weft.engine.model.loader import load_model
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.refill import parts_of_kind
from weft.engine.model.weights.sent import KnownTensor, SentTensors
from weft.kernels.ops.moe.spec import ExpertWeights
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.models.families import FAMILIES, make_family
from weft.testing.models.senders import announced, tensors_of
from weft.testing.models.tiny_models import make_tiny


def put_all(sent: SentTensors, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    for one in names:
        sent.put({one: tensors[one]})


def put_and_complete(
    sent: SentTensors, tensors: Mapping[str, torch.Tensor], names: Sequence[str]
) -> None:
    put_all(sent, tensors, names)
    sent.complete()


IN_EVERY_RUN = ("gemma2",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.full)
        for name in FAMILIES
    ],
)
def test_sent_in_any_order_a_model_is_a_fresh_load(name: str, tmp_path: Path) -> None:
    first, second = (make_family(name, tmp_path / str(seed), seed) for seed in (1, 2))
    model, fresh = load_model(first, "float32"), load_model(second, "float32")
    tensors = tensors_of(second)
    names, digests = list(tensors), set[bytes]()
    for _ in range(2):
        random.shuffle(names)
        sent = model.refit.expect()
        sent.check(announced({name: tensors[name] for name in names}))
        sender = threading.Thread(target=put_and_complete, args=(sent, tensors, list(names)))
        sender.start()
        digests.add(model.refit.from_sent(sent))
        sender.join()
        assert sent.lacking == []
    assert len(digests) == 1
    assert digests.isdisjoint({model.digest, fresh.digest})
    assert model.refit.packed_digest() == fresh.refit.packed_digest()


def test_a_digest_is_of_each_number_and_its_place() -> None:
    long = torch.randint(-100, 100, (200_001,), dtype=torch.int16)
    right = content_digest(long)
    assert content_digest(long.clone()) == right
    # Wherever it lies in memory.
    assert content_digest(torch.cat([torch.zeros(1, dtype=torch.int16), long])[1:]) == right
    others = [long.view(1, -1), long.to(torch.int32), long[:-1], long.flip(0)]
    for at in (0, 1, 131_072, 200_000):
        changed = long.clone()
        changed[at] ^= 1
        others.append(changed)
    swapped = long.clone()
    swapped[:4], swapped[4:8] = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 8])
    back = swapped.clone()
    back[:4], back[4:8] = swapped[4:8], swapped[:4]
    found = [content_digest(one) for one in [long, *others, swapped, back]]
    assert len(set(found)) == len(found)
    assert content_digest(torch.empty(0)) != content_digest(torch.empty(0, 1))


def test_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    folder = make_family("gemma2", tmp_path / "model", 1)
    model, tensors = load_model(folder, "float32"), tensors_of(folder)
    last = list(tensors)[-1]
    tensors[last] = tensors[last].clone()
    tensors[last].view(-1)[-1] = float("nan")
    sent = model.refit.expect()
    sent.put(tensors)
    sent.complete()
    with pytest.raises(ModelError, match=f"{last} has a number that is not finite"):
        model.refit.from_sent(sent)


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_gpu_is_asked_for_answers_once_for_all_tensors(
    is_finite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer takes as long as hundreds of experts' copies."""
    asked = Counter[str]()
    monkeypatch.setattr(content_digest_sums, "_triton_sums", SimpleNamespace(weighted_sums=sums))
    for name in ("cpu", "item", "tolist", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, counted(name, asked))
    folders = [make_tiny("qwen3_moe", tmp_path / str(n), n, num_experts=n) for n in (4, 16)]
    counts = []
    for folder in folders:
        with as_on_gpu():
            model, tensors = load_model(folder, "float32"), tensors_of(folder)
            right, names = model.refit.packed_digest(), random.sample(list(tensors), len(tensors))
            last = names[-1]
            if not is_finite:
                tensors[last] = tensors[last].clone()
                tensors[last].view(-1)[-1] = random.choice([math.inf, -math.inf, math.nan])
            sent = model.refit.expect()
            sent.put({name: tensors[name] for name in names})
            sent.complete()
            asked.clear()
            if is_finite:
                model.refit.from_sent(sent)
                counts.append(asked.total())
                assert model.refit.packed_digest() == right
            else:
                with pytest.raises(ModelError, match=f"{last} has a number that is not finite"):
                    model.refit.from_sent(sent)
    assert len(set(counts)) < 2


def sums(tensors: Sequence[torch.Tensor], tables: torch.Tensor) -> torch.Tensor:
    return content_digest_sums.weighted_sums_reference(tensors, tables)


def counted(name: str, asked: Counter[str]) -> Callable[..., Any]:
    own = getattr(torch.Tensor, name)

    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked[name] += 1
        return own(tensor, *args, **kwargs)

    return method


def test_experts_of_a_gpu_are_read_into_their_stacks(tmp_path: Path) -> None:
    count = random.randrange(3, 8)
    folder = make_tiny("qwen3_moe", tmp_path, random.randrange(1 << 30), num_experts=count)
    with as_on_gpu():
        model, tensors = load_model(folder, "float32").model, tensors_of(folder)
    found = [stack for one in parts_of_kind(model, (ExpertWeights,)) for stack in one.stacked or ()]
    layers = {name.partition("experts.")[0] for name in tensors if ".experts." in name}
    assert len(found) == 2 * len(layers)
    for layer in layers:
        for parts in (("gate_proj", "up_proj"), ("down_proj",)):
            each = [f"{layer}experts.{at}" for at in range(count)]
            own = [torch.cat([tensors[f"{one}.{part}.weight"] for part in parts]) for one in each]
            assert any(torch.equal(torch.stack(own), stack) for stack in found)


def test_what_is_read_once_more_than_it_was_ends_the_update() -> None:
    known = {name: KnownTensor((2, 3), torch.float32, 1, True) for name in ("a", "b")}
    sent, numbers = SentTensors(known), torch.randn(2, 3)
    put_all(sent, {"a": numbers, "b": numbers.clone()}, ["a", "b"])
    read = partial(sent.read_into, TensorSlice("a", (2, 3)))
    errors = list[ModelError]()

    def run() -> None:
        read(out := torch.empty(2, 3))
        assert torch.equal(out, numbers)
        try:
            read(torch.empty(2, 3))
        except ModelError as error:
            errors.append(error)

    reading = threading.Thread(target=run, daemon=True)
    reading.start()
    sent.complete()
    reading.join(60)
    (error,) = errors
    assert "a is read more often" in error.message
    # What came before the end can be read after it.
    sent.read_into(TensorSlice("b", (2, 3)), out := torch.empty(2, 3))
    assert torch.equal(out, numbers)


def test_parts_of_tensors_are_read_together_with_whole_ones() -> None:
    whole = torch.randn(6, 8)
    wanted: list[tuple[int | slice, ...]] = [
        (),
        (slice(0, 6), slice(0, 8)),
        (slice(2, 5),),
        (slice(0, 6), slice(1, 4)),
        (3,),
        (3, 5),
    ]
    random.shuffle(wanted)
    sent = SentTensors({"a": KnownTensor((6, 8), torch.float32, len(wanted), True)})
    put_all(sent, {"a": whole.clone()}, ["a"])
    parts = [TensorSlice("a", (6, 8), slices) for slices in wanted]
    outs = [torch.empty(math.prod(part.size)) for part in parts]
    sent.read_each(parts, outs)
    for part, out in zip(parts, outs, strict=True):
        assert torch.equal(out.view(part.size), whole[part.slices])


@pytest.mark.parametrize("is_in_order", [True, False])
def test_a_slow_reader_has_few_tensors_kept_for_it(
    is_in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order all tensors come; in the order of reading few of them are there at once."""
    most = random.randrange(0, 400)
    monkeypatch.setattr("weft.engine.model.weights.sent.MAX_AHEAD_BYTES", most)
    tensors = {f"t{at}": torch.randn(random.randrange(1, 50)) for at in range(60)}
    known = {
        name: KnownTensor(tuple(one.shape), one.dtype, 1, True) for name, one in tensors.items()
    }
    sent, order, begun = SentTensors(known), [*tensors], threading.Event()
    if not is_in_order:
        random.shuffle(order)
    given, kept = 0, list[int]()

    def put() -> None:
        nonlocal given
        for name in order:
            given += tensors[name].nbytes
            begun.set()
            sent.put({name: tensors[name].clone()})

    putting = threading.Thread(target=put, daemon=True)
    putting.start()
    assert begun.wait(60)
    taken = 0
    for name, tensor in tensors.items():
        kept.append(given - taken)
        sent.read_into(TensorSlice(name, tuple(tensor.shape)), out := torch.empty(tensor.shape))
        taken += tensor.nbytes
        assert torch.equal(out, tensor)
    putting.join(60)
    assert not putting.is_alive()
    if is_in_order:
        # One more may be under way, and one may come while another is taken.
        assert max(kept) <= most + 3 * max(one.nbytes for one in tensors.values())


def test_tensors_that_nobody_reads_any_more_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.engine.model.weights.sent.MAX_AHEAD_BYTES", 0)
    known = {name: KnownTensor((4,), torch.float32, 1, True) for name in "ab"}
    sent = SentTensors(known)
    putting = threading.Thread(
        target=lambda: put_all(sent, {name: torch.randn(4) for name in known}, [*known]),
        daemon=True,
    )
    putting.start()
    sent.complete()
    putting.join(60)
    assert not putting.is_alive()


def test_the_digest_of_an_update_waits_for_what_is_not_read() -> None:
    reads = {"a": 1, "b": 0}
    known = {name: KnownTensor((4,), torch.float32, reads[name], True) for name in reads}
    tensors, digests = {name: torch.randn(4) for name in known}, set[bytes]()
    for names in (["a", "b"], ["b", "a"]):
        sent, reading = SentTensors(known), threading.Event()

        def read(sent: SentTensors = sent, reading: threading.Event = reading) -> None:
            sent.read_into(TensorSlice("a", (4,)), torch.empty(4))
            reading.set()
            sent.await_end()
            digests.add(sent.digest())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        for name in names:
            sent.put({name: tensors[name]})
            if name == "a":
                assert reading.wait(60)
        sent.complete()
        reader.join(60)
        assert not reader.is_alive()
    assert len(digests) == 1
