"""Pages and adapters of stages on GPUs of several hosts, which are processes of this machine."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from weft.engine.base.config import Role
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.other_hosts import other_hosts
from weft.testing.engine.ranked_pages import PAGE, SIZES, new_prompt, ranked_pages
from weft.testing.engine.ranked_texts import (
    adapted_texts,
    gpus_of_ranks,
    make_llm,
    make_model,
    random_prompts,
)
from weft.testing.engine.tier_bench import VOCAB, TierBench
from weft.testing.models.families import make_family
from weft.testing.models.lora_reference import PeftModels
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]

WITH_NIXL = pytest.param("nixl", True, marks=pytest.mark.needs("nixl"))


def on_two_hosts(
    folder: Path, role: Role = "decode", tp: int = 1
) -> AbstractContextManager[dict[str, Any]]:
    """Hosts with several ranks share the GPUs."""
    devices = gpus_of_ranks(2).split(",") if tp == 1 else [gpus_of_ranks(tp)] * 2
    return other_hosts(folder, 2, devices=devices, role=role, tp=tp)


def make_kind(kind: str, folder: Path) -> Path:
    """A model with layers of both kinds in each stage if it is a hybrid."""
    seed = random.randrange(1 << 30)
    if kind == "llama":
        return make_tiny("llama", folder, seed, num_hidden_layers=5, head_dim=64)
    fields = {"vocab_size": VOCAB, "max_position_embeddings": 1024}
    return make_family(kind, folder, seed, hybrid_override_pattern="M*M-M-M*", **fields)


@pytest.mark.parametrize("kind", ["llama", "nemotron_h"])
@pytest.mark.parametrize(("transport", "owns"), [("data", True), ("data", False), WITH_NIXL])
def test_a_prompt_is_shipped_to_and_from_several_hosts(
    transport: str, owns: bool, kind: str, tmp_path: Path
) -> None:
    folder = make_kind(kind, tmp_path / "model")
    settings: dict[str, Any] = SIZES | {"transport": transport, "checkpoint_tokens": 4 * PAGE}
    clock = ManualClock()
    with ExitStack() as stack:
        role: Role = "decode" if owns else "prefill"
        hosts = stack.enter_context(on_two_hosts(folder, role))
        one = settings | {"device": "cuda:0"}
        of_owner, of_filler = (settings | hosts, one) if owns else (one, settings | hosts)
        pair = EnginePair(
            make_engine(folder, "decode", clock, **of_owner),
            [make_engine(folder, "prefill", clock, worker_id="p0", **of_filler)],
            clock,
        )
        stack.callback(pair.close)
        for _ in range(2):
            pair.check_shipped(new_prompt(6), 6)
            pair.settle()


@pytest.mark.parametrize("kind", ["llama", "nemotron_h"])
def test_pages_of_all_hosts_come_back_from_host_memory_and_disk(kind: str, tmp_path: Path) -> None:
    folder = make_kind(kind, tmp_path / "model")
    tiers = {"num_pages": 64, "host_cache_bytes": 1 << 20, "load_back_threshold": 0}
    tiers |= {"disk_cache_dir": tmp_path / "disk", "checkpoint_tokens": 4 * PAGE}
    with ExitStack() as stack:
        hosts = stack.enter_context(on_two_hosts(folder))
        bench = TierBench(folder, 40 * PAGE, **SIZES | tiers | hosts)
        stack.callback(bench.pair.close)
        bench.check_return(new_prompt(19))


@pytest.mark.parametrize("kind", ["llama", "nemotron_h"])
@pytest.mark.parametrize("owns", [True, False])
def test_a_prompt_is_shipped_to_and_from_hosts_of_two_ranks(
    owns: bool, kind: str, tmp_path: Path
) -> None:
    folder = make_kind(kind, tmp_path / "model")
    settings: dict[str, Any] = {"transport": "data", "checkpoint_tokens": 4 * PAGE}
    with on_two_hosts(folder, "decode" if owns else "prefill", tp=2) as hosts:
        one, two = settings | {"device": "cuda:0"}, settings | hosts
        found = ranked_pages("shipped", folder, *((two, one) if owns else (one, two)))
    assert found["failures"] == ["", "", ""]
    assert found["tokens"] == [6 * PAGE] * 3
    assert found["shipped"] == found["alone"]
    assert found["after"] == found["longer"]


@pytest.mark.parametrize("kind", ["llama", "nemotron_h"])
def test_pages_of_hosts_of_two_ranks_come_back_from_tiers(kind: str, tmp_path: Path) -> None:
    folder = make_kind(kind, tmp_path / "model")
    with on_two_hosts(folder, tp=2) as hosts:
        found = ranked_pages("tiers", folder, hosts | {"checkpoint_tokens": 4 * PAGE})
    assert found["again"] == found["alone"]
    assert found["after"] == found["longer"]
    assert found["corrupt"] == 0
    assert sum(found["loaded"]) > 0


def test_tokens_with_adapters_are_those_of_one_gpu(tmp_path: Path) -> None:
    """More adapters than the devices have room for."""
    folder = make_model("llama", tmp_path / "model")
    models = PeftModels(folder, tmp_path)
    for kind in ({"r": 8}, {"r": 24, "target_modules": ["k_proj", "o_proj"]}, {"r": 5}):
        models.add(random.randrange(1 << 30), **kind)
    adapters = list(models.directories.values())
    prompts = random_prompts((5, 90, 41, 177, 12, 63, 100, 33, 54))
    settings = {"enable_lora": True, "max_loras": 2, "lora_memory_bytes": 8 << 20}
    settings |= {"drafter": "none", "num_pages": 120}
    with make_llm(folder, device="cuda:0", **settings) as llm:
        alone = adapted_texts(llm, prompts, adapters)
    with (
        on_two_hosts(folder) as hosts,
        make_llm(folder, **settings | hosts) as llm,
    ):
        assert adapted_texts(llm, prompts, adapters) == alone
