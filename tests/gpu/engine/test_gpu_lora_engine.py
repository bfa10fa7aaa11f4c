"""The engine with adapters on a GPU: tokens are those of the engine on a CPU, which PEFT checks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.request import StopCriteria
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.testing.engine.adapter_orders import check_random_orders
from weft.testing.models.float32_reference import ties_with
from weft.testing.models.lora_reference import PeftModels
from weft.testing.models.tiny_adapters import make_adapter, make_expert_adapter, peft_model
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

VOCAB = 517
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_pages": 400,
    "max_running_requests": 12,
    "max_step_tokens": 96,
    "prefill_chunk_tokens": 64,
    "poison_free_pages": True,
    "enable_lora": True,
    "max_loras": 2,
    "lora_memory_bytes": 8 << 20,
}


def check_like_cpu(
    model_dir: Path, adapters: list[Path], num_requests: int = 14, **settings: Any
) -> None:
    """Requests with more adapters than the device has room for, in two waves."""
    waves = [
        [[random.randrange(3, VOCAB) for _ in range(random.randint(1, 120))] for _ in range(size)]
        for size in 2 * [num_requests]
    ]
    stop = StopCriteria(max_tokens=24, ignore_eos=True)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(model_dir, device=device, **(SETTINGS | settings)) as llm:
            named = [b"", *(llm.load_adapter(path) for path in adapters)]
            tokens = []
            for prompts in waves:
                chosen = [named[i % len(named)] for i in range(len(prompts))]
                samples = llm.generate(prompts, stop=stop, adapters=chosen)
                tokens += [sample.token_ids for sample in samples]
                # What comes into freed rows is another adapter's.
                llm.unload_adapter(named[1])
                named[1] = llm.load_adapter(adapters[0])
            found.append(tokens)
            if device == "cuda":
                # One that is alone goes through other graphs and kernels.
                for prompt, name, expected in zip(
                    waves[1][:4], chosen, tokens[num_requests:], strict=False
                ):
                    (alone,) = llm.generate([prompt], stop=stop, adapters=[name])
                    assert alone.token_ids == expected
    assert found[0] == found[1]
    assert len({tuple(tokens[:8]) for tokens in found[0]}) > 20, "adapters change nothing"


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_of_a_dense_model(cuda_graphs: bool, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    model_dir = make_tiny("llama", tmp_path / "model", seed, head_dim=64, vocab_size=VOCAB)
    config = json.loads((model_dir / "config.json").read_text())
    adapters = [
        make_adapter(tmp_path / f"a{i}", config, seed + i, rank=rank)
        for i, rank in enumerate((8, 16, 5, 64, 24))
    ]
    check_like_cpu(model_dir, adapters, cuda_graphs=cuda_graphs)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_of_whole_matrices(cuda_graphs: bool, tmp_path: Path) -> None:
    """Adapters with an embedding or an LM head of their own, more than the device has room for."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    model_dir = make_tiny("llama", tmp_path / "model", seed, head_dim=64, vocab_size=VOCAB)
    some = {"target_modules": ["q_proj", "down_proj"], "r": 8}
    choices = (
        {**some, "modules_to_save": ["embed_tokens", "lm_head"]},
        {**some, "modules_to_save": ["lm_head"]},
        {**some, "modules_to_save": ["embed_tokens"]},
        {**some, "target_modules": ["lm_head", "embed_tokens"]},
        some,
    )
    adapters = []
    for index, settings in enumerate(choices):
        adapters.append(tmp_path / f"a{index}")
        peft_model(model_dir, seed + index, **settings).save_pretrained(adapters[-1])
    # Two add tokens to the vocabulary, of which one has matrices of its own as well.
    for index, settings in enumerate((choices[0], some)):
        adapters.append(tmp_path / f"grown{index}")
        grown = peft_model(model_dir, seed + index, resize=VOCAB + 3 + index, **settings)
        grown.save_pretrained(adapters[-1])
    projections = ("q", "down", "embed_tokens", "lm_head")
    sizes = {"lora_projections": projections, "lora_whole_matrices": 1, "lora_added_tokens": 5}
    check_like_cpu(model_dir, adapters, cuda_graphs=cuda_graphs, **sizes)


