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
from tiny_models import make_tiny
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError
from weft.engine.llm import LLM
from weft.engine.messages import Inbox, Submit
from weft.engine.request import SamplingParams, StopCriteria, TokenLogprob

pytestmark = pytest.mark.needs("cuda")

BFLOAT16_ULPS = 4
"""A first difference within so many bfloat16 steps of the larger logit is a near-tie."""
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


def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Transformers' model with weights rounded to `dtype`, computing in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.float().cuda().eval()


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]: what each of the tokens was chosen from."""
    ids = torch.tensor([prompt + tokens[:-1]], device="cuda")
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 :]


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


def test_bfloat16_tokens_differ_from_float32_at_near_ties_only(tiny: Path) -> None:
    prompts = random_prompts((1, 30, 150, 64, 9, 200))
    with make_llm(tiny, dtype="bfloat16") as llm:
        samples = llm.generate(prompts, stop=StopCriteria(max_tokens=60, ignore_eos=True))
    model = reference_model(tiny, torch.bfloat16)
    num_different, gaps = 0, []
    for prompt, sample in zip(prompts, samples, strict=True):
        tokens = torch.tensor(sample.token_ids, device="cuda")
        logits = reference_logits(model, prompt, sample.token_ids)
        best = logits.max(dim=-1).values
        gap = best - logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
        num_different += int((gap > 0).sum())
        ulp = 2.0 ** (torch.floor(torch.log2(best.abs())) - 7)
        gaps += (gap / ulp).tolist()
    print(f"{num_different} near-ties of {len(gaps)} tokens, largest gap {max(gaps):.2f} ulps")
    num_far = sum(gap > BFLOAT16_ULPS for gap in gaps)
    # Where two experts are equally likely, rounding decides which one is asked.
    assert num_far <= (0.02 * len(gaps) if "moe" in tiny.name else 0)
    assert num_different < 0.1 * len(gaps)


def test_preempted_requests_go_on_with_the_same_tokens(tiny: Path) -> None:
    prompts = random_prompts((60, 61, 62, 63))
    stop = StopCriteria(max_tokens=100, ignore_eos=True)
    with make_llm(tiny) as llm:
        quiet = llm.generate(prompts, stop=stop)
    with make_llm(tiny, num_pages=25) as llm:
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
                session=1,
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
        for session in outbox.sessions:
            assert not session.failed
            for tokens in session.tokens:
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


def test_a_decode_step_never_waits_for_the_device(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "model", head_dim=64)
    with make_llm(path) as llm:
        assert llm.engine._runner.graphs is not None
        forward = llm.engine._runner.forward

        def checked(plan: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return forward(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        stop = StopCriteria(max_tokens=30, ignore_eos=True)
        llm.generate(random_prompts((40, 3)), stop=stop)
        llm.engine._runner.forward = checked  # type: ignore[method-assign]
        llm.generate(random_prompts((40, 3, 70, 8)), stop=stop)


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
