"""Pages of an engine on several hosts leave it and come back, and adapters reach all hosts."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import RanksLost
from weft.contract.request import StopCriteria
from weft.engine.base.config import Role
from weft.engine.executor.ranks.host_memory import PAGES, OtherHosts, serve
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.engine.parallel.host_group import HostGroup
from weft.engine.scheduler.plan import VerifyItem
from weft.testing.engine.eagle3_cases import HeadReference, PublishedEntries
from weft.testing.engine.engine_pair import WAYS, EnginePair, ManualClock, make_engine
from weft.testing.engine.other_hosts import other_hosts
from weft.testing.engine.tier_bench import TierBench
from weft.testing.models.families import make_family
from weft.testing.models.lora_reference import BASE, PeftModels
from weft.testing.models.moe_families import make_any_family
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_mtp import make_tiny_mtp

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, VOCAB = 8, 517
TOO_LONG_S = 600.0
"""No test takes that long."""
FULL = pytest.mark.full


def random_prompt(length: int, vocab: int = 250) -> list[int]:
    return [random.randrange(3, vocab) for _ in range(length)]


def settings_of(
    stack: ExitStack, folder: Path, hosts: int, role: Role = "decode", **settings: Any
) -> dict[str, Any]:
    """Settings of a worker with this number of hosts, the others of which are started."""
    if hosts == 1:
        return {"num_threads": 1} | settings
    return stack.enter_context(other_hosts(folder, hosts, role=role)) | settings


def check_shipping(
    folder: Path,
    tmp_path: Path,
    owner: dict[str, Any],
    filler: dict[str, Any],
    way: dict[str, Any],
    reference: HeadReference | None = None,
) -> None:
    """A prompt that another worker computes has the text that the owner makes alone, and its pages
    have the entries of a head, if there is one.
    """
    clock = ManualClock()
    with ExitStack() as stack:
        of_owner = settings_of(stack, folder, **owner) | way
        of_filler = settings_of(stack, folder, role="prefill", **filler) | way
        pair = EnginePair(
            make_engine(folder, "decode", clock, **of_owner),
            [make_engine(folder, "prefill", clock, worker_id="p0", **of_filler)],
            clock,
        )
        stack.callback(pair.close)
        if filler["hosts"] > 1 and way["transport"] == "nixl":
            # Each host sends its share, so none comes to host 0.
            parts = pair.fillers["p0"].parts
            stack.enter_context(mock.patch.object(parts.local.device_pages, "gather", None))
        published, prompt = PublishedEntries(pair.owner), random_prompt(6 * PAGE + 3)
        pair.check_shipped(prompt, 6)
        if reference is not None:
            assert published.check(prompt, reference) == 6
            assert pair.owner.counters()["drafted_tokens"] > 0
        pair.settle()


@pytest.mark.parametrize(
    "transport", [pytest.param("nixl", marks=pytest.mark.needs("nixl")), "data"]
)
def test_a_prompt_is_shipped_from_several_hosts_to_one(
    transport: str, tmp_path: Path, seed: int
) -> None:
    folder = make_tiny("qwen3", tmp_path / "model", seed)
    check_shipping(folder, tmp_path, {"hosts": 1}, {"hosts": 2}, {"transport": transport})


@FULL
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("owner", "filler"),
    [
        ({"hosts": 2}, {"hosts": 1}),
        ({"hosts": 2}, {"hosts": 3}),
        ({"hosts": 1}, {"hosts": 2, "tp": 2}),
        ({"hosts": 2, "tp": 2}, {"hosts": 1, "pp": 2}),
        ({"hosts": 3, "tp": 2}, {"hosts": 4}),
        ({"hosts": 4}, {"hosts": 3, "tp": 2}),
    ],
)
def test_a_prompt_is_shipped_between_any_numbers_of_hosts(
    owner: dict[str, Any], filler: dict[str, Any], way: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    shape = {"num_attention_heads": 8, "num_hidden_layers": 4}
    folder = make_tiny("qwen3", tmp_path / "model", seed, **shape)
    check_shipping(folder, tmp_path, owner, filler, way)


@FULL
@pytest.mark.parametrize(("owner", "filler"), [(1, 2), (2, 1), (2, 3)])
def test_shipped_pages_have_the_entries_of_a_draft_head(
    owner: int, filler: int, tmp_path: Path, seed: int
) -> None:
    folder = make_tiny("qwen3", tmp_path / "model", seed, num_hidden_layers=4)
    head = {"draft_dir": make_tiny_draft(tmp_path / "head", folder, seed + 1)}
    of_owner = {"hosts": owner, "drafter": "eagle3", "draft_gate": "fixed"} | head
    reference, of_filler = HeadReference(folder, head["draft_dir"]), {"hosts": filler} | head
    check_shipping(folder, tmp_path, of_owner, of_filler, {"transport": "data"}, reference)


class NotedDrafts:
    """Notes the chains that an engine's head drafts, and the tokens before each."""

    def __init__(self, engine: Engine) -> None:
        assert engine.drafter is not None
        self._drafter, engine.pipeline._drafter = engine.drafter, self
        self.chains = list[tuple[list[int], list[int]]]()

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        drafts = self._drafter.draft(items)
        for item, chain in zip(items, drafts, strict=True):
            self.chains.append((item.request.tokens[: item.start + 1], list(chain)))
        return drafts


