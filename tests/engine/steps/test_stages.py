"""Stages of a pipeline make the text that one process makes, bit for bit, and end together."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ConfigError, RanksLost
from weft.contract.reports import describe_bubbles
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.engine.base.config import NEVER_SHIP_TOKENS, EngineConfig
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.orders import Order, PackPieces, ZeroPages
from weft.engine.executor.port import ExecutorFacts
from weft.engine.executor.ranks.frames import decode
from weft.engine.executor.ranks.staged import StagedExecutor
from weft.engine.loop.build import lanes_of
from weft.engine.loop.llm import LLM
from weft.engine.parallel.stages import check_stages, layers_of_stages
from weft.pages.memory.page_table import PageTable
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.tier_bench import TierBench
from weft.testing.models.families import FAMILIES, make_family
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.lora_reference import BASE, PeftModels
from weft.testing.models.moe_families import MOE_FAMILIES, make_any_family
from weft.testing.models.quantised_models import quantised_copy
from weft.testing.models.tiny_drafts import make_tiny_draft, make_tiny_eagle
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.tiny_mtp import make_cycle, make_tiny_mtp

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, VOCAB, LIMIT_S = 8, 517, 3.0
LATE_S = 60.0
"""Time that a busy machine may take beyond a limit."""
GREEDY = SamplingParams(temperature=0.0)
FULL = pytest.mark.full
TWO_SHAPES = ["sliding_attention", "full_attention"] * 2
"""Layers of which each of two stages has both kinds."""


def most_under_way(llm: LLM) -> list[int]:
    """Gets, for each step that ends from now on, how many steps were under way."""
    pipeline, found = llm.engine.pipeline, list[int]()
    end = pipeline._end

    def note(step: Any) -> None:
        found.append(1 + pipeline.num_steps)
        end(step)

    pipeline._end = note  # type: ignore[method-assign]
    return found


def make_llm(folder: Path, **settings: Any) -> LLM:
    sizes = {"page_size": PAGE, "prefill_chunk_tokens": 24, "max_step_tokens": 48, "num_pages": 24}
    # Poisoning waits for the steps under way in every turn, so that few lanes are taken.
    sizes |= {"max_running_requests": 8, "rank_timeout_s": 60.0, "poison_free_pages": False}
    drafts = {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 3}
    return LLM(folder, **{"dtype": "float32"} | sizes | drafts | settings)


def random_prompts(lengths: tuple[int, ...], vocab: int = VOCAB) -> list[list[int]]:
    shared = [random.randrange(3, vocab) for _ in range(40)]
    return [(shared + [random.randrange(3, vocab) for _ in range(n)])[-n:] for n in lengths]


def sampled(rows: int) -> list[SamplingParams]:
    """Greedy, drawn, penalised and constrained ones, and ones that repeat themselves."""
    kinds = (
        GREEDY,
        SamplingParams(temperature=0.8, top_k=20, seed=random.randrange(1 << 60)),
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, constraint=Constraint(kind="regex", text="[ab]{3,9}c")),
        replace(GREEDY, logit_bias=dict.fromkeys((7, 8, 9), 50.0)),
    )
    return [kinds[row % len(kinds)] for row in range(rows)]


def run(llm: LLM, prompts: list[list[int]], kinds: list[SamplingParams]) -> list[Any]:
    """Tokens, ends and log-probabilities, prefix hits among them."""
    stop = StopCriteria(max_tokens=30)
    found = llm.generate(prompts, kinds, stop, top_logprobs=2)
    found += llm.generate(prompts, kinds, stop, prompt_logprobs=1)
    for _ in range(2):
        found += llm.generate(prompts[1:2], GREEDY, stop)
    scored = [[*one.logprobs, *one.prompt_logprobs] for one in found]
    return [
        (one.token_ids, one.finish_reason, [token.logprob for token in tokens])
        for one, tokens in zip(found, scored, strict=True)
    ]


def generate_on_and_on(llm: LLM) -> None:
    while True:
        llm.generate(random_prompts((50, 20)), stop=StopCriteria(max_tokens=60))


CASES = [
    ("llama", 2),
    pytest.param("llama", 3, marks=FULL),
    pytest.param("mistral", 3, marks=FULL),
    pytest.param("qwen3_moe", 2, marks=FULL),
    pytest.param("qwen2", 2, marks=FULL),
]


@pytest.mark.parametrize(("kind", "count"), CASES)
def test_texts_are_those_of_one_process(kind: str, count: int, tmp_path: Path, seed: int) -> None:
    """With prompts in chunks, prefix hits, drafts, constraints, and too few pages for all."""
    folder = make_tiny(kind, tmp_path, seed, tokenizer=True, vocab_size=VOCAB)
    names = ["accepted_tokens", "prefix_hit_tokens"]
    if count == 2:
        names.append("preemptions")  # With three, nearly all requests may be in a step.
    with make_llm(folder) as one, make_llm(folder, pp=count) as llm:
        (notice,) = (text for text in llm.engine.info.notices if "pipeline" in text)
        assert f"{count} stages" in notice
        under_way = most_under_way(llm)
        # Some prompts end so early that no request is preempted.
        for _ in range(20):
            prompts = random_prompts((5, 90, 41, 77, 12, 100))
            kinds = sampled(len(prompts))
            assert run(llm, prompts, kinds) == run(one, prompts, kinds)
            counters = llm.engine.counters()
            if all(counters[name] for name in names):
                break
    assert all(counters[name] for name in names), counters
    assert max(under_way) == count
    assert 0 < counters["bubble_us"] < counters["stage_us"]
    assert "bubbles" in describe_bubbles(counters)
    assert not describe_bubbles({})


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("eagle3", 2),
        pytest.param("eagle3", 3, marks=FULL),
        pytest.param("eagle", 2, marks=FULL),
    ],
)
def test_texts_with_a_draft_head_are_those_of_one_process(
    kind: str, count: int, tmp_path: Path, seed: int
) -> None:
    """Of an EAGLE-3 head that reads layers of other stages too."""
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 4}
    folder = make_tiny("llama", tmp_path / "model", seed, tokenizer=True, **sizes)
    make = make_tiny_draft if kind == "eagle3" else make_tiny_eagle
    head = {"drafter": kind, "draft_dir": make(tmp_path / "head", folder, seed + 1)}
    prompts = random_prompts((5, 90, 41, 77, 12, 100))
    kinds = sampled(len(prompts))
    with make_llm(folder, **head) as one, make_llm(folder, pp=count, **head) as llm:
        under_way = most_under_way(llm)
        assert run(llm, prompts, kinds) == run(one, prompts, kinds)
        counters = llm.engine.counters()
    assert counters["drafted_tokens"] > 0
    assert counters["prefix_hit_tokens"] > 0
    assert max(under_way) == count


def enqueue_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = StagedExecutor.__init__

    def begin_at_once(self: StagedExecutor, local: LocalExecutor, *others: Any) -> None:
        local.facts = local.facts._replace(is_asynchronous=True)
        begin(self, local, *others)
        self._has_one_pool = True

    monkeypatch.setattr(StagedExecutor, "__init__", begin_at_once)


@FULL
@pytest.mark.parametrize("waits", [True, False])
def test_as_many_drafts_are_accepted_as_in_one_process(
    waits: bool, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one request after the other, since others in a step take from its drafts. On GPUs rank 0
    does not wait until it draws.
    """
    make_tiny_mtp("glm", folder := tmp_path / "model", seed)
    make_cycle(folder, seed)
    prompts, found = random_prompts((5, 60, 33), 250), []
    stop = StopCriteria(max_tokens=40, ignore_eos=True)
    kinds = [GREEDY, SamplingParams(temperature=0.5, seed=random.randrange(1 << 60))]
    for count in (1, 2):
        if count > 1 and not waits:
            enqueue_at_once(monkeypatch)
        with make_llm(folder, drafter="mtp", num_pages=96, pp=count) as llm:
            asked = [(prompt, kind) for prompt in prompts for kind in kinds]
            texts = [llm.generate([prompt], kind, stop)[0].token_ids for prompt, kind in asked]
            counters = llm.engine.counters()
            found.append((texts, counters["drafted_tokens"], counters["accepted_tokens"]))
    assert found[0] == found[1]
    assert found[0][2] > found[0][1] / 4


