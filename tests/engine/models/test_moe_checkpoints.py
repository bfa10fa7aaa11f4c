"""Checkpoints of families with experts: quantised ones, layers that draft, what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ModelError
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.testing.models.choices import where_experts_are_sure
from weft.testing.models.every_family import load_reference
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_models import save_weights

pytestmark = pytest.mark.usefixtures("single_thread")

GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 96,
           "intermediate_size": 64, "sliding_window": 20}  # fmt: skip
LATENT = {"head_dim": None, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
          "v_head_dim": 20, "q_lora_rank": 40, "n_routed_experts": 6, "num_experts_per_tok": 3,
          "moe_intermediate_size": 44, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
          "num_key_value_heads": 6, "first_k_dense_replace": 1}  # fmt: skip


PROMPT = [5, 99, 12, 300, 41, 7, 7]


def logits(path: Path) -> torch.Tensor:
    model = load_model(path, "float32").model
    return PagedDriver(model, 8).step([(PagedRequest(), PROMPT)])


def edit(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | fields
    (path / "config.json").write_text(json.dumps(config))


def test_experts_as_wide_as_the_stream(tmp_path: Path, seed: int) -> None:
    """Their shapes do not tell rows from columns, as in gpt-oss's own models."""
    from transformers import AutoModelForCausalLM

    make_reference("gpt_oss", tmp_path, seed, **GPT_OSS | {"hidden_size": 64})
    found = logits(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1:]
    with where_experts_are_sure(lambda: reference, PROMPT):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_experts_in_mxfp4(tmp_path: Path, seed: int) -> None:
    make_reference("gpt_oss", tmp_path, seed, **GPT_OSS)
    weights, packed = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights[name].shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, rows, columns // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_weights(tmp_path, weights)
    expected, plain = logits(tmp_path), load_model(tmp_path, "float32").digest
    for name in packed:
        weights.pop(name.rpartition("_")[0], None)
    save_weights(tmp_path, weights | packed)
    edit(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert torch.equal(logits(tmp_path), expected)
    loaded = load_model(tmp_path, "float32")
    assert loaded.weight_format == "mxfp4 + float32"  # Attention is in floats.
    assert loaded.digest != plain
    dummy = load_model(tmp_path, "float32", dummy=True).model
    assert PagedDriver(dummy, 4).step([(PagedRequest(), [1, 2, 3])]).isfinite().all()
    name = next(name for name in packed if name.endswith("_scales"))
    packed[name][1, 3, 0] = 255
    save_weights(tmp_path, weights | packed)
    with pytest.raises(ModelError, match=r"experts\.\w+: expert 1: a scale is no number"):
        load_model(tmp_path, "float32")


def test_latent_attention_and_experts_in_fp8(tmp_path: Path, seed: int) -> None:
    make_reference("deepseek_v3", tmp_path / "model", seed, **LATENT)
    path, floats = fp8_copy(tmp_path / "model", tmp_path / "fp8", "blocks")
    with where_experts_are_sure(lambda: load_reference(floats), PROMPT):
        torch.testing.assert_close(logits(path), logits(floats), rtol=1e-4, atol=1e-4)


def test_layers_that_draft_are_left_out_and_nothing_else(tmp_path: Path, seed: int) -> None:
    make_reference("deepseek_v3", tmp_path, seed, **LATENT)
    expected, weights = logits(tmp_path), load_file(tmp_path / "model.safetensors")
    weights["model.layers.3.eh_proj.weight"] = torch.zeros(72, 144)
    save_weights(tmp_path, weights)
    assert torch.equal(logits(tmp_path), expected)
    weights["model.layers.2.eh_proj.weight"] = torch.zeros(72, 144)
    save_weights(tmp_path, weights)
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.2\.eh_proj"):
        load_model(tmp_path, "float32")


@pytest.mark.parametrize(
    ("kind", "sizes", "field", "value"),
    [
        ("deepseek_v3", LATENT, "scoring_func", "softmax"),
        ("deepseek_v3", LATENT, "topk_method", "greedy"),
        ("deepseek_v3", LATENT, "topk_group", 2),
        ("deepseek_v3", LATENT, "n_group", 4),
        ("deepseek_v3", LATENT, "moe_layer_freq", 2),
        ("deepseek_v3", LATENT, "attention_bias", True),
        ("deepseek_v3", LATENT, "kv_lora_rank", None),
        ("deepseek_v2", LATENT, "norm_topk_prob", True),
        ("deepseek_v2", LATENT, "topk_method", "noaux_tc"),
        ("gpt_oss", GPT_OSS, "hidden_act", "gelu"),
        ("mixtral", {"num_experts_per_tok": 2}, "num_local_experts", 1),
    ],
)
def test_what_is_not_supported_is_named(
    kind: str, sizes: dict[str, Any], field: str, value: object, tmp_path: Path
) -> None:
    make_reference(kind, tmp_path, 0, **sizes)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert ModelConfig.from_dict(raw)
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict(raw | {field: value})
    named = {"num_local_experts": "num_experts_per_tok", "topk_group": "n_group"}
    assert caught.value.param == named.get(field, field)


def test_numbers_as_published_files_have_them() -> None:
    common = {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 99, "max_position_embeddings": 32768,
              "head_dim": 128}  # fmt: skip

    def read(architecture: str, **fields: Any) -> ModelConfig:
        return ModelConfig.from_dict({**common, "architectures": [architecture], **fields})

    hunyuan = {"num_experts": 64, "intermediate_size": 3072, "moe_topk": [8, 8],
               "moe_intermediate_size": [3072, 3072], "num_shared_expert": [1, 1]}  # fmt: skip
    moe = read("HunYuanMoEV1ForCausalLM", **hunyuan).moe
    assert moe is not None
    assert (moe.num_experts_per_tok, moe.shared_size) == (8, 3072)
    for name, value in (("moe_topk", [8, 4]), ("num_shared_expert", [2, 2])):
        with pytest.raises(ModelError, match=name):
            read("HunYuanMoEV1ForCausalLM", **hunyuan | {name: value})
    minimax = read(
        "MiniMaxM2ForCausalLM", intermediate_size=1536, num_local_experts=256, rotary_dim=64,
        num_experts_per_tok=8, attn_type_list=[1, 1], use_mtp=True, num_mtp_modules=3,
    )  # fmt: skip
    assert (minimax.rope.partial, minimax.rope.theta) == (0.5, 5e6)
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096}  # fmt: skip
    deepseek = read(
        "DeepseekV3ForCausalLM",
        **LATENT | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "num_key_value_heads": 8},
        rope_scaling=yarn,
        intermediate_size=128,
    )  # fmt: skip
    assert deepseek.decoder is not None
    assert deepseek.decoder.layers[0].scale == pytest.approx(192**-0.5 * 1.3688879**2)


