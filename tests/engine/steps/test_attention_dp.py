"""Engines that share experts make the texts that one engine makes, each of its own requests."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.contract.errors import ConfigError, ModelError, RanksLost, WeftError
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.engine.base.config import EngineConfig
from weft.engine.executor.ranks import attention_dp
from weft.engine.executor.ranks.attention_dp import AttentionGroup
from weft.engine.executor.ranks.step_forms import StepForms
from weft.engine.loop.combinations import check_combination
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.engine.parallel import lockstep as lockstep_module
from weft.engine.parallel.dispatch import PIECE_ROWS, ExchangeShape, HostDispatch
from weft.engine.parallel.lockstep import Lockstep
from weft.engine.parallel.segment import Segment
from weft.kernels.ops.moe import moe
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.spec import ExpertWeights, Routing
from weft.kernels.shared import cpu
from weft.testing.engine.captured_steps import RecordedSteps
from weft.testing.models.choices import check_same, where_experts_are_sure
from weft.testing.models.every_family import load_reference
from weft.testing.models.families import FAMILIES, make_family
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

VOCAB = 251
EXPERTS: dict[str, tuple[str, int]] = {
    "deepseek-v3": ("n_routed_experts", 12),
    "glm4-moe": ("n_routed_experts", 12),
    "gpt-oss": ("num_local_experts", 8),
    "qwen2-moe": ("num_experts", 8),
    "qwen3_moe": ("num_experts", 12),
}
"""The field that counts experts, and a number that divides among 2 and 4 engines."""
LIMIT_S = 60.0
NEVER = 1 << 30
"""Rows of a step that nobody has."""
GREEDY = SamplingParams(temperature=0.0)
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "num_pages": 96,
    "page_size": 8,
    "prefill_chunk_tokens": 48,
    "max_step_tokens": 64,
    "rank_timeout_s": LIMIT_S,
    "poison_free_pages": True,
}


def make_model(name: str, folder: Path, seed: int) -> Path:
    experts = dict([EXPERTS[name]])
    if name == "qwen3_moe":
        return make_tiny(name, folder, seed, tokenizer=True, vocab_size=VOCAB, **experts)
    if name in FAMILIES:
        return make_family(name, folder, seed, **experts)
    kind, fields = MOE_FAMILIES[name]
    make_reference(kind, folder, seed, **{**fields, **experts})
    return folder


def on_each(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns for each number, each run in a thread. Raises what one of them raised."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, number) for number in range(size)]
        return [future.result() for future in futures]


@contextmanager
def engines(folder: Path, size: int, **settings: Any) -> Iterator[list[LLM]]:
    """Engines that share the experts of a model."""
    group = f"test-{random.randrange(1 << 40):x}"

    def start(rank: int) -> LLM:
        own = {"attention_dp": size, "attention_dp_rank": rank, "attention_dp_group": group}
        return LLM(folder, **SIZES | settings | own)

    started = on_each(size, start)
    try:
        yield started
    finally:
        for llm in started:
            llm.close()


Work = Callable[[LLM], Any]


def side_by_side(llms: Sequence[LLM], work: Sequence[Work]) -> list[Any]:
    """Each engine does its work; those that are done turn on until all are."""
    left = threading.Semaphore(0)
    is_over = threading.Event()

    def run(rank: int) -> Any:
        try:
            return work[rank](llms[rank])
        finally:
            left.release()
            while not is_over.is_set():
                llms[rank].engine.turn()
                time.sleep(min(1e-3, llms[rank].engine.rest_s()))

    def watch() -> None:
        for _ in llms:
            left.acquire()
        is_over.set()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        found = on_each(len(llms), run)
        watching.result()
    return found


def random_prompts(count: int) -> list[list[int]]:
    shared = [random.randrange(3, VOCAB - 1) for _ in range(40)]
    lengths = [random.choice((5, 12, 33, 60, 90)) for _ in range(count)]
    return [(shared + [random.randrange(3, VOCAB - 1) for _ in range(n)])[-n:] for n in lengths]


def texts(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy texts; requests come in bursts, between which the engine has nothing to do."""
    found: list[GeneratedSample] = []
    stop = StopCriteria(max_tokens=12, ignore_eos=True)
    left = list(prompts)
    while left:
        burst = [left.pop(0) for _ in range(min(len(left), random.randrange(1, 4)))]
        found += llm.generate(burst, GREEDY, stop)
        for _ in range(random.randrange(4)):
            llm.engine.turn()
    return [sample.token_ids for sample in found]


