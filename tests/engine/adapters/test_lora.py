"""Adapters in the engine: tokens and logits are PEFT's, however requests and adapters are mixed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from weft.checkpoint.adapters.rows import DevicePlace
from weft.contract.adapters import AdapterOrder
from weft.contract.errors import AdapterError, AdapterNotFound, ConfigError, Overloaded
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import SampleProgress, SessionEnd, Submit
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.engine.model.adapters.weights import HostWeights
from weft.testing.engine.adapter_orders import check_random_orders
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.late_device import LateDevice
from weft.testing.models.lora_reference import (
    BASE,
    LAST_LAYER_MLP,
    PeftModels,
    load,
    settings_of,
    unload_all,
)
from weft.testing.models.tiny_adapters import (
    LINEAR,
    PREFIX,
    adapter_tensors,
    make_adapter,
    vocabulary_tensors,
    write_adapter,
)
from weft.testing.models.tiny_models import make_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
VOCAB = 517
NUM_NEW = 8
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": PAGE,
    "num_pages": 200,
    "prefill_chunk_tokens": 16,
    "poison_free_pages": True,
    "enable_lora": True,
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def peft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PeftModels:
    """A tiny model, its last eight adapters as in `settings_of`."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    folder = tmp_path_factory.mktemp(request.param)
    model_dir = make_tiny(request.param, folder / "model", seed=seed, vocab_size=VOCAB)
    models = PeftModels(model_dir, folder)
    num_layers = tiny_config(request.param)["num_hidden_layers"]
    for index, settings in enumerate(settings_of(num_layers)):
        models.add(seed + index, **settings)
    return models


def make_llm(peft: PeftModels, **settings: Any) -> LLM:
    return LLM(peft.model_dir, **{**SETTINGS, **settings})


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def run(llm: LLM, prompts: list[list[int]], adapters: list[bytes]) -> list[GeneratedSample]:
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    return llm.generate(prompts, stop=stop, top_logprobs=20, adapters=adapters)


def check_all(
    peft: PeftModels,
    prompts: list[list[int]],
    adapters: list[bytes],
    samples: list[GeneratedSample],
) -> None:
    for prompt, adapter, sample in zip(prompts, adapters, samples, strict=True):
        peft.check(adapter, prompt, sample)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_eight_adapters_and_none_in_one_batch(peft: PeftModels, overlap: str) -> None:
    """Prompts of many lengths, in chunks; then again, from the prefix cache."""
    with make_llm(peft, overlap=overlap) as llm:
        digests = [llm.load_adapter(directory) for directory in peft.directories.values()]
        assert digests == peft.digests
        adapters = [*digests, BASE, *digests[:3], BASE]
        prompts = [random_prompt(random.randint(1, 60)) for _ in adapters]
        check_all(peft, prompts, adapters, run(llm, prompts, adapters))
        again = run(llm, prompts, adapters)
        check_all(peft, prompts, adapters, again)
        for prompt, sample in zip(prompts, again, strict=True):
            assert sample.timeline is not None
            assert sample.timeline.matched_tokens >= (len(prompt) - 1) // PAGE * PAGE
        unload_all(llm.engine)


@pytest.mark.parametrize("module", LINEAR)
def test_each_projection_alone(peft: PeftModels, module: str, tmp_path: Path) -> None:
    models = PeftModels(peft.model_dir, tmp_path)
    digest = models.add(random.randrange(2**31), r=5, target_modules=[module])
    with make_llm(peft, max_loras=1) as llm:
        llm.load_adapter(models.directories[digest])
        prompts = [random_prompt(30)]
        check_all(models, prompts, [digest], run(llm, prompts, [digest]))


