"""Vectors of prompts are those of transformers, pooled as the model's files say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from weft.checkpoint.pooling import load_pooling
from weft.contract.errors import ConfigError, ContextTooLong, InvalidRequest, ModelError
from weft.contract.tasks import Output, PoolingParams
from weft.engine.loop.llm import LLM
from weft.testing.models.families import FAMILIES, SIZES
from weft.testing.models.tiny_embedders import (
    make_classifier,
    make_embedder,
    make_judge,
    make_m3,
    write_json,
    write_modules,
)
from weft.testing.models.tiny_encoders import CONFIGS, make_encoder
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, CHUNK, VOCAB, HIDDEN = 8, 24, 517, 72
LENGTHS = (1, 2, PAGE, PAGE + 1, CHUNK, 2 * CHUNK + 1, 150)
EMBEDDING = PoolingParams(output="embedding")
ENCODERS = tuple(CONFIGS)
POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "lasttoken": lambda hidden: hidden[-1],
    "mean": lambda hidden: hidden.mean(0),
    "cls": lambda hidden: hidden[0],
}


def crossed(*values: str) -> list[Any]:
    """The first in every run, the others in full ones."""
    return [values[0], *(pytest.param(one, marks=pytest.mark.full) for one in values[1:])]


def make_llm(model_dir: Path, **settings: Any) -> LLM:
    sizes = {"page_size": PAGE, "prefill_chunk_tokens": CHUNK, "max_step_tokens": 2 * CHUNK}
    sizes |= {"max_running_requests": 16, "num_pages": 400}
    return LLM(model_dir, **{"dtype": "float32"} | sizes | settings)


def random_prompts(*lengths: int) -> list[list[int]]:
    return [[random.randrange(5, VOCAB) for _ in range(length)] for length in lengths]


@torch.no_grad()
def hidden_states(model_dir: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]


def check_embeddings(
    found: Sequence[Any], wanted: Sequence[torch.Tensor], least: float = 0.99999
) -> None:
    for one, vector in zip(found, wanted, strict=True):
        assert one.shape == (1, len(vector))
        assert abs(np.linalg.norm(one[0]) - 1) < 1e-5
        assert float(torch.from_numpy(one[0].copy()) @ vector / vector.norm()) > least


@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("pooling", crossed("lasttoken", "mean", "cls"))
def test_decoders_embed_what_is_cut_into_steps_and_what_is_cached(
    tmp_path: Path, seed: int, pooling: str
) -> None:
    model_dir = make_embedder("qwen3", tmp_path / "m", seed, pooling=pooling)
    common = random_prompts(40)[0]
    prompts = [*random_prompts(*LENGTHS), *(common + more for more in random_prompts(3, 9))]
    wanted = [POOLED[pooling](hidden) for hidden in hidden_states(model_dir, prompts)]
    with make_llm(model_dir) as llm:
        for _ in range(2):
            check_embeddings(llm.pool(prompts, EMBEDDING), wanted)
        num_found = llm.engine.scheduler.num_prefix_hit_tokens
        assert (num_found > 100) == (pooling == "lasttoken")
        sizes = llm.engine.sizes()
        assert not any(sizes[name] for name in ("groups", "prefilling", "slots", "running"))
        some = [*prompts[:4], *random_prompts(CHUNK + 1)]
        each = llm.pool(some, PoolingParams(output="token_embeddings", normalises=False))
        for rows, hidden in zip(each, hidden_states(model_dir, some), strict=True):
            assert np.allclose(rows, hidden, atol=1e-4)


@pytest.mark.parametrize("kind", crossed("llama", "qwen2", "qwen3_moe"))
def test_dense_layers_dimensions_and_lengths(tmp_path: Path, seed: int, kind: str) -> None:
    model_dir = make_embedder(kind, tmp_path / "m", seed, dense=(40, 24), max_tokens=60)
    prompts = random_prompts(1, 17, 59)
    wanted = [hidden[-1] for hidden in hidden_states(model_dir, prompts)]
    for number in (2, 3):
        layer = load_file(model_dir / f"{number}_Dense/model.safetensors")
        wanted = [layer["linear.weight"] @ one + layer["linear.bias"] for one in wanted]
        wanted = [one.tanh() if number == 2 else one for one in wanted]
    with make_llm(model_dir) as llm:
        check_embeddings(llm.pool(prompts, EMBEDDING), wanted)
        cut = llm.pool(prompts, PoolingParams(output="embedding", dimensions=10))
        check_embeddings(cut, [one[:10] for one in wanted])
        bare = llm.pool(prompts, PoolingParams(output="embedding", normalises=False))
        assert np.allclose([one[0] for one in bare], torch.stack(wanted), atol=1e-4)
        with pytest.raises(ContextTooLong):
            llm.pool(random_prompts(61), EMBEDDING)
        for size in (0, 25):
            with pytest.raises(InvalidRequest, match=f"from 1 to 24, not {size}"):
                llm.pool(prompts, PoolingParams(output="embedding", dimensions=size))
        with pytest.raises(InvalidRequest, match="embed, not generate"):
            llm.generate(prompts)
        with pytest.raises(InvalidRequest, match="embed, not score"):
            llm.pool(prompts, PoolingParams(output="label_logits", label_ids=(1,)))


def test_labels_get_the_logits_of_the_lm_head(tmp_path: Path, seed: int) -> None:
    model_dir = make_judge("qwen3", tmp_path / "m", seed, labels=(9, 2))
    assert (load_pooling(model_dir).true_token_id, load_pooling(model_dir).task) == (9, "score")
    prompts = random_prompts(*LENGTHS)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with make_llm(model_dir) as llm, torch.no_grad():
        for labels in ((9, 2), (5,)):
            found = llm.pool(prompts, PoolingParams(output="label_logits", label_ids=labels))
            for one, ids in zip(found, prompts, strict=True):
                logits = model(torch.tensor([ids])).logits[0, -1, list(labels)]
                assert np.allclose(one[0], logits, atol=2e-4)


@pytest.mark.parametrize("kind", ["qwen3", "llama", *crossed(*reversed(ENCODERS))])
def test_classes_are_those_of_the_head(tmp_path: Path, seed: int, kind: str) -> None:
    is_encoder = kind in ENCODERS
    if is_encoder:
        model_dir = make_encoder(kind, tmp_path / "m", seed, num_labels=3)
    else:
        model_dir = make_classifier(kind, tmp_path / "m", seed, pad_token_id=None)
    model = AutoModelForSequenceClassification.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    prompts, second = random_prompts(*LENGTHS), 11
    has_types = kind == "bert"
    with make_llm(model_dir) as llm, torch.no_grad():
        found = llm.pool(prompts, PoolingParams(output="classes"))
        for one, ids in zip(found, prompts, strict=True):
            assert np.allclose(one[0], model(torch.tensor([ids])).logits[0], atol=1e-4)
        if has_types:
            pairs = prompts[-3:]
            found = llm.pool(pairs, PoolingParams(output="classes", segment_start=second))
            for one, ids in zip(found, pairs, strict=True):
                types = torch.tensor([[int(at >= second) for at in range(len(ids))]])
                wanted = model(torch.tensor([ids]), token_type_ids=types).logits[0]
                assert np.allclose(one[0], wanted, atol=1e-4)


@pytest.mark.parametrize("name", crossed("gemma2", "gemma3", "olmo2", "smollm3", "glm", "exaone4"))
@torch.no_grad()
def test_decoders_made_of_parts_give_vectors_and_classes(
    tmp_path: Path, seed: int, name: str
) -> None:
    kind, fields = FAMILIES[name]
    config = AutoConfig.for_model(kind, **SIZES | {"vocab_size": VOCAB}, **fields, num_labels=3)
    torch.manual_seed(seed)
    models: dict[Output, Any] = {
        "embedding": AutoModel.from_config(config),
        "classes": AutoModelForSequenceClassification.from_config(config),
    }
    prompts = random_prompts(*LENGTHS)
    for output, model in models.items():
        model_dir = tmp_path / output
        model.eval().save_pretrained(model_dir)
        with make_llm(model_dir) as llm:
            found = llm.pool(prompts, PoolingParams(output=output))
        for one, ids in zip(found, prompts, strict=True):
            answer = model(torch.tensor([ids]))
            if output == "classes":
                assert np.allclose(one[0], answer.logits[0], atol=1e-4)
            else:
                check_embeddings([one], [answer.last_hidden_state[0, -1]])


@pytest.mark.parametrize("pooling", crossed("mean", "cls"))
@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders_embed_whole_prompts(tmp_path: Path, seed: int, kind: str, pooling: str) -> None:
    model_dir = make_encoder(kind, tmp_path / "m", seed)
    write_modules(model_dir, 48, seed, pooling=pooling)
    prompts = random_prompts(*LENGTHS, 190)
    wanted = [POOLED[pooling](hidden) for hidden in hidden_states(model_dir, prompts)]
    with make_llm(model_dir) as llm:
        for _ in range(2):
            check_embeddings(llm.pool(prompts, EMBEDDING), wanted)
        assert llm.engine.scheduler.num_prefix_hit_tokens == 0
        with pytest.raises(ContextTooLong):
            llm.pool(random_prompts(195), EMBEDDING)
    with make_llm(model_dir, dtype="bfloat16") as llm:
        check_embeddings(llm.pool(prompts, EMBEDDING), wanted, least=0.999)


def test_heads_of_tokens_are_those_of_bge_m3(tmp_path: Path, seed: int) -> None:
    model_dir = make_m3(
        tmp_path / "m", seed, ends=random.choice((("pt", "safetensors"), ("safetensors", "pt")))
    )
    heads = {
        path.stem: load_file(path) if path.suffix == ".safetensors" else torch.load(path)
        for path in model_dir.glob("*_linear.*")
    }
    prompts = random_prompts(*LENGTHS)
    hidden = hidden_states(model_dir, prompts)
    linear = torch.nn.functional.linear
    with make_llm(model_dir) as llm:
        check_embeddings(llm.pool(prompts, EMBEDDING), [states[0] for states in hidden])
        weights = llm.pool(prompts, PoolingParams(output="sparse"))
        vectors = llm.pool(prompts, PoolingParams(output="multi_vector"))
        bare = llm.pool(prompts, PoolingParams(output="multi_vector", normalises=False))
        for states, weight, vector, raw in zip(hidden, weights, vectors, bare, strict=True):
            wanted = linear(states, **heads["sparse_linear"]).relu()
            assert np.allclose(weight, wanted, atol=1e-5)
            wanted = linear(states, **heads["colbert_linear"])
            assert np.allclose(raw, wanted, atol=1e-4)
            wanted = torch.nn.functional.normalize(wanted, dim=-1)
            assert np.allclose(vector, wanted, atol=1e-5)
        with pytest.raises(InvalidRequest, match="one width"):
            llm.pool(prompts, PoolingParams(output="sparse", dimensions=1))
    for damaged in ({"weight": torch.zeros(2, 48), "bias": torch.zeros(2)}, [torch.nn.Linear]):
        (model_dir / "sparse_linear.safetensors").unlink(missing_ok=True)
        torch.save(damaged, model_dir / "sparse_linear.pt")
        with pytest.raises(ModelError, match=r"sparse_linear\.pt"):
            make_llm(model_dir)
    plain = make_encoder("bert", tmp_path / "plain", seed)
    with make_llm(plain) as llm, pytest.raises(InvalidRequest, match="no head"):
        llm.pool(prompts, PoolingParams(output="sparse"))


@pytest.mark.parametrize("kind", ["qwen3", "modernbert", *crossed("bert", "roberta")[1:]])
def test_bits_do_not_depend_on_neighbours_in_deterministic_mode(
    tmp_path: Path, seed: int, kind: str
) -> None:
    if kind == "qwen3":
        model_dir = make_embedder("qwen3", tmp_path / "m", seed, dense=(40,))
    else:
        model_dir = make_encoder(kind, tmp_path / "m", seed, intermediate_size=112)
        write_modules(model_dir, 48, seed, pooling="mean", dense=(40,))
    prompts = random_prompts(*(random.choice((1, 2, 9, 24, 49, 150)) for _ in range(30)))
    with make_llm(model_dir, deterministic=True, prefix_cache=False) as llm:
        together = llm.pool(prompts, EMBEDDING)
        alone = [llm.pool([prompt], EMBEDDING)[0] for prompt in prompts]
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))


def test_what_is_not_supported_is_refused_at_load(tmp_path: Path, seed: int) -> None:
    model_dir = make_embedder("qwen3", tmp_path / "m", seed, pooling="mean")
    with pytest.raises(ConfigError, match="mean of a decoder"):
        make_llm(model_dir, deterministic=True)
    with pytest.raises(ConfigError, match="draws no tokens"):
        make_llm(model_dir, drafter="ngram")
    target = make_tiny("qwen3", tmp_path / "target", seed, vocab_size=VOCAB)
    with pytest.raises(ModelError, match="draft_dir"):
        make_llm(target, drafter="model", draft_dir=model_dir)
    for task, match in (("generate", "lacks tensors"), ("classify", "no classification head")):
        with pytest.raises(ModelError, match=match):
            make_llm(model_dir, task=task)
    pooling = model_dir / "1_Pooling/config.json"
    for fields, match in (
        ({"pooling_mode_max_tokens": True}, "pooling_mode"),
        ({"pooling_mode": ["cls", "mean"]}, "pooling_mode"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
    ):
        write_json(pooling, fields)
        with pytest.raises(ModelError, match=match):
            make_llm(model_dir)
    write_json(model_dir / "modules.json", [{"type": "x.Pooling", "path": "../other"}])
    with pytest.raises(ModelError, match="leads out"):
        load_pooling(model_dir)
    write_json(model_dir / "modules.json", [{"type": "x.Pooling", "path": ""}, {"type": "x.LSTM"}])
    write_json(model_dir / "config.json", {"architectures": ["Qwen3Model"]})
    with pytest.raises(ModelError, match="LSTM is not supported"):
        load_pooling(model_dir)
