"""Adapters of embedding, LM head and experts in the engine: tokens and logits are PEFT's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import ModulesToSaveWrapper
from weft.contract.errors import AdapterError, ConfigError
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import check_choices
from weft.testing.models.lora_reference import BASE, PeftModels, load, unload_all
from weft.testing.models.merged_adapters import merged, read
from weft.testing.models.tiny_adapters import PREFIX, peft_model, write_adapter
from weft.testing.models.tiny_models import make_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("single_thread")

VOCAB = 517
NUM_NEW = 8
DENSE = ("q", "k", "v", "o", "gate", "up", "down")
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 8,
    "num_pages": 200,
    "prefill_chunk_tokens": 16,
    "poison_free_pages": True,
    "enable_lora": True,
}


def make_models(kind: str, folder: Path, seed: int, **overrides: Any) -> PeftModels:
    print(f"seed {seed}")
    overrides = {"vocab_size": VOCAB, "num_hidden_layers": 2, **overrides}
    return PeftModels(make_tiny(kind, folder / "model", seed=seed, **overrides), folder)


def check(models: PeftModels, *projections: str, **settings: Any) -> None:
    """All adapters and none in one batch, with more requests than adapters."""
    settings = {**SETTINGS, "lora_projections": projections, **settings}
    with LLM(models.model_dir, **settings) as llm:
        for directory in models.directories.values():
            llm.load_adapter(directory)
        adapters = [*models.digests, BASE, *models.digests]
        lengths = [random.randint(1, 40) for _ in adapters]
        prompts = [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
        stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        samples = llm.generate(prompts, stop=stop, top_logprobs=20, adapters=adapters)
        for adapter, prompt, sample in zip(adapters, prompts, samples, strict=True):
            models.check(adapter, prompt, sample)
        unload_all(llm.engine)


def test_a_worker_on_a_cpu_leaves_gpus_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA would take some of a GPU's memory for its process."""
    seed = random.randrange(2**31)
    models = make_models("llama", tmp_path, seed)
    models.add(seed, r=8)

    def begin() -> None:
        raise AssertionError("CUDA begins")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", begin)
    check(models, *DENSE)