def test_pages_never_match_across_adapters(peft: PeftModels, tmp_path: Path) -> None:
    """Not even where their content is equal: only the last layer's MLP differs."""
    models = PeftModels(peft.model_dir, tmp_path)
    last = tiny_config("llama")["num_hidden_layers"] - 1
    seed = random.randrange(2**31)
    for index in range(2):
        models.add(seed + index, layers_to_transform=[last], **LAST_LAYER_MLP)
    prompt = random_prompt(5 * PAGE)
    with make_llm(peft) as llm:
        for directory in models.directories.values():
            llm.load_adapter(directory)
        for adapter in (BASE, *models.digests):
            (sample,) = run(llm, [prompt], [adapter])
            assert sample.timeline is not None
            assert sample.timeline.matched_tokens == 0
            models.check(adapter, prompt, sample)
        # They wait for no page of each other's either.
        adapters = [BASE, *models.digests]
        prompts = [random_prompt(5 * PAGE)] * 3
        check_all(models, prompts, adapters, run(llm, prompts, adapters))
        assert llm.engine.counters()["prefix_waits"] == 0


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_after_preemption_eviction_and_reload(peft: PeftModels, overlap: str) -> None:
    """Two adapters fit on the device and one in host memory."""
    # At their ends two of the shortest requests need 18 pages, so that one is pre-empted. The
    # longest request needs 13, so that it can run alone.
    tight = {"max_loras": 2, "num_pages": 17, "max_running_requests": 4}
    with make_llm(peft, overlap=overlap, **tight) as probe:
        sizes = [probe.load_adapter(directory) for directory in peft.directories.values()]
        most = max(state.num_bytes for state in probe.engine.adapters.states())
        assert len(sizes) == 8
    with make_llm(peft, overlap=overlap, lora_host_bytes=most, **tight) as llm:
        digests = [llm.load_adapter(directory) for directory in peft.directories.values()]
        adapters = [random.choice([*digests, BASE]) for _ in range(8)] + digests
        prompts = [random_prompt(random.randint(30, 60)) for _ in adapters]
        stop = StopCriteria(max_tokens=40, ignore_eos=True)
        samples = llm.generate(prompts, stop=stop, top_logprobs=20, adapters=adapters)
        check_all(peft, prompts, adapters, samples)
        counters = llm.engine.counters()
        assert counters["preemptions"]
        assert counters["adapter_evictions"]
        assert counters["adapter_reads"] > len(digests), "some were read again"
        unload_all(llm.engine)


def test_samples_of_one_prompt_share_its_adapter(peft: PeftModels) -> None:
    digest = peft.digests[0]
    with make_llm(peft) as llm:
        llm.load_adapter(peft.directories[digest])
        prompt = random_prompt(3 * PAGE)
        sampling = SamplingParams(temperature=0.0, n=3)
        stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        (group,) = llm.generate_all([prompt], sampling, stop, 20, [digest])
        for sample in group:
            peft.check(digest, prompt, sample)
        unload_all(llm.engine)


def test_an_engine_fills_anothers_pages_with_the_adapter(peft: PeftModels) -> None:
    clock = ManualClock()
    owner, filler = (
        make_engine(peft.model_dir, role, clock, enable_lora=True) for role in ("decode", "prefill")
    )
    digests = peft.digests
    # The last one's KV equals the base's: what is filled with it must not be taken for that.
    missing, *others = digests
    for digest in digests:
        load(owner, peft.directories[digest])
    for digest in others:
        load(filler, peft.directories[digest])
    pair = EnginePair(owner, [filler], clock)
    try:
        adapters = [BASE, *others, missing]
        prompts = [random_prompt(random.randint(2 * PAGE + 1, 6 * PAGE)) for _ in adapters]
        pairs = list(zip(prompts, adapters, strict=True))
        asked = [pair.submit(prompt, NUM_NEW, adapter=adapter) for prompt, adapter in pairs]
        for (prompt, adapter), tokens in zip(pairs, pair.finish(*asked), strict=True):
            assert tokens == peft.greedy(adapter, prompt, NUM_NEW)
        sources = [pair.answers[request].finished[0].timeline.fills for request in asked]
        *filled, (declined,) = sources
        assert all(len(fills) == 1 and fills[0].accepted_tokens for fills in filled)
        assert declined.accepted_tokens == 0
        (event,) = [event for event in pair.events if event.kind == "declined"]
        assert (event.reason, missing.hex()[:16] in event.message) == ("namespace", True)
        pair.settle()
        for engine in (owner, filler):
            unload_all(engine)
    finally:
        pair.close()


