"""The whole engine on a GPU: tokens of small random models against transformers and the CPU."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import ConfigError
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria, TokenLogprob
from weft.contract.submits import Submit
from weft.engine.base.config import EngineConfig
from weft.engine.loop.build import load_parts
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.testing.models.float32_reference import reference_logits, reference_model, ties_of
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 128, "num_attention_heads": 8}),
    "llama-bias-80": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 80}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "head_dim": 64}),
    "qwen2-mixed": (
        "qwen2",
        {"head_dim": 64, "sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "mistral": ("mistral", {"head_dim": 128, "num_attention_heads": 8, "sliding_window": 24}),
    "qwen3": ("qwen3", {"head_dim": 96}),
    "one-layer": ("llama", {"num_hidden_layers": 1}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 12, "head_dim": 64}),
}


def make_llm(path: Path, **settings: Any) -> LLM:
    values: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "num_pages": 400,
        "max_running_requests": 6,
        "max_step_tokens": 96,
        "prefill_chunk_tokens": 64,
        "poison_free_pages": True,
    }
    return LLM(path, **(values | settings))


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [[random.randrange(3, 517) for _ in range(length)] for length in lengths]


@pytest.fixture(params=KINDS, scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, overrides = KINDS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    return make_tiny(kind, path, random.randrange(10**6), **overrides)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_float32_tokens_equal_transformers(tiny: Path, cuda_graphs: bool) -> None:
    prompts = random_prompts((1, 7, 16, 33, 150, 290, 64, 5, 2, 90))
    stop = StopCriteria(max_tokens=40, ignore_eos=True)
    with make_llm(tiny, cuda_graphs=cuda_graphs) as llm:
        samples = llm.generate(prompts, stop=stop)
        again = llm.generate(prompts, stop=stop)
    model = reference_model(tiny)
    for prompt, sample, cached in zip(prompts, samples, again, strict=True):
        assert len(sample.token_ids) == 40
        logits = reference_logits(model, prompt, sample.token_ids)
        assert sample.token_ids == logits.argmax(-1).tolist()
        assert cached.token_ids == sample.token_ids


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_log_probabilities_of_prompts_equal_transformers(tiny: Path, cuda_graphs: bool) -> None:
    prompts = random_prompts((1, 2, 33, 150, 64, 290))
    stop = StopCriteria(max_tokens=20, ignore_eos=True)
    with make_llm(tiny, cuda_graphs=cuda_graphs) as llm:
        plain = llm.generate(prompts, stop=stop)
        samples = llm.generate(prompts, stop=stop, prompt_logprobs=2)
    model = reference_model(tiny)
    for prompt, sample, before in zip(prompts, samples, plain, strict=True):
        assert sample.token_ids == before.token_ids
        assert [entry.token_id for entry in sample.prompt_logprobs] == prompt[1:]
        wanted = reference_logits(model, prompt[:1], prompt[1:]).log_softmax(-1)
        # Of a prompt of one token, which has no scores, the reference's only row is left out.
        for entry, row in zip(sample.prompt_logprobs, wanted[: len(prompt) - 1], strict=True):
            assert abs(entry.logprob - float(row[entry.token_id])) < 1e-3
            tops = [value for _, value in entry.top]
            assert tops == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_bfloat16_tokens_differ_from_float32_at_near_ties_only(tiny: Path, overlap: str) -> None:
    prompts = random_prompts((1, 30, 150, 64, 9, 200))
    with make_llm(tiny, dtype="bfloat16", overlap=overlap) as llm:
        samples = llm.generate(prompts, stop=StopCriteria(max_tokens=60, ignore_eos=True))
    ties = ties_of(tiny, prompts, [sample.token_ids for sample in samples])
    ties.check(is_moe="moe" in tiny.name)


def test_bfloat16_distributions_are_as_near_to_float32_as_transformers(tiny: Path) -> None:
    """By the mean Kullback-Leibler divergence of next tokens, of prompts and of decode steps."""
    prompts = random_prompts((1, 30, 150, 64, 9, 200))
    stop = StopCriteria(max_tokens=40, ignore_eos=True)
    exact = reference_model(tiny, torch.bfloat16)
    peer = reference_model(tiny, torch.bfloat16, torch.bfloat16)
    ours, theirs = [], []
    with make_llm(tiny, dtype="bfloat16") as llm:
        seen = note_logits(llm)
        for prompt in prompts:
            seen.clear()
            (sample,) = llm.generate([prompt], stop=stop)
            # One request at a time: a row each; a step may have begun behind the last token.
            logits = torch.cat(seen)[: len(sample.token_ids)]
            assert logits.argmax(-1).tolist() == sample.token_ids
            wanted = reference_logits(exact, prompt, sample.token_ids)
            ours.append(divergences(wanted, logits))
            theirs.append(divergences(wanted, reference_logits(peer, prompt, sample.token_ids)))
    # Where two experts are equally likely, rounding decides which one is asked.
    kept = 0.95 if "moe" in tiny.name else 1.0
    mean, peer_mean = (mean_of_least(torch.cat(each), kept) for each in (ours, theirs))
    print(f"mean divergence from float32: {mean:.2e}, transformers' own {peer_mean:.2e}")
    assert 0 < mean <= 2 * peer_mean + 1e-6


def note_logits(llm: LLM) -> list[torch.Tensor]:
    """What tokens will be drawn from, as steps come: [rows, vocab] float32."""
    seen: list[torch.Tensor] = []
    launch = llm.engine._executor.launch

    def noted(step: Any) -> Any:
        launched = launch(step)
        if launched.logits is not None:
            seen.append(launched.logits.compute().float().clone())
        return launched

    llm.engine._executor.launch = noted  # type: ignore[method-assign]
    return seen


def mean_of_least(values: torch.Tensor, share: float) -> float:
    """The mean without the largest of them."""
    return float(values.sort().values[: round(share * len(values))].mean())


def divergences(wanted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[rows]: of distributions with `logits` from those that are wanted, at the temperature that
    gives those a standard deviation of 1. At 1 a model with tied embeddings is sure of nearly all
    its tokens, and the mean is that of a single row."""
    warmth = wanted.double().std(-1, keepdim=True)
    exact, other = ((each.double() / warmth).log_softmax(-1) for each in (wanted, logits))
    return (exact.exp() * (exact - other)).sum(-1)