def test_pages_of_latents_have_one_part(tmp_path: Path, seed: int) -> None:
    make_reference("deepseek_v3", tmp_path, seed, **LATENT)
    layout = load_model(tmp_path, "float32").model.kv_layout(16)
    assert layout.page_shape == (1, 3, 1, 16, 48)
    assert layout.describe() == (
        "plane=target;layers=3;heads=1;parts=latent:48:float32;page_size=16;"
        "order=head,layer,part,position,dim"
    )
    with LLM(tmp_path, dtype="float32", page_size=16, num_pages=20) as llm:
        assert llm.engine.parts.info.kv_parts == ("latent",)


def test_drafts_from_the_text_are_verified_over_latents(tmp_path: Path, seed: int) -> None:
    """Several rows of a request in one step."""
    make_reference("deepseek_v2", tmp_path, seed, **LATENT)
    phrase = [random.randrange(3, 300) for _ in range(6)]
    prompts = [phrase * 4, phrase[::-1] * 3]
    with LLM(tmp_path, dtype="float32", page_size=8) as llm:
        expected = [sample.token_ids for sample in llm.generate(prompts)]
    with LLM(tmp_path, dtype="float32", page_size=8, drafter="ngram") as llm:
        assert [sample.token_ids for sample in llm.generate(prompts)] == expected