@FULL
@pytest.mark.parametrize(("owner", "filler"), [(1, 2), (2, 1), (2, 2)])
def test_an_mtp_head_of_a_hybrid_goes_on_from_what_another_worker_sent(
    owner: int, filler: int, tmp_path: Path, seed: int
) -> None:
    """The blocks of recurrent layers have the state with which the head begins."""
    kinds = ["linear_attention", "full_attention"] * 2
    naive = make_tiny_mtp("qwen", folder := tmp_path / "model", seed, layer_types=kinds)
    clock, head = ManualClock(), {"transport": "data", "mtp_head": True}
    with ExitStack() as stack:
        of_owner = settings_of(stack, folder, owner) | head
        of_filler = settings_of(stack, folder, filler, "prefill") | head
        pair = EnginePair(
            make_engine(folder, "decode", clock, drafter="mtp", draft_gate="fixed", **of_owner),
            [make_engine(folder, "prefill", clock, worker_id="p0", **of_filler)],
            clock,
        )
        stack.callback(pair.close)
        noted = NotedDrafts(pair.owner)
        pair.check_shipped(random_prompt(6 * PAGE + 3), 6)
        pair.settle()
    chains = [(tokens, chain) for tokens, chain in noted.chains if chain]
    assert chains
    for tokens, chain in chains:
        assert naive.agrees(tokens, chain), (tokens, chain)


@FULL
@pytest.mark.parametrize("name", ["falcon_h1", "deepseek-v3", "gemma3"])
@pytest.mark.parametrize(
    "transport", [pytest.param("nixl", marks=pytest.mark.needs("nixl")), "data"]
)
def test_prompts_of_other_families_are_shipped(
    transport: str, name: str, tmp_path: Path, seed: int
) -> None:
    """With recurrent layers, latents and windows."""
    folder = tmp_path / "model"
    make_any_family(name, folder, seed)
    way = {"transport": transport}
    check_shipping(folder, tmp_path, {"hosts": 1}, {"hosts": 2}, way)
    check_shipping(folder, tmp_path, {"hosts": 2}, {"hosts": 1}, way)