def test_preempted_requests_go_on_with_the_same_tokens(tiny: Path) -> None:
    prompts = random_prompts((60, 61, 62, 63))
    stop = StopCriteria(max_tokens=100, ignore_eos=True)
    with make_llm(tiny) as llm:
        quiet = llm.generate(prompts, stop=stop)
    # Windows that are freed would leave room for all.
    with make_llm(tiny, num_pages=25, window_pages="keep") as llm:
        pressed = llm.generate(prompts, stop=stop)
    assert [s.token_ids for s in pressed] == [s.token_ids for s in quiet]
    preemptions = [s.timeline.num_preemptions for s in pressed if s.timeline is not None]
    assert sum(preemptions) > 0


Drawn = tuple[list[int], list[TokenLogprob]]


def run_mixed(engine: Engine, prompts: Sequence[list[int]], top: int) -> list[Drawn]:
    """Greedy, seeded, penalised and observed requests in one batch."""
    kinds = (
        (SamplingParams(temperature=0.0), None),
        (SamplingParams(temperature=0.9, seed=11), None),
        (SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4), None),
        (SamplingParams(temperature=0.0), top),
        (SamplingParams(temperature=0.7, top_p=0.8, top_k=20, seed=5), top),
        (SamplingParams(temperature=0.8, min_p=0.02, logit_bias={7: 4.0, 9: -5.0}, seed=6), top),
        (SamplingParams(temperature=1.1, frequency_penalty=0.8, seed=8), top),
    )
    submits = []
    for index, prompt in enumerate(prompts):
        sampling, top_logprobs = kinds[index % len(kinds)]
        submits.append(
            Submit(
                gateway=1,
                request_id=str(index),
                attempt=1,
                prompt=prompt,
                sampling=sampling,
                stop=StopCriteria(
                    max_tokens=12 + index,
                    ignore_eos=True,
                    min_tokens=5,
                    stop_token_ids=(int(sampling.temperature > 1.0),),
                ),
                top_logprobs=top_logprobs,
            )
        )
    drawn: list[Drawn] = [([], []) for _ in prompts]
    inbox: Inbox | None = Inbox(submits=submits)
    num_open = len(prompts)
    while num_open:
        outbox = engine.turn(inbox)
        inbox = None
        for session in outbox.gateways:
            assert not session.failed
            for tokens in session.all_tokens():
                drawn[int(tokens.request_id)][0].extend(tokens.ids)
                drawn[int(tokens.request_id)][1].extend(tokens.logprobs)
            num_open -= len(session.finished)
    return drawn