def test_tokens_of_a_large_batch(tmp_path: Path) -> None:
    """Selected rows of prompts are many, and more than the kernels for few rows take."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    model_dir = make_tiny("qwen3", tmp_path / "model", seed, head_dim=64, vocab_size=VOCAB)
    config = json.loads((model_dir / "config.json").read_text())
    adapters = [make_adapter(tmp_path / f"a{i}", config, seed + i, rank=16) for i in range(6)]
    steps = {"max_running_requests": 64, "max_step_tokens": 1024, "prefill_chunk_tokens": 512}
    check_like_cpu(model_dir, adapters, 100, max_loras=6, num_pages=2000, **steps)


def test_few_requests_in_bfloat16_differ_at_near_ties_only(tmp_path: Path) -> None:
    """In 16 bits products of few rows add what adapters add themselves."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    model_dir = make_tiny("llama", tmp_path / "model", seed, head_dim=64, vocab_size=VOCAB)
    models = [peft_model(model_dir, seed + rank, r=rank, lora_alpha=8) for rank in (8, 16, 64)]
    for index, model in enumerate(models):
        model.save_pretrained(tmp_path / f"a{index}")
    prompts: list[list[list[int]]] = [[] for _ in models]
    answers: list[list[list[int]]] = [[] for _ in models]
    with LLM(model_dir, device="cuda", **(SETTINGS | {"dtype": "bfloat16", "max_loras": 3})) as llm:
        names = [llm.load_adapter(tmp_path / f"a{index}") for index in range(len(models))]
        stop = StopCriteria(max_tokens=24, ignore_eos=True)
        for count in (1, 2, 3, 4, 8):
            chosen = random.choices(range(len(models)), k=count)
            asked = [random.choices(range(3, VOCAB), k=random.randint(1, 60)) for _ in chosen]
            # One of a larger batch has no adapter.
            adapters = [names[index] for index in chosen] + [b""] * (count > 1)
            samples = llm.generate([*asked, *asked[: count > 1]], stop=stop, adapters=adapters)
            for index, prompt, sample in zip(chosen, asked, samples, strict=False):
                prompts[index].append(prompt)
                answers[index].append(sample.token_ids)
    for model, asked, given in zip(models, prompts, answers, strict=True):
        rounded = model.to(torch.bfloat16).float().cuda()
        if asked:
            ties_with(rounded, asked, given).check(is_moe=False)


@pytest.mark.parametrize("is_shared", [False, True])
def test_tokens_of_a_mixture(is_shared: bool, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    model_dir = make_tiny(
        "qwen3_moe", tmp_path / "model", seed, num_experts=12, head_dim=64, vocab_size=VOCAB
    )
    adapters = [
        make_expert_adapter(tmp_path / f"a{i}", model_dir, seed + i, rank, is_shared=is_shared)
        for i, rank in enumerate((8, 16, 5))
    ]
    experts = "shared_experts" if is_shared else "experts"
    check_like_cpu(model_dir, adapters, lora_projections=("v", "router", experts))


def test_adapters_come_and_go_while_graphs_run(tmp_path: Path) -> None:
    """What a graph reads of the pool's rows is another adapter's from one replay to the next."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    model_dir = make_tiny("llama", tmp_path / "model", seed, head_dim=64, vocab_size=VOCAB)
    models = PeftModels(model_dir, tmp_path)
    for index, rank in enumerate((8, 3, 16, 8, 24, 8)):
        models.add(seed + index, r=rank)

    def check(engine: Engine, _: random.Random) -> None:
        assert engine.parts.local.graphs is not None

    steps = {key: SETTINGS[key] for key in ("max_running_requests", "max_step_tokens")}
    sizes = {"page_size": 16, "prefill_chunk_tokens": 32, "lora_memory_bytes": 8 << 20, **steps}
    check_random_orders(models, check, device="cuda", cuda_graphs=True, **sizes)
