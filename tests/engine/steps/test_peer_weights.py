"""Packed weights that one process copies from another: at its start, and as an update."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import ModelError, WeftError, WeightsIncomplete
from weft.contract.request import StopCriteria
from weft.contract.weights import GpuAllocation, PackedTensor, RankWeights, WeightOffer
from weft.engine.executor import peer_weights
from weft.engine.loop.llm import LLM
from weft.pages.transfer import nixl_ranges
from weft.pages.transfer.nixl_binding import nixl_available
from weft.pages.transfer.nixl_wire import TransferError
from weft.testing.engine.weight_source import WeightSource
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.int_models import LAYOUTS, packed_models
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_mtp import make_tiny_mtp

IS_AVAILABLE, REASON = nixl_available()
pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.skipif(not IS_AVAILABLE, reason=f"nixl: {REASON}"),
]

SIZES = {"num_attention_heads": 8, "vocab_size": 517, "hidden_size": 128}
PROMPTS = [list(range(3, 43)), list(range(5, 20))]
SETTINGS = {"page_size": 8, "prefill_chunk_tokens": 24, "num_pages": 64, "dtype": "float32"}
STOP = StopCriteria(max_tokens=24, ignore_eos=True)
Make = Callable[[Path, int], Path]


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, stop=STOP)]


def packed(llm: LLM) -> bytes:
    return llm.engine.parts.local.refits.packed_digest()


def plain(path: Path, seed: int, **fields: Any) -> Path:
    return make_tiny("llama", path, seed, tokenizer=True, **(SIZES | fields))


def tied(path: Path, seed: int) -> Path:
    return plain(path, seed, tie_word_embeddings=True)


def experts(path: Path, seed: int) -> Path:
    return make_tiny("qwen3_moe", path, seed, tokenizer=True, num_experts=8)


def gptq(path: Path, seed: int) -> Path:
    folder, _ = packed_models(plain(path, seed), path, LAYOUTS["gptq act order"])
    return folder


def fp8(path: Path, seed: int) -> Path:
    folder, _ = fp8_copy(plain(path, seed), path.with_name(f"{path.name}-fp8"), "fbgemm")
    return folder


def mtp(path: Path, seed: int) -> Path:
    make_tiny_mtp("glm", path, seed)
    return path


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        *(
            # tests/mesh/operations/test_peer_weights.py has one such start with each run.
            pytest.param(make, settings, marks=pytest.mark.full)
            for make, settings in (
                (plain, {}),
                (plain, {"tp": 2}),
                (mtp, {"mtp_head": True, "drafter": "mtp"}),
                (plain, {"dtype": "bfloat16"}),
                (plain, {"quantization": "int8"}),
                (plain, {"quantization": "int4"}),
                (tied, {}),
                (experts, {}),
                (experts, {"tp": 2, "ep": 2}),
                (gptq, {}),
                (fp8, {}),
                (plain, {"pp": 2}),
                (mtp, {"mtp_head": True, "drafter": "mtp", "pp": 2}),
            )
        ),
    ],
)
def test_a_worker_that_starts_has_the_weights_of_its_peer(
    make: Make,
    settings: dict[str, Any],
    tmp_path: Path,
    seed: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The peer has been updated since it began, so that what comes cannot be the files'."""
    first, second = make(tmp_path / "first", seed), make(tmp_path / "second", seed + 1)
    settings = SETTINGS | settings
    with LLM(second, **settings) as fresh:
        right, digest, memory = texts(fresh), fresh.weights.model_digest, packed(fresh)
    with WeightSource(first, **settings) as source:
        assert "ready" in source.call("refit", second)
        offer = source.offer()
        assert offer.model_digest == digest != offer.start_digest
        with LLM(first, weights_offer=offer.to_json(), **settings) as llm:
            assert "read from" not in caplog.text
            assert texts(llm) == right
            assert packed(llm) == memory
            assert llm.weights.model_digest == digest
            # What it has copied, it offers too, and it can still be updated from files.
            copied = llm.offer_weights()
            assert copied.start_digest == offer.start_digest
            assert digests(copied) == digests(offer)
            llm.refit(first)
            llm.refit(second)
            assert texts(llm) == right
        assert source.offer() == offer


def digests(offer: WeightOffer) -> list[dict[str, bytes]]:
    return [{one.place: one.digest for one in rank.tensors} for rank in offer.ranks]


@pytest.mark.full
def test_a_head_from_another_folder_drafts_for_copied_weights(tmp_path: Path, seed: int) -> None:
    folder = plain(tmp_path / "model", seed)
    head = make_tiny_draft(tmp_path / "head", folder, seed)
    settings = SETTINGS | {"drafter": "eagle3", "draft_dir": head, "draft_gate": "fixed"}
    with WeightSource(folder, **SETTINGS) as source, LLM(folder, **settings) as fresh:
        right, drafted = texts(fresh), fresh.engine.counters()["accepted_tokens"]
        with LLM(folder, weights_offer=source.offer().to_json(), **settings) as llm:
            assert texts(llm) == right
            assert llm.engine.counters()["accepted_tokens"] == drafted