def test_mixed_sampling_draws_what_the_cpu_draws(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path / "model", random.randrange(10**6), head_dim=64)
    prompts = random_prompts([random.randrange(1, 80) for _ in range(14)])
    with make_llm(path) as gpu, make_llm(path, device="cpu") as cpu:
        ours, theirs = (run_mixed(llm.engine, prompts, 3) for llm in (gpu, cpu))
    for (tokens, logprobs), (cpu_tokens, cpu_logprobs) in zip(ours, theirs, strict=True):
        assert tokens == cpu_tokens
        assert len(logprobs) == len(cpu_logprobs)
        for ours_of, theirs_of in zip(logprobs, cpu_logprobs, strict=True):
            assert math.isclose(ours_of.logprob, theirs_of.logprob, abs_tol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "float32"), ("qwen3", "bfloat16"), ("qwen3_moe", "bfloat16")]
)
def test_a_decode_step_never_waits_for_the_device(kind: str, dtype: str, tmp_path: Path) -> None:
    path = make_tiny(kind, tmp_path / "model", head_dim=64)
    with make_llm(path, dtype=dtype) as llm:
        assert llm.engine.parts.local.graphs is not None
        launch = llm.engine._executor.launch

        def checked(step: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(step)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        stop = StopCriteria(max_tokens=30, ignore_eos=True)
        llm.generate(random_prompts((40, 3)), stop=stop)
        llm.engine._executor.launch = checked  # type: ignore[method-assign]
        llm.generate(random_prompts((40, 3, 70, 8)), stop=stop)


def test_capturing_shows_how_far_it_is(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model", head_dim=64)
    calls: list[tuple[int, int, str]] = []
    sizes = {"num_pages": 40, "max_running_requests": 4}
    sizes |= {"max_step_tokens": 64, "prefill_chunk_tokens": 32}
    config = EngineConfig(model_dir=path, device="cuda", **sizes)
    parts = load_parts(config, progress=lambda *call: calls.append(call))
    graphs = parts.local.graphs
    assert graphs is not None
    captures = [call for call in calls if call[2].startswith("capturing graphs: ")]
    assert calls[: len(calls) - len(captures)]
    assert [done for done, _, _ in captures] == list(range(1, len(captures) + 1))
    assert {total for _, total, _ in captures} == {len(captures)} == {len(graphs.bytes_of_each)}
    assert f"{graphs.num_bytes / 2**20:.0f} MiB" in captures[-1][2]


@pytest.mark.whole_device
def test_the_pool_is_sized_by_what_is_free(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model", head_dim=64)
    prompts = random_prompts((150, 290, 64, 5, 90, 7))
    stop = StopCriteria(max_tokens=40, ignore_eos=True)
    settings: dict[str, Any] = {"num_pages": None, "poison_free_pages": False}
    with make_llm(path) as llm:
        expected = llm.generate(prompts, stop=stop)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    with make_llm(path, **settings) as llm:
        pool_bytes = llm.engine.info.num_pages * llm.engine.info.page_bytes
        assert 0.9 * free < pool_bytes < free
        assert any("KV pool" in notice for notice in llm.engine.info.notices)
        samples = llm.generate(prompts, stop=stop)
        assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
        assert torch.cuda.mem_get_info()[0] > 128 << 20
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    with pytest.raises(ConfigError, match=r"does not fit: of .* GiB"):
        make_llm(path, **settings, kv_memory_bytes=1 << 45)


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match="cuda:99"):
        make_llm(path, device="cuda:99")