@FULL
def test_no_free_page_is_read(tmp_path: Path, seed: int) -> None:
    """Work between steps on pages, here that which poisons them, waits for the steps under way."""
    folder = make_tiny("llama", tmp_path, seed, tokenizer=True, vocab_size=VOCAB)
    prompts = random_prompts((5, 90, 41, 77))
    kinds, found = sampled(len(prompts)), []
    for count in (1, 2):
        with make_llm(folder, pp=count, poison_free_pages=True) as llm:
            found.append(run(llm, prompts, kinds))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "drafter", ["ngram", *(pytest.param(one, marks=FULL) for one in ("eagle3", "none"))]
)
def test_texts_are_the_same_where_the_last_stage_does_not_wait(
    drafter: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, where each step is enqueued when it is launched."""
    folder = make_tiny("llama", tmp_path / "model", seed, tokenizer=True, vocab_size=VOCAB)
    head = make_tiny_draft(tmp_path / "head", folder, seed + 1) if drafter == "eagle3" else None
    prompts = random_prompts((5, 90, 41, 77, 12))
    kinds, settings = sampled(len(prompts)), {"drafter": drafter, "draft_dir": head}
    with make_llm(folder, **settings) as llm:
        alone = run(llm, prompts, kinds)
    enqueue_at_once(monkeypatch)
    with make_llm(folder, pp=2, **settings) as llm:
        under_way = most_under_way(llm)
        assert run(llm, prompts, kinds) == alone
    assert max(under_way) == 2


@FULL
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_ranks_of_stages_make_the_texts_of_ranks_without(
    kind: str, tmp_path: Path, seed: int
) -> None:
    folder = make_tiny(kind, tmp_path, seed, tokenizer=True, vocab_size=VOCAB)
    prompts = random_prompts((5, 90, 41, 12))
    kinds, found = sampled(len(prompts)), []
    for ranks in ({"tp": 2}, {"tp": 2, "pp": 2, "check_ranks": True}):
        with make_llm(folder, **ranks) as llm:
            found.append(run(llm, prompts, kinds))
    assert found[0] == found[1]


@FULL
@pytest.mark.parametrize("name", [*FAMILIES, *MOE_FAMILIES])
def test_texts_of_other_families_are_those_of_one_process(
    name: str, tmp_path: Path, seed: int
) -> None:
    """With experts, latents, windows, recurrent layers and layers of several shapes."""
    folder = tmp_path / "model"
    make_any_family(name, folder, seed)
    config = ModelConfig.load(folder)
    try:
        check_stages(folder, config, "auto", 2, has_images=False)
    except ConfigError as error:
        pytest.skip(f"no stages: {error}")
    check_greedy(folder, random_prompts((5, 60, 33), 250), language_model_only=True)


def check_greedy(folder: Path, prompts: list[list[int]], **settings: Any) -> None:
    """The texts of two stages are those of one process; asked twice, for prefix hits."""
    stop, found = StopCriteria(max_tokens=16, ignore_eos=True), []
    for count in (1, 2):
        with make_llm(folder, num_pages=96, pp=count, **settings) as llm:
            samples = [*llm.generate(prompts, GREEDY, stop), *llm.generate(prompts, GREEDY, stop)]
            found.append([sample.token_ids for sample in samples])
    assert found[0] == found[1]


@FULL
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("form", ["fp8", "int8", "load int8", "load int4"])
def test_texts_of_quantised_weights_are_those_of_one_process(
    form: str, kind: str, tmp_path: Path, seed: int
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    folder = make_tiny(kind, tmp_path / "model", seed, tokenizer=True, vocab_size=VOCAB, **sizes)
    settings: dict[str, Any] = {}
    if form == "fp8":
        folder = fp8_copy(folder, tmp_path / "quantised", "blocks")[0]
    elif form == "int8":
        folder = quantised_copy(folder, tmp_path / "quantised")
    else:
        settings = {"quantization": form.removeprefix("load ")}
    check_greedy(folder, random_prompts((5, 60, 33)), **settings)


@FULL
def test_adapters_change_the_layers_of_all_stages(tmp_path: Path, seed: int) -> None:
    folder = make_tiny("llama", tmp_path / "model", seed, vocab_size=VOCAB)
    models = PeftModels(folder, tmp_path)
    models.add(seed, r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    models.add(seed + 1, r=4, target_modules=["embed_tokens", "lm_head", "o_proj"])
    names = ("q", "k", "v", "o", "gate", "up", "down", "embed_tokens", "lm_head")
    stop = StopCriteria(max_tokens=6, ignore_eos=True)
    with make_llm(folder, pp=2, enable_lora=True, max_loras=2, lora_projections=names) as llm:
        for directory in models.directories.values():
            llm.load_adapter(directory)
        digests = [*models.digests, BASE, *models.digests]
        prompts = random_prompts((20, 31, 9, 40, 11))
        samples = llm.generate(prompts, stop=stop, top_logprobs=20, adapters=digests)
    for prompt, adapter, sample in zip(prompts, digests, samples, strict=True):
        models.check(adapter, prompt, sample)


@FULL
@pytest.mark.parametrize("model", ["qwen3", "nemotron_h"])
@pytest.mark.parametrize(
    ("owner", "filler"),
    [({}, {"pp": 2}), ({"pp": 2}, {}), ({"pp": 2}, {"pp": 3}), ({"tp": 2}, {"pp": 2})],
)
def test_a_prompt_is_shipped_between_workers_with_stages_and_without(
    owner: dict[str, int], filler: dict[str, int], model: str, tmp_path: Path, seed: int
) -> None:
    folder = tmp_path / "model"
    if model == "qwen3":
        make_tiny("qwen3", folder, seed, num_attention_heads=8)
    else:
        make_family(model, folder, seed)
    clock, one = ManualClock(), {"num_threads": 1}
    pair = EnginePair(
        make_engine(folder, "decode", clock, **owner, **one),
        [make_engine(folder, "prefill", clock, worker_id="p0", **filler, **one)],
        clock,
    )
    try:
        pair.check_shipped(*random_prompts((6 * PAGE + 3,), 250), 6)
        pair.settle()
    finally:
        pair.close()


@FULL
def test_pages_of_all_stages_come_back_from_host_memory_and_disk(tmp_path: Path, seed: int) -> None:
    folder = make_tiny("qwen3", tmp_path / "model", seed)
    small = {"num_pages": 40, "host_cache_bytes": 1 << 18, "load_back_threshold": 0}
    small |= {"disk_cache_dir": tmp_path, "prefill_chunk_tokens": 4 * PAGE, "num_threads": 1}
    bench = TierBench(folder, 20 * PAGE, pp=2, **small)
    try:
        bench.check_return(*random_prompts((19 * PAGE + 3,), 500))
    finally:
        bench.pair.close()


@FULL
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_stage_that_is_lost_ends_the_engine_in_time(how: str, tmp_path: Path, seed: int) -> None:
    folder = make_tiny("llama", tmp_path, seed, tokenizer=True, vocab_size=VOCAB)
    limits = {"rank_timeout_s": LIMIT_S} if how == "stopped" else {}
    before = psutil.Process().children()
    with make_llm(folder, pp=2, **limits) as llm:
        ranks = [one for one in psutil.Process().children() if one not in before]
        struck_at = 0.0

        def strike() -> None:
            nonlocal struck_at
            struck_at = time.monotonic()
            os.kill(ranks[0].pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)

        timer = threading.Timer(0.3, strike)
        timer.start()
        wanted = "rank 1.*signal 9" if how == "killed" else r"stage 0 \(rank 1\).*have not come"
        with pytest.raises(RanksLost, match=wanted):
            generate_on_and_on(llm)
        timer.join()
        assert time.monotonic() - struck_at < LIMIT_S + LATE_S
        with pytest.raises(RanksLost):
            llm.engine.turn()
    assert not any(rank.is_running() for rank in ranks)


def test_layers_are_divided_evenly_and_the_first_stages_have_more() -> None:
    for num_layers in range(1, 20):
        for count in range(1, num_layers + 1):
            layers = layers_of_stages(num_layers, count)
            assert [one for stage in layers for one in stage] == list(range(num_layers))
            sizes = [len(stage) for stage in layers]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1


class NotedStages:
    """Stands in for rank 0 of stages on GPUs, whose pools it maps, and for its group: notes what
    they are told, in order.
    """

    def __init__(self) -> None:
        self.told: list[str] = []
        self.facts = ExecutorFacts(PAGE, (), is_asynchronous=True)
        self.page_table, self.window_tables = PageTable(2, 4, keeps_changes=True), ()
        self.device_pages = SimpleNamespace(is_whole=False)
        self.group, self.chains = self, None

    def post(self, frame: Any) -> None:
        self.told.append(f"all: {type(decode(np.concatenate(frame, dtype=np.int64))).__name__}")

    def lies_on_all(self, order: Order) -> bool:
        return isinstance(order, PackPieces)

    def order(self, order: Order) -> None:
        self.told.append(type(order).__name__)

    def meet(self) -> None:
        self.told.append("meet")

    def mark(self) -> Any:
        self.told.append("mark")
        return SimpleNamespace(wait=lambda: self.told.append("wait"))


def test_rank_0_moves_pages_behind_the_work_of_stages_on_other_gpus() -> None:
    noted: Any = NotedStages()
    executor = StagedExecutor(noted, noted, 2)
    executor.order(ZeroPages([1]))
    executor.mark()
    assert noted.told == ["all: ZeroPages", "ZeroPages", "all: Barrier", "meet", "mark"]
    noted.told.clear()
    # Other GPUs do not wait for what rank 0 writes to their memory, so its host does.
    executor.order(PackPieces(0, [1], [2], is_each=False))
    assert noted.told == ["all: Barrier", "meet", "PackPieces", "mark", "wait"]


def test_gpus_have_two_steps_under_way() -> None:
    """A third one would take the memory of a result from which nothing has been drawn."""
    of_hosts: dict[str, Any] = {"hosts": 4, "rendezvous": "localhost:29600", "transport": "data"}
    of_hosts |= {"local_prefill_max_tokens": NEVER_SHIP_TOKENS}
    for device, lanes in (("cpu", 4), ("cuda", 2)):
        assert lanes_of(EngineConfig(model_dir=Path(), pp=4, device=device, **of_hosts)) == lanes


def test_what_stages_cannot_do_is_refused_with_its_reason(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model", 0)
    with pytest.raises(ConfigError, match="has 3 layers; take pp = 1"):
        LLM(folder, pp=4)
    with pytest.raises(ConfigError, match="host_rank = 1: must be below hosts = 1"):
        LLM(folder, host_rank=1)
    with pytest.raises(ConfigError, match="rendezvous = : must be host:port of host 0"):
        LLM(folder, pp=2, hosts=2)
    hosts = {"pp": 2, "hosts": 2, "rendezvous": "localhost:29600", "tp": 2, "device": "cuda"}
    with pytest.raises(ConfigError, match="1 on GPUs with tp and adapters"):
        LLM(folder, enable_lora=True, **hosts)
    with pytest.raises(ConfigError, match="one device, or one for each of 2 ranks"):
        LLM(folder, **hosts | {"device": "cuda:0,cuda:1,cuda:2,cuda:3"})
    with pytest.raises(ConfigError, match="1 on GPUs with pp"):
        LLM(folder, pp=2, tp=2, dcp=2, device="cuda")
    with pytest.raises(ConfigError, match="1 or 2 on GPUs of one host"):
        LLM(folder, pp=3, device="cuda")
    sizes = {layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in ("1", "3")}
    fields = {"layer_types": TWO_SHAPES, "per_layer_config": sizes}
    shapes = make_family("gemma4-keys", tmp_path / "shapes", 0, **fields)
    with pytest.raises(ConfigError, match="on GPUs pages with heads of several shapes"):
        LLM(shapes, pp=2, device="cuda", host_cache_bytes=1 << 20, language_model_only=True)
    head = make_tiny_draft(tmp_path / "head", folder, 1)
    for name, settings in (
        ("1 on a CPU with tp and a draft head", {"tp": 2}),
        ("1 with draft_width > 1", {"drafter": "eagle3", "draft_width": 2}),
    ):
        with pytest.raises(ConfigError, match=name):
            LLM(folder, pp=2, draft_dir=head, **settings)
    with pytest.raises(ConfigError, match="drafter = model"):
        LLM(folder, pp=2, drafter="model", draft_dir=folder)
    whole = {"lora_whole_matrices": 1, "lora_projections": ("q", "lm_head")}
    with pytest.raises(ConfigError, match="lora_whole_matrices"):
        LLM(folder, pp=2, enable_lora=True, **whole)
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    with pytest.raises(ConfigError, match="task embed"):
        LLM(folder, pp=2)