def test_nothing_of_a_former_adapter_is_left_in_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank-64 adapter of NaN gives its rows to one of rank 8 while a step still names it."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    model_dir = make_tiny("llama", tmp_path / "model", seed=seed, vocab_size=VOCAB)
    config = tiny_config("llama", vocab_size=VOCAB)
    models = PeftModels(model_dir, tmp_path)
    small = models.add(seed, r=8, lora_alpha=16)
    large = make_adapter(tmp_path / "large", config, seed, rank=64)
    clock = ManualClock()
    settings = {"enable_lora": True, "overlap": "on", "max_loras": 1}
    engine = make_engine(model_dir, "decode", clock, **settings, lora_memory_bytes=64 << 20)
    pool = engine.adapters._pool  # type: ignore[union-attr]
    read = pool.read

    def read_nan(directory: str, *, is_lenient: bool) -> Any:
        weights = read(directory, is_lenient=is_lenient)
        assert isinstance(weights, HostWeights)
        with torch.inference_mode():
            for kind in weights.kinds.values() if directory == str(large) else ():
                kind.a.rows.fill_(float("nan"))
                kind.b.rows.fill_(float("nan"))
        return weights

    monkeypatch.setattr(pool, "read", read_nan)
    pair = EnginePair(engine, [], clock)
    digests = [load(engine, large), load(engine, models.directories[small])]
    assert digests[1] == small
    device = LateDevice(engine, random.Random(seed), early_chance=0.0)
    prompt = random_prompt(3 * PAGE)
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    submit = Submit(
        gateway=7,
        request_id="nan",
        attempt=1,
        prompt=prompt,
        sampling=SamplingParams(temperature=0.0),
        stop=stop,
        adapter=digests[0],
    )
    request = pair.submit(prompt, NUM_NEW, adapter=small)
    failed = []
    inbox = Inbox(submits=[submit, *pair._to_owner.submits])
    pair._to_owner = Inbox()
    while not failed:
        for batch in engine.turn(inbox).gateways:
            failed += batch.failed
        inbox = None
    assert device.most_queued > 1
    assert engine.pipeline.num_steps == 1, "a step is under way that names it"
    weights = pool._weights["down"]
    assert weights.a.isnan().any(), "its rows are still there"
    assert pair.finish(request) == [models.greedy(small, prompt, NUM_NEW)]
    place = engine.adapters.residency._residents[small].place  # type: ignore[union-attr]
    assert place.slot == 1
    for kind, rows in place.rows.items():
        assert not pool._weights[kind].a[rows].isnan().any()
        assert not pool._weights[kind].b[rows].isnan().any()
    assert weights.a.isnan().any(), "rows that nobody took again may hold anything"
    unload_all(engine)
    pair.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_in_the_pool_are_the_adapters(dtype: str, tmp_path: Path) -> None:
    """B is packed there; the vocabulary's columns leave its last block half empty."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    model_dir = make_tiny("llama", tmp_path / "model", seed=seed, vocab_size=VOCAB)
    config = tiny_config("llama", vocab_size=VOCAB)
    tensors = adapter_tensors(config, seed, rank=20) | vocabulary_tensors(config, seed, rank=20)
    settings = {"r": 20, "lora_alpha": 20, "target_modules": [*LINEAR, "lm_head", "embed_tokens"]}
    path = write_adapter(tmp_path / "adapter", tensors, **settings)
    parts = ["q", "down", "lm_head", "embed_tokens", "k", "v", "o", "gate", "up"]
    settings = {"dtype": dtype, "lora_projections": parts, "lora_memory_bytes": 64 << 20}
    with LLM(model_dir, **{**SETTINGS, **settings}) as llm:
        pool: Any = llm.engine.adapters._pool  # type: ignore[union-attr]
        weights = pool.read(str(path), is_lenient=False)
        assert isinstance(weights, HostWeights)
        rows = {
            kind: np.sort(random.sample(range(pool.limits.num_rows[kind]), count)).astype(np.int32)
            for kind, count in weights.needs.items()
        }
        pool.write(DevicePlace(2, rows), weights)
        for name, kind, layer in (
            ("model.layers.1.mlp.down_proj", "down", 1),
            ("model.layers.0.self_attn.k_proj", "k", 0),
            ("lm_head", "lm_head", 0),
        ):
            part = pool._weights[kind]
            assert part.counts[layer, 2] == 3
            # The bytes that the memory is divided by.
            planned = pool.limits.num_rows[kind] * pool.limits.row_bytes[kind]
            assert part.a.nbytes + part.b.nbytes == planned
            b = part.plain_b(part.table[layer, 2, :3].long()).flatten(0, 1)
            expected = tensors[f"{PREFIX}{name}.lora_B.weight"].to(part.b.dtype)
            assert torch.equal(b[:20].T, expected)
            assert not b[20:].any()


def test_random_loads_and_requests_give_the_right_text_and_leave_nothing(
    peft: PeftModels,
) -> None:
    """Threads and all: three places for eight adapters, loaded and unloaded while they are used."""
    check_random_orders(peft, lambda engine, rng: LateDevice(engine, rng), num_turns=400)


def test_an_adapter_that_is_not_loaded_is_refused(peft: PeftModels) -> None:
    directory = next(iter(peft.directories.values()))
    with make_llm(peft) as llm:
        with pytest.raises(AdapterNotFound, match="not loaded"):
            run(llm, [[5, 6, 7]], [peft.digests[0]])
        digest = llm.load_adapter(directory)
        run(llm, [[5, 6, 7]], [digest])
        llm.unload_adapter(digest)
        with pytest.raises(AdapterNotFound):
            run(llm, [[5, 6, 7]], [digest])
    with make_llm(peft, enable_lora=False) as llm:
        with pytest.raises(ConfigError, match="enable_lora"):
            llm.load_adapter(directory)
        with pytest.raises(AdapterNotFound):
            run(llm, [[5, 6, 7]], [digest])


def test_an_unload_lets_requests_end_that_were_begun_elsewhere(peft: PeftModels) -> None:
    clock = ManualClock()
    engine = make_engine(peft.model_dir, "decode", clock, enable_lora=True)
    digest = load(engine, peft.directories[peft.digests[0]])
    pair = EnginePair(engine, [], clock)
    prompt = random_prompt(20)
    first = pair.submit(prompt, 20, adapter=digest)
    pair.run(lambda: engine.adapters.states()[0].state == "device")
    (state,) = engine.adapters.states()
    assert (state.num_requests, state.is_unloading) == (1, False)
    pair.send(adapter_orders=[AdapterOrder(query=9, action="unload", digest=digest)])
    pair.turn()
    (state,) = engine.adapters.states()
    assert state.is_unloading
    right = peft.greedy(digest, prompt, 20)
    second = pair.submit(prompt, 20, adapter=digest)
    (submit,) = pair._to_owner.submits
    submit.attempt = 2
    submit.progress = [SampleProgress(sample=0, tokens=right[:5])]
    pair.answers[second].tokens[0] = right[:5]
    assert pair.finish(first, second) == [right, right]
    pair.turn()
    assert engine.adapters.states() == []
    refused = pair.submit(prompt, 20, adapter=digest)
    with pytest.raises(AdapterNotFound):
        pair.finish(refused)
    unload_all(engine)
    pair.close()


def test_requests_that_wait_for_an_adapter_count_as_waiting(peft: PeftModels) -> None:
    clock = ManualClock()
    engine = make_engine(
        peft.model_dir, "decode", clock, enable_lora=True, max_loras=1, max_waiting_requests=3
    )
    pair = EnginePair(engine, [], clock)
    here, away = (load(engine, peft.directories[digest]) for digest in peft.digests[:2])
    pair.submit(random_prompt(20), 200, adapter=here)
    pair.run(lambda: engine.scheduler.sizes()["running"] == 1)
    for _ in range(3):
        pair.submit(random_prompt(10), 2, adapter=away)
    pair.turn()
    assert engine.scheduler.sizes()["lacking_adapter"] == 3
    pair.submit(random_prompt(10), 2)
    with pytest.raises(Overloaded, match="3 requests are waiting"):
        pair.turn()
    pair.close()


def test_a_chat_with_an_adapter_ends_by_word(peft: PeftModels) -> None:
    clock = ManualClock()
    engine = make_engine(peft.model_dir, "decode", clock, enable_lora=True)
    pair = EnginePair(engine, [], clock)
    digest = load(engine, peft.directories[peft.digests[0]])
    for adapter in (BASE, digest):
        pair.finish(pair.submit(random_prompt(3 * PAGE), 3, adapter=adapter, session_id="chat"))
    assert engine.sessions is not None
    assert len(engine.sessions.pins) == 2
    pair.send(session_ends=[SessionEnd(cache_salt="other", session_id="chat")])
    pair.turn()
    assert len(engine.sessions.pins) == 2
    pair.send(session_ends=[SessionEnd(cache_salt="", session_id="chat")])
    pair.turn()
    assert (len(engine.sessions.pins), engine.sessions.pins.num_pages) == (0, 0)
    unload_all(engine)
    pair.close()


def test_what_is_refused_says_why(peft: PeftModels, tmp_path: Path) -> None:
    config = tiny_config("llama", vocab_size=VOCAB)
    large = make_adapter(tmp_path / "large", config, 1, rank=64)
    too_few = pytest.raises(AdapterError, match=r"rows of [\d,]+ bytes for q.*lora_memory_bytes")
    with make_llm(peft, max_loras=1) as llm, too_few:
        llm.load_adapter(large)
    with make_llm(peft, max_lora_rank=32) as llm, pytest.raises(AdapterError, match="rank"):
        llm.load_adapter(large)
    of_two = pytest.raises(AdapterError, match="lora_projections names q, v")
    with make_llm(peft, lora_projections=("q", "v")) as llm, of_two:
        llm.load_adapter(large)
    for settings, words in (
        ({"lora_memory_bytes": 1000}, "holds not one row"),
        ({"lora_projections": ("q", "experts")}, "experts"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_llm(peft, **settings)


def test_steps_without_adapters_take_the_path_of_a_model_without(peft: PeftModels) -> None:
    """Bit for bit, also beside requests that have one."""
    prompts = [random_prompt(20) for _ in range(3)]
    with make_llm(peft, enable_lora=False) as llm:
        plain = run(llm, prompts, [])
    with make_llm(peft) as llm:
        digest = llm.load_adapter(peft.directories[peft.digests[0]])
        steps = []
        forward = llm.engine.parts.local._model.forward

        def seen(batch: Any, pool: torch.Tensor) -> torch.Tensor:
            steps.append(batch.lora)
            return forward(batch, pool)

        llm.engine.parts.local._model.forward = seen  # type: ignore[method-assign]
        assert [s.logprobs for s in run(llm, prompts, [])] == [s.logprobs for s in plain]
        assert steps
        assert all(step is None for step in steps)
        llm.engine.memory.flush_cache()
        steps.clear()
        mixed = run(llm, [*prompts, prompts[0]], [BASE, BASE, BASE, digest])
        assert any(step is not None for step in steps)
        assert [s.token_ids for s in mixed[:3]] == [s.token_ids for s in plain]
