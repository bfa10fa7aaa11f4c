"""Architectures that transformers computes over Weft's pages, against plain transformers."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weft.checkpoint.config import ModelConfig
from weft.cli.model import path_of
from weft.contract.errors import AdapterError, ConfigError, ModelError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.config import EngineConfig
from weft.engine.loop.combinations import check_combination
from weft.engine.loop.llm import LLM
from weft.engine.model.archs.by_transformers.fused import FusedRmsNorm
from weft.engine.model.archs.by_transformers.model import TransformersModel
from weft.engine.model.archs.by_transformers.plan import RankPlan
from weft.engine.model.loader import check_weights, load_model
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import NEAR_TIE, OF_ROUNDED_ROWS, Choices
from weft.testing.models.families import make_family
from weft.testing.models.forced_models import forced_copy
from weft.testing.models.lora_reference import BASE, PeftModels
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.quantised_models import round_rows
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_adapters import LINEAR, write_adapter
from weft.testing.models.tiny_models import make_tiny
from weft.testing.models.unread_models import (
    PLANNED,
    UNREAD,
    WITH_EXPERTS,
    load_unread,
    make_unread,
)

ALWAYS = ("nanochat",)
STOP = StopCriteria(max_tokens=12, ignore_eos=True)
RANKS: dict[str, Any] = {"tp": 2, "check_ranks": True, "rank_timeout_s": 60.0}


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def some(names: tuple[str, ...]) -> list[Any]:
    marks = {name: () if name in ALWAYS else (pytest.mark.full,) for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


def prompt_of(count: int) -> list[int]:
    return [random.randrange(160) for _ in range(count)]


def greedy(reference: Any, prompt: list[int], kind: str, near_tie: float = NEAR_TIE) -> Choices:
    return Choices(
        lambda tokens: reference(torch.tensor([tokens]), use_cache=False).logits[0],
        prompt,
        12,
        reference if kind in WITH_EXPERTS else None,
        near_tie,
    )


def texts(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    samples = llm.generate(prompts, SamplingParams(temperature=0.0), STOP)
    return [sample.token_ids for sample in samples]


@pytest.mark.parametrize("kind", some(tuple(UNREAD)))
def test_tokens_equal_transformers_together_in_chunks_and_behind_cached_pages(
    kind: str, tmp_path: Path
) -> None:
    print(f"seed {(seed := random.randrange(10**6))}")
    path = make_unread(kind, tmp_path, seed)
    prompts = [prompt_of(70), prompt_of(19)]
    reference = load_unread(path)
    with LLM(path, dtype="float32", num_pages=64, page_size=8, prefill_chunk_tokens=16) as llm:
        for prompt, found in zip(prompts, texts(llm, prompts), strict=True):
            assert greedy(reference, prompt, kind) == found
        again = prompts[0][:48] + prompt_of(9)
        (found,) = texts(llm, [again])
        assert greedy(reference, again, kind) == found
        assert llm.engine.counters()["prefix_hit_tokens"] >= 48


@pytest.mark.parametrize("kind", some(PLANNED))
def test_ranks_of_the_published_plan_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """Together, in chunks, behind cached pages; pages of two ranks for one rank, and of one for
    two.
    """
    path = make_unread(kind, tmp_path, random.randrange(10**6))
    prompts = [prompt_of(70), prompt_of(19)]
    reference = load_unread(path)
    sizes = {"num_pages": 64, "page_size": 8, "prefill_chunk_tokens": 16}
    with LLM(path, dtype="float32", **sizes, **RANKS) as llm:
        for prompt, found in zip(prompts, texts(llm, prompts), strict=True):
            assert greedy(reference, prompt, kind) == found
        again = prompts[0][:48] + prompt_of(9)
        (found,) = texts(llm, [again])
        assert greedy(reference, again, kind) == found
        assert llm.engine.counters()["prefix_hit_tokens"] >= 48


@pytest.mark.full
@pytest.mark.parametrize("of_filler", [True, False])
@pytest.mark.parametrize("kind", PLANNED)
def test_pages_go_between_ranks_and_one_process(kind: str, of_filler: bool, tmp_path: Path) -> None:
    path = make_unread(kind, tmp_path, random.randrange(10**6))
    prompt, clock = prompt_of(61), ManualClock()
    owner, filler = (
        make_engine(path, role, clock, **(RANKS if is_divided else {}))
        for role, is_divided in (("decode", not of_filler), ("prefill", of_filler))
    )
    pair = EnginePair(owner, [filler], clock)
    try:
        request = pair.submit(prompt, max_tokens=12)
        (found,) = pair.finish(request)
        assert greedy(load_unread(path), prompt, kind) == found
        (fill,) = pair.answers[request].finished[0].timeline.fills
        assert (fill.accepted_tokens, fill.failure) == (56, "")
    finally:
        pair.close()


@pytest.mark.full
@pytest.mark.parametrize("kind", PLANNED)
def test_ranks_round_rows_to_the_int8_of_one_process(kind: str, tmp_path: Path) -> None:
    path = make_unread(kind, tmp_path, random.randrange(10**6))
    prompts, settings = [prompt_of(30), prompt_of(7)], {"num_pages": 64, "quantization": "int8"}
    with LLM(path, dtype="float32", **settings) as llm:
        alone = texts(llm, prompts)
    with LLM(path, dtype="float32", **settings, **RANKS) as llm:
        assert "int8" in llm.engine.info.weight_format
        assert texts(llm, prompts) == alone


@pytest.mark.parametrize("kind", some(tuple(UNREAD)))
def test_a_prompt_of_another_worker_gets_the_same_text(kind: str, tmp_path: Path) -> None:
    path = make_unread(kind, tmp_path, random.randrange(10**6))
    prompt = prompt_of(61)
    clock = ManualClock()
    owner, filler = (make_engine(path, role, clock) for role in ("decode", "prefill"))
    pair = EnginePair(owner, [filler], clock)
    try:
        request = pair.submit(prompt, max_tokens=12)
        (found,) = pair.finish(request)
        assert greedy(load_unread(path), prompt, kind) == found
        (fill,) = pair.answers[request].finished[0].timeline.fills
        assert (fill.accepted_tokens, fill.failure) == (56, "")
    finally:
        pair.close()


@pytest.mark.parametrize("kind", some(tuple(UNREAD)))
def test_rows_rounded_to_int8_give_the_tokens_of_rounded_weights(kind: str, tmp_path: Path) -> None:
    path = make_unread(kind, tmp_path, random.randrange(10**6))
    loaded = load_model(path, "float32", quantization="int8")
    assert loaded.weight_format.startswith("int8")
    reference = load_unread(path)
    for name, module in reference.named_modules():
        if type(module) is torch.nn.Linear and not name.endswith(("gate", "router", "layer")):
            numbers, scales = round_rows(module.weight.detach())
            module.weight = torch.nn.Parameter(numbers.float() * scales)
    prompt = prompt_of(30)
    with LLM(path, dtype="float32", num_pages=64, quantization="int8") as llm:
        (found,) = texts(llm, [prompt])
    assert greedy(reference, prompt, kind, OF_ROUNDED_ROWS) == found


ADAPTED = {
    "nanochat": ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
    "beam": [*LINEAR],
    "bitnet": [*LINEAR],
    "diffllama": [*LINEAR],
    "persimmon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "bert": ["query", "key", "value", "output.dense", "intermediate.dense"],
    "aria_text": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "kolibri1": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "apertus1p5_text": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
}
"""Names of linear modules, for `peft.LoraConfig`."""


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("nanochat", {}),
        *(pytest.param(kind, {}, marks=pytest.mark.full) for kind in ADAPTED if kind not in ALWAYS),
        *(pytest.param(kind, RANKS, marks=pytest.mark.full) for kind in ADAPTED if kind in PLANNED),
    ],
)
def test_adapters_add_what_pefts_do(kind: str, ranks: dict[str, Any], tmp_path: Path) -> None:
    """Side by side in a batch, in chunks, then behind the pages that each has for itself."""
    seed = random.randrange(10**6)
    models = PeftModels(make_unread(kind, tmp_path / "model", seed), tmp_path)
    names = ADAPTED[kind]
    adapters = [
        models.add(seed + index, r=5, target_modules=some)
        for index, some in enumerate((names, names[:1], names[1:]))
    ]
    settings: dict[str, Any] = {"dtype": "float32", "num_pages": 100, "page_size": 8} | ranks
    with LLM(models.model_dir, enable_lora=True, prefill_chunk_tokens=16, **settings) as llm:
        assert [llm.load_adapter(path) for path in models.directories.values()] == adapters
        prompt, asked = prompt_of(37), [*adapters, BASE]
        for _ in range(2):
            samples = llm.generate([prompt] * 4, stop=STOP, top_logprobs=5, adapters=asked)
            for adapter, sample in zip(asked, samples, strict=True):
                models.check(adapter, prompt, sample)
        assert llm.engine.counters()["prefix_hit_tokens"] >= 4 * 32


def test_changes_of_other_modules_are_refused(nanochat: Path, tmp_path: Path) -> None:
    path = make_unread("biogpt", tmp_path / "biogpt", 0)
    with pytest.raises(ConfigError, match="no product of BioGptForCausalLM is a linear module"):
        LLM(path, dtype="float32", num_pages=32, enable_lora=True)
    name = "base_model.model.model.layers.0.mlp.gate_proj.lora_"
    tensors = {f"{name}A.weight": torch.zeros(8, 64), f"{name}B.weight": torch.zeros(128, 8)}
    folder = write_adapter(tmp_path / "adapter", tensors, target_modules=["gate_proj"])
    with (
        LLM(nanochat, dtype="float32", num_pages=32, enable_lora=True) as llm,
        pytest.raises(AdapterError, match="no such projection"),
    ):
        llm.load_adapter(folder)


@pytest.fixture(scope="module")
def nanochat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_unread("nanochat", tmp_path_factory.mktemp("nanochat"), random.randrange(10**6))


def test_other_weights_take_the_place_of_those_that_were_read(
    nanochat: Path, tmp_path: Path
) -> None:
    other = make_unread("nanochat", tmp_path, random.randrange(10**6))
    prompt = prompt_of(20)
    loaded, expected = load_model(nanochat, "float32"), load_model(other, "float32")
    assert loaded.refit.from_folder(other) == expected.digest
    found, wanted = (
        PagedDriver(one.model, 8).step([(PagedRequest(), prompt)]) for one in (loaded, expected)
    )
    assert torch.equal(found, wanted)


def test_verify_says_whose_code_computes_and_compares_tokens(nanochat: Path) -> None:
    config = ModelConfig.load(nanochat)
    text = path_of(nanochat, config)
    assert "transformers' code with Weft's attention" in text
    assert re.search(r"25[4-6] of 256 next tokens equal", text)


@pytest.mark.parametrize("setting", [{"tp": 3}, {"tp": 2, "ep": 2}, {"deterministic": True}])
def test_what_transformers_cannot_do_is_refused_before_the_start(
    setting: dict[str, Any], nanochat: Path
) -> None:
    name = list(setting)[-1]
    with pytest.raises(ConfigError, match=f"{name} = .*transformers") as caught:
        check_combination(EngineConfig(model_dir=nanochat, **setting))
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("biogpt", {}, "tp = 2: BioGptForCausalLM .* no plan of its layers' products"),
        pytest.param(
            *("nanochat", {"intermediate_size": 97}, "fc1 has 97, which 2 ranks cannot divide"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_models_that_ranks_cannot_divide_are_refused_by_name(
    kind: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = make_unread(kind, tmp_path, 0, **fields)
    with pytest.raises(ConfigError, match=message):
        LLM(path, dtype="float32", num_pages=32, **RANKS)


def test_a_style_without_a_meaning_here_is_refused_by_name() -> None:
    model = SimpleNamespace(tp_plan={"layers.*.up_proj": "colwise", "layers.*.norm": "sequence"})
    ranks: Any = SimpleNamespace(rank=0, size=2, width=None)
    with pytest.raises(ConfigError, match=r"layers\.\*\.norm has the style sequence"):
        RankPlan(model, "Model", ranks)


def test_code_of_a_directory_runs_only_if_it_is_trusted(nanochat: Path, tmp_path: Path) -> None:
    raw = json.loads((nanochat / "config.json").read_text())
    raw |= {
        "architectures": ["TrustedForCausalLM"],
        "model_type": "trusted",
        "auto_map": {
            "AutoConfig": "trusted.TrustedConfig",
            "AutoModelForCausalLM": "trusted.TrustedForCausalLM",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes((nanochat / "model.safetensors").read_bytes())
    (tmp_path / "trusted.py").write_text(
        "from pathlib import Path\n"
        "from transformers import NanoChatConfig, NanoChatForCausalLM\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class TrustedConfig(NanoChatConfig):\n    model_type = 'trusted'\n"
        "class TrustedForCausalLM(NanoChatForCausalLM):\n    config_class = TrustedConfig\n"
    )
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        check_combination(EngineConfig(model_dir=tmp_path))
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()
    prompt = prompt_of(20)
    with LLM(tmp_path, dtype="float32", num_pages=32, trust_remote_code=True) as llm:
        (found,) = texts(llm, [prompt])
    assert (tmp_path / "ran").exists()
    assert greedy(load_unread(nanochat), prompt, "nanochat") == found


def test_missing_and_unknown_tensors_are_named(nanochat: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    check_weights(nanochat)
    tensors = load_file(nanochat / "model.safetensors")
    (tmp_path / "config.json").write_bytes((nanochat / "config.json").read_bytes())
    name = "model.layers.1.self_attn.q_proj.weight"
    lacking = {key: value for key, value in tensors.items() if key != name}
    save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"lacks tensors: {name}"):
        load_model(tmp_path)
    save_file(tensors | {"model.more": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"does not use: model\.more"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "code", "fused"),
    [
        ("qwen3", "Qwen3ForCausalLM", 1 + 4 * 3),
        pytest.param("gemma3", "Gemma3ForCausalLM", 1 + 6 * 4, marks=pytest.mark.full),
        pytest.param("cohere", "CohereForCausalLM", 0, marks=pytest.mark.full),
    ],
)
def test_parts_are_fused_where_they_give_the_same_numbers(
    kind: str, code: str, fused: int, tmp_path: Path
) -> None:
    """Also Gemma's norms of 1 + weight; Cohere's norms and rotation have other forms."""
    if kind == "qwen3":
        source = make_tiny(kind, tmp_path / "own", random.randrange(10**6))
    else:
        source = make_family(kind, tmp_path / "own", random.randrange(10**6))
    path = forced_copy(source, tmp_path / "forced", code)
    model = load_model(path, "float32", trust_remote_code=True).model
    assert isinstance(model, TransformersModel)
    norms = [part for part in model.modules() if isinstance(part, FusedRmsNorm)]
    assert len(norms) == fused
    prompt = prompt_of(23)
    tokens = [
        PagedDriver(one, num_pages=32).greedy([prompt], 16)[0]
        for one in (model, load_model(source, "float32").model)
    ]
    assert tokens[0] == tokens[1]


def test_layers_with_states_are_refused(tmp_path: Path) -> None:
    """Their tokens depend on one another in other ways than by attention."""
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 160, "head_dim": 16}
    config = transformers.LaraMiniConfig(
        **sizes, layer_types=["sliding_attention", "linear_attention"],
        num_experts=2, num_experts_per_tok=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    transformers.LaraMiniForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="other ways than by attention"):
        load_model(tmp_path, "float32")


def test_configurations_are_read_without_torch_and_transformers(nanochat: Path) -> None:
    assert ModelConfig.load(nanochat).max_position_embeddings == 256
    command = (
        "import sys; from pathlib import Path; from weft.checkpoint.config import ModelConfig; "
        f"ModelConfig.load(Path({str(nanochat)!r})); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", command], check=True)