CASES = [
    ("qwen3_moe", 2, "gathered"),
    *(
        pytest.param(name, size, form, marks=pytest.mark.full)
        for name in EXPERTS
        for size, form in ((2, "gathered"), (2, "dispatched"), (4, "dispatched"))
        if (name, size, form) != ("qwen3_moe", 2, "gathered")
    ),
]


def force_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    least = {"gathered": NEVER, "dispatched": 0}[form]
    monkeypatch.setattr(attention_dp, "HostDispatch", partial(HostDispatch, least_rows=least))


@pytest.mark.parametrize(("name", "size", "form"), CASES)
def test_texts_are_those_of_one_engine(
    name: str, size: int, form: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With different loads, prompts beside decodes, prefix hits, and times without requests."""
    folder = make_model(name, tmp_path / "model", seed)
    shares = [random_prompts(count) for count in random.sample((1, 3, 5, 7), size)]
    with LLM(folder, **SIZES) as llm:
        alone = [texts(llm, prompts) for prompts in shares]
    force_form(form, monkeypatch)
    with engines(folder, size) as llms:
        work = [partial(lambda prompts, llm: texts(llm, prompts), share) for share in shares]
        together = side_by_side(llms, work)
        side_by_side(llms, [work[0], *[lambda llm: None] * (size - 1)])
        counters = [llm.engine.counters() for llm in llms]
        notices = [llm.engine.info.notices for llm in llms]
    _, count = EXPERTS[name]
    for rank, told in enumerate(notices):
        assert any(f"worker {rank} of {size}, with {count // size} of" in text for text in told)
    assert all((each["dispatched_rows"] > 0) == (form == "dispatched") for each in counters)
    assert all(each["empty_steps"] > 0 for each in counters[1:])
    for prompts, found, expected in zip(shares, together, alone, strict=True):
        for prompt, one, other in zip(prompts, found, expected, strict=True):
            check_same(partial(load_reference, folder), prompt, one, other)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["drafts", "constraints", "drawn", "scored", "routes", "fp8", "load int8"]
)
def test_texts_with_everything_else_are_those_of_one_engine(
    kind: str, tmp_path: Path, seed: int
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4, "head_dim": 128}
    sizes |= {"intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_tiny(
        "qwen3_moe", tmp_path / "model", seed, tokenizer=True, vocab_size=VOCAB, **sizes
    )
    settings: dict[str, Any] = {}
    params, more = GREEDY, dict[str, Any]()
    if kind == "drafts":
        settings = {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 3}
        params = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys((7, 8, 9), 50.0))
    elif kind == "constraints":
        params = SamplingParams(
            temperature=0.0, constraint=Constraint(kind="regex", text="[ab]{3,9}c")
        )
    elif kind == "drawn":
        params = SamplingParams(temperature=0.8, top_k=20, seed=random.randrange(1 << 60))
    elif kind == "scored":
        more = {"prompt_logprobs": 1, "top_logprobs": 2}
    elif kind == "routes":
        settings, more = {"enable_return_routed_experts": True}, {"routes_from": 0}
    elif kind == "fp8":
        folder = fp8_copy(folder, tmp_path / "fp8", "blocks")[0]
    else:
        settings = {"quantization": "int8"}
    shares = [random_prompts(count) for count in (4, 2)]
    stop = StopCriteria(max_tokens=24)

    def run(prompts: list[list[int]], llm: LLM) -> tuple[list[GeneratedSample], int]:
        found = llm.generate(prompts, params, stop, **more)
        return found, llm.engine.counters()["accepted_tokens"]

    with LLM(folder, **SIZES | settings) as llm:
        alone = [run(prompts, llm)[0] for prompts in shares]
    with engines(folder, 2, **settings) as llms:
        together = side_by_side(llms, [partial(run, prompts) for prompts in shares])
    assert kind != "drafts" or all(accepted > 0 for _, accepted in together)
    for prompts, (found, _), expected in zip(shares, together, alone, strict=True):
        for prompt, one, other in zip(prompts, found, expected, strict=True):
            load = partial(load_reference, folder)
            check_same(load, prompt, one.token_ids, other.token_ids, params)
            assert bool(one.routes) == (kind == "routes")
            if one.token_ids == other.token_ids and kind == "routes":
                with where_experts_are_sure(load, [*prompt, *one.token_ids]):
                    for mine, right in zip(one.routes, other.routes, strict=True):
                        assert (mine == right).all()


class _AgreedRows(HostDispatch):
    """Checks what exchanges of GPUs need: in a captured step all bring as many rows to a layer, and
    in others at most as many as was agreed on.
    """

    _most: int | None = None

    def begin(self, num_rows: int | None) -> None:
        self._most = num_rows

    def __call__(
        self, x: torch.Tensor, routing: Routing, w: ExpertWeights, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if not self.lockstep.is_alone:
            counts = self.lockstep.propose(x.shape[0])
            assert (len(set(counts)) == 1) if self._most is None else (max(counts) <= self._most)
        return super().__call__(x, routing, w, residual)

    def finish(self) -> None:
        if self._most is None and not self.lockstep.is_alone:
            assert self._num_done == len(self.layers), "a graph has all layers"
            self._num_done = 0
        super().finish()


@pytest.mark.full_after(1)
@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek-v3"])
def test_captured_steps_of_engines_take_one_form(
    name: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs run as on a GPU: decodes, drafts and prompts beside one another, and empty steps of
    engines with pages in use; also scored prompts, which have no graph.
    """
    from triton.runtime.interpreter import GridExecutor

    native, launching, compute = cpu.native_cpu(), threading.Lock(), GridExecutor.__call__
    given = SimpleNamespace(native_cpu=lambda: native, native_cpu_missing=cpu.native_cpu_missing)
    monkeypatch.setattr(lockstep_module, "cpu", given)
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    monkeypatch.setattr(attention_dp, "HostDispatch", _AgreedRows)

    def launch(*args: Any, **kwargs: Any) -> None:
        with launching:  # The interpreter changes Triton's module meanwhile.
            compute(*args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    folder = make_model(name, tmp_path / "model", seed)
    drafts = {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 2}
    sizes = {"max_running_requests": 3, "prefill_chunk_tokens": 24, "max_step_tokens": 32}
    settings = SIZES | drafts | sizes | {"overlap": "on"}
    params = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys((7, 8, 9), 50.0))
    stop = StopCriteria(max_tokens=12, ignore_eos=True)
    shares = [[prompt[:50] for prompt in random_prompts(count)] for count in (4, 2)]

    def run(prompts: list[list[int]], llm: LLM) -> list[list[int]]:
        found = llm.generate(prompts, params, stop)
        found += llm.generate(prompts[:1], params, stop, prompt_logprobs=0)
        found += llm.generate(prompts[:2], GREEDY, stop)
        return [sample.token_ids for sample in found]

    with LLM(folder, **settings) as llm:
        alone = [run(prompts, llm) for prompts in shares]
    with engines(folder, 2, **settings) as llms:
        captured: list[RecordedSteps] = []
        for llm in llms:
            executor = llm.engine.parts.lockstep
            assert executor is not None
            executor._lockstep.is_alone = True
            captured.append(RecordedSteps(llm.engine, 2))
            executor._lockstep.is_alone = False
            forms: Any = executor._lockstep, executor.dispatch, llm.engine.parts.local
            executor._forms = StepForms(*forms)
        together = side_by_side(llms, [partial(run, prompts) for prompts in shares])
        side_by_side(llms, [partial(run, shares[0]), lambda llm: None])
        assert all(llm.engine.counters()["empty_steps"] > 0 for llm in llms[1:])
        assert all(llm.engine.counters()["accepted_tokens"] > 0 for llm in llms)
    assert all({"decode", "ragged"} <= set(steps.num_replays) for steps in captured)
    for prompts, found, expected in zip(shares, together, alone, strict=True):
        asked = [*prompts, *prompts[:1], *prompts[:2]]
        for prompt, one, other in zip(asked, found, expected, strict=True):
            check_same(partial(load_reference, folder), prompt, one, other, params)


@pytest.mark.full
def test_adapters_of_all_but_experts_are_served(tmp_path: Path, seed: int) -> None:
    folder = make_model("qwen3_moe", tmp_path / "model", seed)
    config = json.loads((folder / "config.json").read_text())
    adapters = [
        make_adapter(
            tmp_path / f"adapter-{number}", config, seed + number, targets=("q_proj", "o_proj")
        )
        for number in range(2)
    ]
    settings = {"enable_lora": True, "lora_projections": ("q", "k", "v", "o")}
    prompts, stop = random_prompts(4), StopCriteria(max_tokens=12, ignore_eos=True)

    def run(folders: Sequence[Path], llm: LLM) -> list[list[int]]:
        digests = [llm.load_adapter(each) for each in folders]
        digests = (digests * len(prompts))[: len(prompts)]
        found = llm.generate(prompts, GREEDY, stop, adapters=digests)
        return [sample.token_ids for sample in found]

    with LLM(folder, **SIZES | settings) as llm:
        alone = [run([each], llm) for each in adapters]
    with engines(folder, 2, **settings) as llms:
        together = side_by_side(llms, [partial(run, [each]) for each in adapters])
    assert alone[0] != alone[1]
    assert together == alone
    with pytest.raises(ConfigError, match="adapters do not change experts"):
        LLM(folder, **SIZES, enable_lora=True, lora_projections=("experts",), attention_dp=2,
            attention_dp_group="none")  # fmt: skip


class Ranks:
    """Exchanges of one layer, between threads."""

    def __init__(self, size: int, least_rows: int) -> None:
        self.size, self.top_k, self.experts, self.hidden, inner = size, 3, 4 * size, 48, 32
        shape = ExchangeShape(size, self.hidden, self.top_k, self.experts)
        segment = Segment.create(shape.num_bytes, "test")
        draws = torch.Generator().manual_seed(1)  # The same for all groups.
        all_w = [
            (
                torch.randn(2 * inner, self.hidden, generator=draws) / 8,
                torch.randn(self.hidden, inner, generator=draws) / 8,
            )
            for _ in range(self.experts)
        ]
        self.whole = pack_experts(all_w, self.experts)
        self.woken = [threading.Event() for _ in range(size)]
        self.locksteps: list[Lockstep] = []
        self.dispatches: list[HostDispatch] = []
        self.layers: list[list[ExpertWeights]] = []
        for rank in range(size):
            own = range(4 * rank, 4 * rank + 4)
            placement = torch.full((self.experts,), 4, dtype=torch.int32)
            placement[own.start : own.stop] = torch.arange(4, dtype=torch.int32)
            layers = [
                pack_experts([all_w[one] for one in own], 4, placement=placement) for _ in range(2)
            ]
            lockstep = Lockstep(segment, rank, size, LIMIT_S, self.woken[rank].set)
            dispatch = HostDispatch(lockstep, segment, shape, least_rows)
            dispatch.layers = layers
            self.layers.append(layers)
            self.locksteps.append(lockstep)
            self.dispatches.append(dispatch)

    def random_rows(self, count: int) -> tuple[torch.Tensor, Routing]:
        ids = torch.rand(count, self.experts).topk(self.top_k).indices.sort().values
        shares = torch.rand(count, self.top_k)
        return torch.randn(count, self.hidden), Routing(ids.to(torch.int32), shares)

    def close(self) -> None:
        for lockstep in self.locksteps:
            lockstep.close()


@pytest.fixture
def make_ranks(seed: int) -> Iterator[Callable[[int, int], Ranks]]:
    torch.manual_seed(seed)
    made: list[Ranks] = []

    def make(size: int, least_rows: int) -> Ranks:
        made.append(Ranks(size, least_rows))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.mark.parametrize("size", [2, 3])
def test_both_forms_add_what_all_experts_add(
    size: int, make_ranks: Callable[[int, int], Ranks]
) -> None:
    """Rows that one rank alone has, none, and more than one meeting takes; the last layer of some
    ranks has no rows.
    """
    # Of many rows some surely go to another rank.
    counts = [PIECE_ROWS + 5, *random.sample((0, 1, 7), size - 1)]
    random.shuffle(counts)
    forms = [make_ranks(size, least) for least in (0, NEVER)]
    rows = [forms[0].random_rows(count) for count in counts]
    residuals = [torch.randn(count, forms[0].hidden) for count in counts]

    def step(ranks: Ranks, rank: int) -> torch.Tensor:
        dispatch, (x, routing) = ranks.dispatches[rank], rows[rank]
        ranks.locksteps[rank].begin()
        out = x
        if len(x):
            out = dispatch(x, routing, ranks.layers[rank][0], residuals[rank])
        dispatch.finish()
        return out

    bits: list[list[torch.Tensor]] = []
    for ranks in forms:
        for lockstep in ranks.locksteps:
            lockstep.begin_together()
        bits.append(on_each(size, partial(step, ranks)))
    is_sent = [sum(each.num_dispatched_rows for each in ranks.dispatches) > 0 for ranks in forms]
    assert is_sent == [True, False]
    for (x, routing), residual, dispatched, gathered in zip(rows, residuals, *bits, strict=True):
        assert torch.equal(dispatched, gathered)
        if len(x):
            expected = moe(x, routing, forms[0].whole, residual)
            torch.testing.assert_close(gathered, expected, atol=1e-4, rtol=1e-4)


def test_a_rank_is_woken_by_steps_of_others_and_by_the_end(
    make_ranks: Callable[[int, int], Ranks],
) -> None:
    ranks = make_ranks(2, NEVER)
    (first, second), (_, woken) = ranks.locksteps, ranks.woken
    for lockstep in ranks.locksteps:
        lockstep.begin_together()
    for _ in range(3):
        assert not second.is_awaited
        first.begin()
        assert woken.wait(LIMIT_S)
        assert second.is_awaited
        woken.clear()
        second.begin()
        assert not second.is_awaited
    first.lose("it was told to", 0)
    assert woken.wait(LIMIT_S)
    with pytest.raises(RanksLost, match="worker 0 of 2"):
        second.check()
    with pytest.raises(RanksLost, match="worker 0 of 2"):
        second.meet()


def test_a_rank_that_does_not_come_ends_the_group(
    make_ranks: Callable[[int, int], Ranks],
) -> None:
    ranks = make_ranks(2, NEVER)
    first, second = ranks.locksteps
    for lockstep in ranks.locksteps:
        lockstep.begin_together()
    first._limit_s = 0.05
    first.begin()
    with pytest.raises(RanksLost, match=r"worker 1 of 2 .* has not come to step 1 within 0.05 s"):
        first.meet()
    assert second.is_stopped


def test_a_drain_and_a_hand_back_reach_all(make_ranks: Callable[[int, int], Ranks]) -> None:
    first, second = make_ranks(2, NEVER).locksteps
    first.set_drain(True)
    assert second.drains
    assert not first.all_idle(True)
    assert second.all_idle(True)
    first.order_hand_back()
    assert not first.takes_hand_back()
    assert second.takes_hand_back()
    assert not second.takes_hand_back()
    second.set_drain(False)
    assert not first.drains


def test_a_worker_does_not_put_experts_to_sleep_that_others_need(tmp_path: Path, seed: int) -> None:
    folder, prompts = make_model("qwen3_moe", tmp_path / "model", seed), random_prompts(3)
    with LLM(folder, **SIZES) as llm:
        alone = texts(llm, prompts)

    def sleep(llm: LLM) -> None:
        with pytest.raises(ConfigError, match="other workers compute with this one's experts"):
            llm.sleep()
        llm.sleep(tags=["kv_cache"])

    with engines(folder, 2) as llms:
        side_by_side(llms, [lambda llm: None, sleep])
        found, _ = side_by_side(llms, [lambda llm: texts(llm, prompts), lambda llm: None])
    for prompt, one, other in zip(prompts, found, alone, strict=True):
        check_same(partial(load_reference, folder), prompt, one, other)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tp": 2}, "must be 1 with tp, pp or cp"),
        ({"attention_dp_rank": 2}, "must be below attention_dp = 2"),
        ({"attention_dp_group": ""}, "must be 1 to 64 printable bytes"),
        ({"deterministic": True}, "must be off with attention_dp"),
        ({"mtp_head": True}, "must be none or ngram with attention_dp"),
        ({"sleep_host_bytes": 0}, "must be unset with attention_dp"),
        ({"attention_dp": 5}, "12 experts cannot be divided evenly"),
    ],
)
def test_what_cannot_share_experts_is_refused(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = make_model("qwen3_moe", tmp_path / "model", 0)
    with pytest.raises(ConfigError, match=told):
        LLM(folder, **{"attention_dp": 2, "attention_dp_group": "refused"} | settings)


def test_all_hear_why_one_cannot_start(tmp_path: Path, seed: int) -> None:
    folder = make_model("qwen3_moe", tmp_path / "model", seed)
    group = f"test-{random.randrange(1 << 40):x}"
    failing = random.randrange(3)

    def start(rank: int) -> str:
        own = {"attention_dp": 3, "attention_dp_rank": rank, "attention_dp_group": group}
        config = EngineConfig(model_dir=folder, **SIZES | own)
        member = AttentionGroup(config, check_combination(config), torch.device("cpu"))
        try:
            if rank == failing:
                raise ModelError("its files are gone")
            member.agree("model", "the same")
        except WeftError as error:
            member.fail_start(error)
            return error.message
        return ""

    assert all("its files are gone" in told for told in on_each(3, start))


def test_an_engine_that_fails_in_an_empty_step_ends_all(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("qwen3_moe", tmp_path / "model", seed)
    with engines(folder, 2) as llms:
        lockstep = llms[1].engine.parts.lockstep
        assert lockstep is not None

        def fail() -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(lockstep.dispatch, "finish", fail)

        def write() -> None:
            with pytest.raises(RanksLost, match=r"worker 1 of 2 .* has ended or failed"):
                texts(llms[0], random_prompts(1))

        def turn() -> None:
            with pytest.raises(RanksLost, match=r"worker 1 .* in step 1: the device is gone"):
                deque(iter(llms[1].engine.turn, None), maxlen=0)

        on_each(2, lambda rank: (write, turn)[rank]())


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama", 0)
    with pytest.raises(ConfigError, match="it has no experts to share; take more workers"):
        LLM(folder, attention_dp=2, attention_dp_group="refused")


@pytest.mark.full
def test_engines_with_other_files_are_refused(tmp_path: Path, seed: int) -> None:
    folders = [make_model("qwen3_moe", tmp_path / str(n), seed + n) for n in range(2)]
    group = f"test-{random.randrange(1 << 40):x}"

    def start(rank: int) -> None:
        own = {"attention_dp": 2, "attention_dp_rank": rank, "attention_dp_group": group}
        with pytest.raises(ConfigError, match="needs equal files, number formats and settings"):
            LLM(folders[rank], **SIZES | own)

    on_each(2, start)