@FULL
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_pages_of_all_hosts_come_back_from_host_memory_and_disk(
    tp: int, kv_dtype: str, tmp_path: Path, seed: int
) -> None:
    folder = make_tiny("qwen3", tmp_path / "model", seed, head_dim=16)
    small = {"num_pages": 40, "host_cache_bytes": 1 << 18, "load_back_threshold": 0}
    small |= {"disk_cache_dir": tmp_path, "prefill_chunk_tokens": 4 * PAGE, "kv_dtype": kv_dtype}
    with ExitStack() as stack:
        settings = settings_of(stack, folder, 2, tp=tp, **small)
        bench = TierBench(folder, 20 * PAGE, **settings)
        stack.callback(bench.pair.close)
        bench.check_return(random_prompt(19 * PAGE + 3, 500))


@FULL
def test_states_of_all_hosts_come_back_from_host_memory_and_disk(tmp_path: Path, seed: int) -> None:
    """Each stage has recurrent layers and such with attention."""
    folder = tmp_path / "model"
    fields = {"vocab_size": VOCAB, "max_position_embeddings": 1024}
    make_family("nemotron_h", folder, seed, hybrid_override_pattern="M*M-M-M*", **fields)
    small = {"num_pages": 64, "host_cache_bytes": 1 << 18, "load_back_threshold": 0}
    small |= {"disk_cache_dir": tmp_path / "disk", "checkpoint_tokens": 4 * PAGE}
    with ExitStack() as stack:
        settings = settings_of(stack, folder, 2, **small)
        bench = TierBench(folder, 40 * PAGE, **settings)
        stack.callback(bench.pair.close)
        bench.check_return(random_prompt(19 * PAGE + 3, 500))


@FULL
@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_reach_all_hosts(tp: int, tmp_path: Path, seed: int) -> None:
    folder = make_tiny("llama", tmp_path / "model", seed, vocab_size=VOCAB)
    models = PeftModels(folder, tmp_path)
    models.add(seed, r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    models.add(seed + 1, r=4, target_modules=["embed_tokens", "lm_head", "o_proj"])
    names = ("q", "k", "v", "o", "gate", "up", "down", "embed_tokens", "lm_head")
    stop = StopCriteria(max_tokens=6, ignore_eos=True)
    sizes = {"dtype": "float32", "page_size": PAGE, "num_pages": 64, "max_running_requests": 8}
    with ExitStack() as stack:
        settings = settings_of(stack, folder, 2, tp=tp, **sizes)
        adapters = {"enable_lora": True, "max_loras": 2, "lora_projections": names}
        llm = stack.enter_context(LLM(folder, **settings | adapters))
        for directory in models.directories.values():
            llm.load_adapter(directory)
        digests = [*models.digests, BASE, *models.digests]
        prompts = [random_prompt(length, VOCAB) for length in (20, 31, 9, 40, 11)]
        samples = llm.generate(prompts, stop=stop, top_logprobs=20, adapters=digests)
    for prompt, adapter, sample in zip(prompts, digests, samples, strict=True):
        models.check(adapter, prompt, sample)


class BrokenRows:
    """Memory of a GPU that has failed."""

    num_rows, row_bytes = 4, 16

    def read(self, numbers: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def write(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        self.read(numbers)

    def digests(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.read(numbers)


ASK: dict[str, Callable[[OtherHosts, Int64Array], object]] = {
    "read": lambda hosts, numbers: hosts.read(PAGES, numbers, [16], lambda: None),
    "write": lambda hosts, numbers: hosts.write(
        PAGES, numbers, [torch.zeros(2, 16, dtype=torch.uint8)]
    ),
    "digests": lambda hosts, numbers: hosts.digests(PAGES, numbers, lambda: None),
}


@pytest.mark.parametrize("operation", ASK)
def test_a_host_whose_memory_fails_is_lost_at_once(
    operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    serve(far, HostGroup({}, TOO_LONG_S), {PAGES: BrokenRows()})
    with near:
        hosts = OtherHosts([near], HostGroup({1: near}, TOO_LONG_S), lambda: None)
        with pytest.raises(RanksLost):
            ASK[operation](hosts, np.array([1, 3]))
    assert "illegal memory access" in caplog.text