@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
def test_embedding_and_head(is_tied: bool, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    models = make_models("llama", tmp_path, seed, tie_word_embeddings=is_tied)
    models.add(seed, r=4, target_modules=["lm_head"])
    models.add(seed + 1, r=12, target_modules=["embed_tokens"])
    models.add(seed + 2, r=8, target_modules=["embed_tokens", "lm_head", "q_proj", "down_proj"])
    models.add(seed + 3, r=8)
    check(models, *DENSE, "embed_tokens", "lm_head")
    check(models, *DENSE, "embed_tokens", "lm_head", max_loras=1)


@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
def test_rows_of_some_tokens(is_tied: bool, tmp_path: Path) -> None:
    """Trained one by one, or in a matrix of which all other rows are the model's own."""
    seed = random.randrange(2**31)
    models = make_models("llama", tmp_path, seed, tie_word_embeddings=is_tied)
    some = {"target_modules": ["q_proj"], "spread": 1.0}
    models.add(seed, r=8, trainable_token_indices=list(range(3, 50, 3)), **some)
    models.add(seed + 1, r=8, trainable_token_indices={"lm_head": [7, 200, 516]}, **some)
    with_lora = {**some, "target_modules": ["q_proj", "embed_tokens"], "spread": 0.1}
    models.add(seed + 2, r=4, **with_lora)
    add_saved(models, seed + 3, tmp_path / "saved", ("embed_tokens", "lm_head"), num_rows=5)
    check(models, *DENSE, "embed_tokens", "lm_head")


@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
def test_whole_matrices(is_tied: bool, tmp_path: Path) -> None:
    """More adapters with an embedding or an LM head of their own than the device has room for, in
    one batch with those that change a few rows, have LoRA of them, or neither."""
    seed = random.randrange(2**31)
    models = make_models("llama", tmp_path, seed, tie_word_embeddings=is_tied)
    for index, saved in enumerate((["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"])):
        models.add(seed + index, r=8, target_modules=["q_proj"], modules_to_save=saved)
    add_saved(models, seed + 3, tmp_path / "few", ("lm_head",), num_rows=5)
    models.add(seed + 4, r=8, target_modules=["embed_tokens", "lm_head", "q_proj"])
    models.add(seed + 5, r=8)
    if is_tied:
        both = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
        models.add(seed + 6, r=4, target_modules=["v_proj"], **both)
    many = {"trainable_token_indices": list(range(70)), "target_modules": ["q_proj"]}
    models.add(seed + 7, r=4, spread=1.0, **many)
    for whole in (1, 3):
        check(models, *DENSE, "embed_tokens", "lm_head", lora_whole_matrices=whole)


def test_a_row_of_its_own_head_is_the_same_in_any_company(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    models = make_models("llama", tmp_path, seed)
    own = models.add(seed, r=8, target_modules=["q_proj"], modules_to_save=["lm_head"])
    other = models.add(seed + 1, r=8, target_modules=["lm_head", "q_proj"])
    projections = ("q", "lm_head")
    settings = {**SETTINGS, "lora_projections": projections, "lora_whole_matrices": 1}
    prompts = [[random.randrange(3, VOCAB) for _ in range(20)] for _ in range(9)]
    with LLM(models.model_dir, **settings) as llm:
        for directory in models.directories.values():
            llm.load_adapter(directory)
        stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        adapters = [*random.choices([own, other, BASE], k=8), own]
        together = llm.generate(prompts, stop=stop, top_logprobs=5, adapters=adapters)[-1]
        (alone,) = llm.generate(prompts[-1:], stop=stop, top_logprobs=5, adapters=[own])
    assert alone.token_ids == together.token_ids
    assert alone.logprobs == together.logprobs


def add_saved(
    models: PeftModels, seed: int, path: Path, names: tuple[str, ...], num_rows: int
) -> None:
    """An adapter with whole matrices, of which so many rows are not the model's."""
    model = peft_model(models.model_dir, seed, target_modules=["v_proj"], modules_to_save=names)
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save["default"].weight
            kept = torch.randperm(len(saved))[num_rows:]
            with torch.no_grad():
                saved[kept] = module.original_module.weight[kept]
    model.save_pretrained(path)
    models.put(path, model)


PARTS = {
    "vocabulary": (*DENSE, "embed_tokens", "lm_head"),
    "experts": ("q", "k", "v", "o", "router", "experts"),
}
"""`lora_projections`, by kind of models."""


def models_of(kind: str, folder: Path, seed: int) -> PeftModels:
    """A model with four adapters of embedding and LM head, or of experts."""
    if kind == "vocabulary":
        models = make_models("llama", folder, seed)
        models.add(seed, r=4, target_modules=["lm_head"])
        models.add(seed + 1, r=12, target_modules=["embed_tokens"])
        models.add(seed + 2, r=8, target_modules=["embed_tokens", "lm_head", "q_proj", "down_proj"])
        models.add(seed + 3, r=8, target_modules=["lm_head", "v_proj"])
        return models
    models = make_models("qwen3_moe", folder, seed)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    models.add(seed, r=3, target_modules=["q_proj"], target_parameters=names)
    models.add(seed + 1, r=12, target_modules=["v_proj"], target_parameters=names[1:])
    models.add(seed + 2, r=8, target_modules=["q_proj", "v_proj", "o_proj", "gate"])
    shared = shared_experts(folder / "shared", seed)
    models.put(shared, merged(models.model_dir, read(shared, models.model_dir)))
    return models


@pytest.mark.parametrize("kind", PARTS)
def test_after_hits_preemption_eviction_and_reload(kind: str, tmp_path: Path) -> None:
    """Two adapters fit on the device, some in host memory; pages for a part of what is asked."""
    models = models_of(kind, tmp_path, random.randrange(2**31))
    settings = {**SETTINGS, "lora_projections": PARTS[kind], "max_loras": 2, "overlap": "on"}
    tight = {
        "num_pages": 26,  # Each request ends with ten: three have no room.
        "max_running_requests": 4,
        "lora_host_bytes": 200_000 if kind == "experts" else 400_000,
    }
    with LLM(models.model_dir, **{**settings, **tight}) as llm:
        for directory in models.directories.values():
            llm.load_adapter(directory)
        adapters = [*models.digests, BASE] * 2
        prompts = [[random.randrange(3, VOCAB) for _ in range(45)] for _ in adapters]
        stop = StopCriteria(max_tokens=30, ignore_eos=True)
        for order in (range(len(prompts)), reversed(range(len(prompts)))):
            chosen = list(order)
            given = [adapters[i] for i in chosen]
            asked = [prompts[i] for i in chosen]
            samples = llm.generate(asked, stop=stop, top_logprobs=20, adapters=given)
            for adapter, prompt, sample in zip(given, asked, samples, strict=True):
                models.check(adapter, prompt, sample)
        for adapter, prompt in zip(adapters[:5], prompts, strict=False):
            for num_matched in (0, 40):  # Alone: at most its own pages stand in its way.
                (sample,) = llm.generate([prompt], stop=stop, top_logprobs=20, adapters=[adapter])
                models.check(adapter, prompt, sample)
                assert sample.timeline is not None
                assert sample.timeline.matched_tokens >= num_matched
        counters = llm.engine.counters()
        assert counters["preemptions"]
        assert counters["adapter_evictions"]
        if kind == "experts":  # The others have room in host memory.
            assert counters["adapter_reads"] > len(models.digests), "some were read again"
        unload_all(llm.engine)


@pytest.mark.parametrize("kind", PARTS)
def test_an_engine_fills_anothers_pages(kind: str, tmp_path: Path) -> None:
    models = models_of(kind, tmp_path, random.randrange(2**31))
    clock, parts = ManualClock(), {"enable_lora": True, "lora_projections": PARTS[kind]}
    owner, filler = (
        make_engine(models.model_dir, role, clock, **parts) for role in ("decode", "prefill")
    )
    for digest in models.digests:
        for engine in (owner, filler):
            load(engine, models.directories[digest])
    pair = EnginePair(owner, [filler], clock)
    try:
        adapters = [BASE, *models.digests]
        prompts = [[random.randrange(3, VOCAB) for _ in range(43)] for _ in adapters]
        pairs = list(zip(prompts, adapters, strict=True))
        asked = [pair.submit(prompt, NUM_NEW, adapter=adapter) for prompt, adapter in pairs]
        for (prompt, adapter), tokens in zip(pairs, pair.finish(*asked), strict=True):
            assert tokens == models.greedy(adapter, prompt, NUM_NEW)
        for request in asked:
            (fill,) = pair.answers[request].finished[0].timeline.fills
            assert fill.accepted_tokens
        pair.settle()
        for engine in (owner, filler):
            unload_all(engine)
    finally:
        pair.close()


def test_workers_that_apply_other_parts_share_no_pages(tmp_path: Path) -> None:
    """A lenient load of one adapter leaves out what a worker does not apply."""
    models = make_models("qwen3_moe", tmp_path, random.randrange(2**31))
    models.add(1, r=8, target_modules=["q_proj", "v_proj", "gate"])
    (directory,) = models.directories.values()
    clock = ManualClock()
    parts = {"decode": ("q", "v", "router"), "prefill": ("v", "q")}
    owner, filler = (
        make_engine(models.model_dir, role, clock, enable_lora=True, lora_projections=names)
        for role, names in parts.items()
    )
    (digest,) = {load(engine, directory, is_lenient=True) for engine in (owner, filler)}
    pair = EnginePair(owner, [filler], clock)
    try:
        prompt = [random.randrange(3, VOCAB) for _ in range(43)]
        asked = pair.submit(prompt, NUM_NEW, adapter=digest)
        assert pair.finish(asked) == [models.greedy(models.digests[0], prompt, NUM_NEW)]
        (fill,) = pair.answers[asked].finished[0].timeline.fills
        assert "lora_projections" in fill.failure
        base = pair.submit(prompt, NUM_NEW)
        assert pair.finish(base) == [models.greedy(BASE, prompt, NUM_NEW)]
        (fill,) = pair.answers[base].finished[0].timeline.fills
        assert fill.accepted_tokens
        pair.settle()
        for engine in (owner, filler):
            unload_all(engine)
    finally:
        pair.close()


def test_only_the_head_differs(tmp_path: Path) -> None:
    """Pages are equal to the base's, and never taken for them."""
    seed = random.randrange(2**31)
    models = make_models("qwen3", tmp_path, seed)
    digest = models.add(seed, r=8, target_modules=["lm_head"])
    settings = {**SETTINGS, "lora_projections": ("lm_head",)}
    prompt = [random.randrange(3, VOCAB) for _ in range(40)]
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(models.model_dir, **settings) as llm:
        llm.load_adapter(models.directories[digest])
        for adapter in (BASE, digest):
            (sample,) = llm.generate([prompt], stop=stop, top_logprobs=20, adapters=[adapter])
            assert sample.timeline is not None
            assert sample.timeline.matched_tokens == 0
            models.check(adapter, prompt, sample)


def test_attention_of_a_mixture_of_experts(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    models = make_models("qwen3_moe", tmp_path, seed)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    models.add(seed, r=8, target_modules=attention)
    models.add(seed + 1, r=20, target_modules=["o_proj"])
    check(models)


def test_experts(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    models = make_models("qwen3_moe", tmp_path, seed)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    models.add(seed, r=3, target_modules=["q_proj"], target_parameters=names)
    models.add(seed + 1, r=12, target_modules=["v_proj"], target_parameters=names[1:])
    models.add(seed + 2, r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    models.add(seed + 3, r=8)
    models.add(seed + 4, r=20, target_modules=["gate"])
    models.add(seed + 5, r=5, use_rslora=True, target_modules=["o_proj", "gate"])
    patterns = {"rank_pattern": {"layers.1.mlp.experts.down_proj": 9, "v_proj": 17}}
    some = {"target_modules": ["v_proj", "gate"], "target_parameters": names}
    models.add(seed + 6, r=4, alpha_pattern={"gate": 11}, **patterns, **some)
    shared = shared_experts(tmp_path / "shared", seed)
    models.put(shared, merged(models.model_dir, read(shared, models.model_dir)))
    check(models, "q", "k", "v", "o", "router", "experts")
    check(models, "q", "k", "v", "o", "router", "experts", max_loras=3)
    only = PeftModels(models.model_dir, tmp_path)
    only.put(shared, merged(models.model_dir, read(shared, models.model_dir)))
    check(only, "shared_experts")


def test_experts_that_share_nothing_are_refused_where_shared_ones_are_served(
    tmp_path: Path,
) -> None:
    seed = random.randrange(2**31)
    models = make_models("qwen3_moe", tmp_path, seed)
    apart = shared_experts(tmp_path / "apart", seed, are_shared=False)
    settings = {**SETTINGS, "lora_projections": ("shared_experts",)}
    with (
        LLM(models.model_dir, **settings) as llm,
        pytest.raises(AdapterError, match="do not share their sides"),
    ):
        llm.load_adapter(apart)


def shared_experts(path: Path, seed: int, *, are_shared: bool = True) -> Path:
    """An adapter whose experts share A of gate and up, and B of down, or nothing."""
    config = tiny_config("qwen3_moe", num_hidden_layers=2)
    experts, hidden = config["num_experts"], config["hidden_size"]
    inner, rank = config["moe_intermediate_size"], 10
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        stem = f"{PREFIX}model.layers.{layer}.mlp.experts"
        for name in ("w1", "w2", "w3"):
            width, out = (inner, hidden) if name == "w2" else (hidden, inner)
            count_a, count_b = (experts, 1) if name == "w2" else (1, experts)
            if not are_shared:
                count_a = count_b = experts
            for half, shape in (("A", (count_a, rank, width)), ("B", (count_b, out, rank))):
                numbers = 0.2 * torch.randn(shape, generator=generator)
                tensors[f"{stem}.{name}.lora_{half}.weight"] = numbers
    return write_adapter(path, tensors, r=rank, target_modules=["w1", "w2", "w3"])


def test_what_is_not_served_is_refused(tmp_path: Path) -> None:
    """By the name of a tensor, and with the setting or the form that would be served."""
    seed = random.randrange(2**31)
    models = make_models("llama", tmp_path, seed)
    head = models.add(seed, r=4, target_modules=["lm_head"])
    saved = models.add(seed, r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    tokens = models.add(
        seed, r=4, target_modules=["q_proj"], trainable_token_indices=list(range(65))
    )
    grown = models.add(
        seed, r=4, resize=VOCAB + 3, target_modules=["q_proj"], modules_to_save=["embed_tokens"]
    )
    with LLM(models.model_dir, **SETTINGS) as llm:
        for digest, name in ((head, "lm_head"), (saved, "lm_head"), (grown, "lm_head")):
            problem = rf"tensor \S*{name}\S*: .* lora_projections does not name {name}"
            with pytest.raises(AdapterError, match=problem):
                llm.load_adapter(models.directories[digest])
    settings = {**SETTINGS, "lora_projections": ("q", "embed_tokens", "lm_head")}
    with LLM(models.model_dir, **settings) as llm:
        for digest, problem in (
            (saved, rf"lm_head\.weight changes {VOCAB} rows .* lora_whole_matrices take a whole"),
            (tokens, r"token_adapter\S* changes 65 rows of embed_tokens, .* max_lora_rank = 64"),
            (grown, r"embed_tokens\S* has 520 tokens, 3 more .* lora_added_tokens = 0 take"),
        ):
            with pytest.raises(AdapterError, match=problem):
                llm.load_adapter(models.directories[digest])
        assert {state.state for state in llm.engine.adapters.states()} == {"failed"}
    settings = {**SETTINGS, "lora_projections": ("q",), "lora_whole_matrices": 1}
    with pytest.raises(ConfigError, match="names neither embed_tokens nor lm_head"):
        LLM(models.model_dir, **settings)


def test_added_tokens_are_left_out_by_a_lenient_load(tmp_path: Path) -> None:
    """The rest is what the adapter is without them."""
    seed = random.randrange(2**31)
    models = make_models("llama", tmp_path, seed)
    saved = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    grown = peft_model(models.model_dir, seed, r=4, resize=VOCAB + 3, **saved)
    grown.save_pretrained(tmp_path / "grown")
    settings = {
        **SETTINGS,
        "lora_projections": ("q", "embed_tokens", "lm_head"),
        "lora_whole_matrices": 1,
    }
    prompt = [random.randrange(3, VOCAB) for _ in range(30)]
    with LLM(models.model_dir, **settings) as llm:
        digest = llm.load_adapter(tmp_path / "grown", is_lenient=True)
        (state,) = llm.engine.adapters.states()
        stem = "base_model.model."
        assert set(state.left_out) == {
            f"{stem}model.embed_tokens.weight[{VOCAB}:{VOCAB + 3}]",
            f"{stem}lm_head.weight[{VOCAB}:{VOCAB + 3}]",
        }
        stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        (sample,) = llm.generate([prompt], stop=stop, adapters=[digest])
    ids = list(prompt)
    with torch.no_grad():
        for token in sample.token_ids:
            logits = grown(torch.tensor([ids])).logits[0, -1, :VOCAB]
            check_choices(logits[None], [token])
            ids.append(token)


def test_a_changed_router_is_refused_where_it_is_not_named(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    models = make_models("qwen3_moe", tmp_path, seed)
    config = tiny_config("qwen3_moe", num_hidden_layers=2)
    shapes = {"A": (8, config["hidden_size"]), "B": (config["num_experts"], 8)}
    tensors = {
        f"{PREFIX}model.layers.1.mlp.gate.lora_{half}.weight": torch.ones(shape)
        for half, shape in shapes.items()
    }
    adapter = write_adapter(tmp_path / "router", tensors, target_modules=["gate"])
    settings = {**SETTINGS, "lora_projections": ("q", "experts")}
    problem = r"tensor \S*layers\.1\.mlp\.gate\.lora_A\S*: .* \(router\) are not applied here"
    with LLM(models.model_dir, **settings) as llm, pytest.raises(AdapterError, match=problem):
        llm.load_adapter(adapter)