@pytest.mark.full
def test_a_peer_that_cannot_be_used_is_named_and_the_files_are_read(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = plain(tmp_path / "first", seed), plain(tmp_path / "second", seed + 1)
    with LLM(first, **SETTINGS) as fresh:
        right, digest = texts(fresh), fresh.weights.model_digest

    def check(offer: WeightOffer, why: str, folder: Path = first, **settings: Any) -> None:
        caplog.clear()
        with LLM(folder, weights_offer=offer.to_json(), **(SETTINGS | settings)) as llm:
            (line,) = [one for one in caplog.messages if "weights are read from" in one]
            assert why in line
            if folder == first and not settings:
                assert texts(llm) == right
                assert llm.weights.model_digest == digest

    with WeightSource(first, **SETTINGS) as source:
        offer = source.offer()
        rank = offer.ranks[0]
        check(offer, "other files", second)
        check(offer, "number format", dtype="bfloat16")
        check(replace(offer, ranks=[replace(rank, packing="another")]), "in another way")
        check(replace(offer, ranks=[replace(rank, share="another")]), "rank has another")
        check(replace(offer, ranks=[replace(rank, nixl_version="0")]), "nixl 0 there")
        check(replace(offer, ranks=[replace(rank, agent_metadata=b"garbage")]), "connecting")
        short = [replace(one, num_bytes=one.num_bytes - 4) for one in rank.tensors]
        check(replace(offer, ranks=[replace(rank, tensors=short)]), "in another form")
        # Its weights change between the offer and the copy.
        source.call("refit", second)
        check(offer, "other bytes")
        source.call("refit", first)
        assert digests(source.offer()) == digests(offer)
        # It dies in the middle.
        monkeypatch.setitem(peer_weights._MOST_BYTES, "cpu", 64 << 10)
        read, batches = nixl_ranges.RangesReader.read, list[int]()

        def dying(self: Any, target: Any, pairs: Any, report: Any) -> None:
            def told(done: int) -> None:
                batches.append(done)
                source.kill()

            read(self, target, pairs, told)

        monkeypatch.setattr(nixl_ranges.RangesReader, "read", dying)
        check(offer, "reading weights")
        assert 0 < batches[0] < sum(one.num_bytes for one in rank.tensors) / 2
        monkeypatch.undo()
        check(offer, "connecting to another")


def test_memory_is_offered_to_this_host_only_where_it_has_a_name(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver stands for CUDA's, so that all memory has handles."""
    one = GpuAllocation(address=seed, device_id=0, handle=bytes(64))
    monkeypatch.setattr(peer_weights, "allocations_of", lambda ranges: [one])
    for name in ("a", ""):
        monkeypatch.setattr(peer_weights, "host_name", lambda name=name: name)
        with LLM(plain(tmp_path / f"model-{name}", seed), **SETTINGS) as llm:
            (rank,) = llm.offer_weights().ranks
        assert (rank.host, rank.allocations) == (name, [one] if name else [])


def test_memory_of_large_tensors_on_a_gpu_is_known_before_they_are_made() -> None:
    def one(address: int, num_bytes: int, memory_type: str = "VRAM") -> PackedTensor:
        return PackedTensor(
            place=f".{address}",
            dtype="uint8",
            shape=[num_bytes],
            address=address,
            num_bytes=num_bytes,
            memory_type=memory_type,
            digest=bytes(32),
        )

    mib = 1 << 20
    tensors = [one(1, 3 * mib), one(2, 2 * mib + 1), one(2, 2 * mib + 1), one(3, mib)]
    tensors += [one(4, 9 * mib, "DRAM")]
    assert peer_weights.PeerWeights(_offer(tensors), 0).num_bytes == 5 * mib + 512


def test_digests_of_a_gpu_begin_when_the_bytes_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the host stand for those of two GPUs."""
    sizes = [random.randrange(1, 300_000) for _ in range(9)]
    far = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    own = [torch.zeros_like(one) for one in far]
    (spans, theirs) = ([_span(one) for one in both] for both in (own, far))
    wanted = list(map(peer_weights._Wanted, spans, theirs, own))
    begun, block_digests = list[torch.Tensor](), peer_weights._block_digests

    def begin(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert any(torch.equal(data, one) for one in far)
        begun.append(data)
        return block_digests(data)

    is_loaded, is_closed = threading.Event(), threading.Event()

    class Memory(peer_weights.ForeignRanges):
        def __init__(self, allocations: list[GpuAllocation], device_id: int) -> None:
            assert (allocations, device_id) == ([allocation], 0)

        def read(self, pairs: Any, *, stall_s: float, report: Callable[[int], None]) -> None:
            assert pairs == list(zip(spans, theirs, strict=True))
            is_loaded.set()  # Bytes are on their way before the first digest can be computed.
            done = 0
            for number, (to, source) in enumerate(zip(own, far, strict=True)):
                to.copy_(source)
                done += len(source)
                if number % 2:
                    report(done)
                    assert len(begun) == number + 1

        def close(self) -> None:
            is_closed.set()

    used = list[torch.device]()
    monkeypatch.setattr(peer_weights, "use_device", used.append)
    monkeypatch.setattr(peer_weights, "_block_digests", begin)
    monkeypatch.setattr(peer_weights, "_load_digests", lambda device: is_loaded.wait(60))
    monkeypatch.setattr(peer_weights, "ForeignRanges", Memory)
    monkeypatch.setattr(peer_weights, "host_name", lambda: "here")
    allocation = GpuAllocation(address=1, device_id=0, handle=bytes(64))
    source = peer_weights.PeerWeights(_offer([], host="here", allocations=[allocation]), 0)
    device = torch.device("cuda:0")
    with source.reached(device):
        lanes, digests = source._read(wanted, device)
        assert not is_closed.is_set()
    assert is_closed.wait(60)
    assert (lanes, used) == ("CUDA IPC", [device])
    right = peer_weights._Digests().of(far, theirs)
    assert digests.of(own, spans) == right
    assert len(begun) == 2 * len(far)


@pytest.mark.parametrize("kind", ["cpu", "cuda:0"])
def test_a_worker_that_cannot_be_reached_is_given_up(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(peer_weights, "STALL_S", 0.05)
    monkeypatch.setattr(peer_weights, "_load_digests", lambda device: None)
    source = peer_weights.PeerWeights(_offer([]), 0)
    monkeypatch.setattr(source, "_connect", lambda device: answers.wait(60))
    try:
        with (
            pytest.raises(TransferError, match=r"was not reached within 0\.05 s"),
            source.reached(torch.device(kind)),
        ):
            source.connect()
    finally:
        answers.set()


def _span(tensor: torch.Tensor) -> nixl_ranges.MemoryRange:
    return nixl_ranges.MemoryRange(tensor.data_ptr(), tensor.nbytes, "VRAM", 0)


def _offer(tensors: list[PackedTensor], **fields: Any) -> WeightOffer:
    nothing = {name: bytes(32) for name in ("scheme", "constants", "agent_metadata")}
    texts = dict.fromkeys(("share", "packing", "nixl_version", "agent_name"), "")
    rank = RankWeights(**nothing, **texts, tensors=tensors, **fields)
    digests = {name: bytes(32) for name in ("model_digest", "start_digest", "files")}
    return WeightOffer(**digests, version="", ranks=[rank])


@pytest.mark.full
def test_sleeping_weights_are_not_read(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = plain(tmp_path / "model", seed)
    with WeightSource(folder, **SETTINGS) as source:
        offer = source.offer()
        source.call("sleep", 1, ["weights"])
        assert "Asleep" in source.call("offer_weights")
        with LLM(folder, weights_offer=offer.to_json(), **SETTINGS) as llm:
            assert "weights are read from" in caplog.text
            right = texts(llm)
        source.call("wake", ["weights"])
        caplog.clear()
        with LLM(folder, weights_offer=source.offer().to_json(), **SETTINGS) as llm:
            assert "weights are read from" not in caplog.text
            assert texts(llm) == right


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2])
def test_an_update_from_a_peer_is_as_one_from_files(size: int, tmp_path: Path, seed: int) -> None:
    first, second = plain(tmp_path / "first", seed), plain(tmp_path / "second", seed + 1)
    settings = SETTINGS | {"tp": size}
    with LLM(second, **settings) as fresh:
        right, memory = texts(fresh), packed(fresh)
    with WeightSource(second, **settings) as source, LLM(first, **settings) as llm:
        before = texts(llm)
        offer = source.offer()
        status = llm.copy_weights(offer, "step-1")
        assert (status.state, status.version, status.num_updates) == ("ready", "step-1", 1)
        assert status.model_digest == offer.model_digest
        # Pages of the old version are still in the cache, but no prompt hits them.
        hits = llm.engine.scheduler.num_prefix_hit_tokens
        assert texts(llm) == right
        assert packed(llm) == memory
        assert llm.engine.scheduler.num_prefix_hit_tokens == hits
        # One that does not fit leaves the weights as they are.
        other = replace(offer, ranks=[replace(one, packing="another") for one in offer.ranks])
        with pytest.raises(ModelError, match="in another way"):
            llm.copy_weights(other)
        assert llm.weights.state == "ready"
        assert texts(llm) == right
        # One that fails in the middle leaves a mixture, which is not served.
        changed = [
            replace(one, tensors=[*one.tensors[:-1], replace(one.tensors[-1], digest=bytes(32))])
            for one in offer.ranks
        ]
        with pytest.raises(ModelError, match="other bytes"):
            llm.copy_weights(replace(offer, ranks=changed))
        assert llm.weights.state == "failed"
        with pytest.raises(WeightsIncomplete, match="other bytes"):
            texts(llm)
        source.kill()
        with pytest.raises(WeftError):
            llm.copy_weights(offer)
        llm.refit(first)
        assert texts(llm) == before
        # From one that is gone nothing is written.
        with pytest.raises(WeftError):
            llm.copy_weights(offer)
        assert llm.weights.state == "ready"
        assert texts(llm) == before
