"""Vectors of encoders and decoder embedders on a GPU, against transformers on the same card."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification
from weft.contract.errors import ConfigError
from weft.contract.tasks import PoolingParams
from weft.engine.loop.llm import LLM
from weft.kernels.ops.encoder_attention import encoder_attention
from weft.kernels.ops.encoder_attention.spec import Bounds
from weft.testing.models.tiny_embedders import make_embedder, write_modules
from weft.testing.models.tiny_encoders import CONFIGS, make_encoder

pytestmark = pytest.mark.needs("cuda")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.08}
BOTH = {"is_causal": False, "head_dim": 64}
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "lasttoken", {"head_dim": 64}),
    "llama": ("llama", "mean", {"head_dim": 64}),
    "gte-qwen2": ("qwen2", "lasttoken", BOTH),
}
GEMMA = {
    "use_bidirectional_attention": True,
    "sliding_window": 20,
    "head_dim": 64,
    "query_pre_attn_scalar": 60,
    "num_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
KNOWN = [kind for kind in CONFIGS if kind in CONFIG_MAPPING]
"""Encoders that the installed transformers has."""
LENGTHS = (1, 2, 17, 32, 64, 65, 128, 150, 190)
EMBEDDING = PoolingParams(output="embedding")


def make_model(kind: str, path: Path, pooling: str | None = None) -> str:
    """Writes a model; returns its pooling."""
    seed = random.randrange(10**6)
    if kind in DECODERS:
        name, own, fields = DECODERS[kind]
        pooling = pooling or own
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
        make_embedder(name, path, seed, pooling=pooling, **sizes, **fields)
        return pooling
    fields = GEMMA if kind == "gemma3_text" else {}
    make_encoder(kind, path, seed, **SIZES, **fields)
    pooling = pooling or random.choice(("cls", "mean"))
    write_modules(path, 256, seed, pooling=pooling)
    return pooling


def make_llm(path: Path, dtype: str, **settings: Any) -> LLM:
    values: dict[str, Any] = {"device": "cuda", "dtype": dtype, "num_pages": 400}
    values |= {"max_running_requests": 24, "max_step_tokens": 448, "prefill_chunk_tokens": 256}
    return LLM(path, **(values | settings))


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [[random.randrange(5, 256) for _ in range(length)] for length in lengths]


@torch.no_grad()
def wanted_vectors(path: Path, prompts: Sequence[Sequence[int]], pooling: str) -> torch.Tensor:
    """[P, hidden], of length 1, in float32 on the card."""
    given: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModel.from_pretrained(path, **given).cuda()
    vectors = []
    for ids in prompts:
        states = model(torch.tensor([ids], device="cuda")).last_hidden_state[0].double()
        vectors.append({"mean": states.mean(0), "lasttoken": states[-1], "cls": states[0]}[pooling])
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1).cpu()


def cosines(found: Sequence[Any], wanted: torch.Tensor) -> torch.Tensor:
    return (torch.from_numpy(np.stack([one[0] for one in found])).double() * wanted).sum(1)


@pytest.mark.parametrize("kind", [*KNOWN, *DECODERS, "gemma3_text"])
def test_vectors_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    pooling = make_model(kind, tmp_path)
    prompts = random_prompts([*LENGTHS, *random.choices(LENGTHS, k=9)])
    wanted = wanted_vectors(tmp_path, prompts, pooling)
    for dtype, least in (("float32", 0.99999), ("bfloat16", 0.999)):
        with make_llm(tmp_path, dtype) as llm:
            found = [
                llm.pool(prompts, EMBEDDING),
                [llm.pool([one], EMBEDDING)[0] for one in prompts],
            ]
        for one in found:
            assert cosines(one, wanted).min() > least, dtype
        print(kind, pooling, dtype, float(min(cosines(one, wanted).min() for one in found)))


@pytest.mark.parametrize("kind", ["modernbert", "xlm-roberta", "qwen3"])
def test_graphs_change_nothing(tmp_path: Path, kind: str) -> None:
    pooling = make_model(kind, tmp_path)
    prompts = random_prompts(random.choices(LENGTHS, k=30))
    wanted = wanted_vectors(tmp_path, prompts, pooling)
    tokens = PoolingParams(output="token_embeddings", normalises=False)
    rows = []
    for cuda_graphs in (True, False):
        with make_llm(tmp_path, "float32", cuda_graphs=cuda_graphs) as llm:
            assert cosines(llm.pool(prompts, EMBEDDING), wanted).min() > 0.99999
            rows.append(np.concatenate(llm.pool(prompts[:5], tokens)))
    assert np.allclose(*rows, atol=1e-3)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3"])
def test_bits_do_not_depend_on_neighbours_in_deterministic_mode(tmp_path: Path, kind: str) -> None:
    pooling = make_model(kind, tmp_path)
    prompts = random_prompts(random.choices(LENGTHS, k=20))
    wanted = wanted_vectors(tmp_path, prompts, pooling)
    with make_llm(tmp_path, "bfloat16", deterministic=True, prefix_cache=False) as llm:
        together = llm.pool(prompts, EMBEDDING)
        alone = [llm.pool([prompt], EMBEDDING)[0] for prompt in prompts]
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))
    assert cosines(together, wanted).min() > 0.999
    with pytest.raises(ConfigError, match="float32"):
        make_llm(tmp_path, "float32", deterministic=True)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@torch.no_grad()
def test_pairs_rank_as_by_transformers(tmp_path: Path, kind: str) -> None:
    """A cross-encoder is this model with a sigmoid, which changes no order."""
    make_encoder(kind, tmp_path, random.randrange(10**6), num_labels=1, **SIZES)
    given: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, **given).cuda()
    second, wanted = 20, []
    query, documents = random_prompts([second])[0], random_prompts(random.choices(LENGTHS, k=24))
    pairs = [query + one[:160] for one in documents]
    for ids in pairs:
        types = torch.tensor([[int(at >= second) for at in range(len(ids))]], device="cuda")
        more = {"token_type_ids": types} if kind == "bert" else {}
        wanted.append(float(model(torch.tensor([ids], device="cuda"), **more).logits[0, 0]))
    for dtype, most in (("float32", 1e-3), ("bfloat16", 0.05)):
        with make_llm(tmp_path, dtype) as llm:
            found = llm.pool(pairs, PoolingParams(output="classes", segment_start=second))
        scores = np.array([one[0, 0] for one in found])
        assert np.abs(scores - wanted).max() < most * max(1.0, float(np.abs(wanted).max()))
        if dtype == "float32":
            order = np.argsort(wanted)
            # Scores nearer to one another than the error may change places.
            assert (np.diff(scores[order]) > -2 * most).all()


def test_large_batches_attend_as_in_float32() -> None:
    lengths = [random.randint(1, 600) for _ in range(12)]
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    num_rows = sum(lengths) + random.randint(0, 300)
    qkv = torch.randn(num_rows, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.unbind(1)
    found = encoder_attention(q, k, v, Bounds.of(bounds))[: sum(lengths)]
    own = zip(*(x[: sum(lengths)].split(lengths) for x in (q, k, v, found)), strict=True)
    for own_q, own_k, own_v, one in own:
        given = [x.float().transpose(0, 1) for x in (own_q, own_k, own_v)]
        wanted = torch.nn.functional.scaled_dot_product_attention(*given).transpose(0, 1)
        assert (one.float() - wanted).abs().max() < 0.03


@pytest.mark.parametrize("kind", ["roberta", "modernbert"])
@torch.no_grad()
def test_adapters_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    pooling = make_model(kind, tmp_path / "m", "cls")
    base = AutoModel.from_pretrained(tmp_path / "m", dtype=torch.float32)
    targets = ["query", "value", "dense"] if kind == "roberta" else ["Wqkv", "Wi", "Wo"]
    options: dict[str, Any] = {"init_lora_weights": False, "target_modules": targets}
    adapted = get_peft_model(base, LoraConfig(r=4, **options))
    adapted.save_pretrained(tmp_path / "adapter")
    prompts = random_prompts(random.choices(LENGTHS, k=12))
    plain = wanted_vectors(tmp_path / "m", prompts, pooling)
    lora = {"enable_lora": True, "max_lora_rank": 8}
    for dtype, least in (("float32", 0.99999), ("bfloat16", 0.999)):
        with make_llm(tmp_path / "m", dtype, **lora) as llm:
            digest = llm.load_adapter(tmp_path / "adapter")
            chosen = [random.choice((digest, b"")) for _ in prompts]
            found = llm.pool(prompts, EMBEDDING, adapters=chosen)
        for one, ids, own, adapter in zip(found, prompts, plain, chosen, strict=True):
            wanted = own
            if adapter:
                vector = adapted.cpu()(torch.tensor([ids])).last_hidden_state[0, 0].double()
                wanted = vector / vector.norm()
            assert float(torch.from_numpy(one[0].copy()).double() @ wanted) > least
