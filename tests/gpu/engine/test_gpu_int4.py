"""Models with weights of 4 bits on a GPU: greedy tokens against transformers."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.shared.formats.packed_groups import PackedGroups
from weft.testing.kernels.group_cases import draw_groups
from weft.testing.models.float32_reference import reference_model, ties_with
from weft.testing.models.gguf_models import SIZES as GGUF_SIZES
from weft.testing.models.gguf_models import gguf_models
from weft.testing.models.int_models import LAYOUTS, SIZES, packed_models
from weft.testing.models.nvfp4_models import nvfp4_models
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_models import make_tiny, save_weights

pytestmark = pytest.mark.needs("cuda")

GREEDY = SamplingParams(temperature=0.0)
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "hidden_size": 96,
           "intermediate_size": 64, "sliding_window": 20}  # fmt: skip


def generate(path: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    values: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "num_pages": 400,
                              "max_running_requests": 32, "poison_free_pages": True}  # fmt: skip
    with LLM(path, **(values | settings)) as llm:
        stop = StopCriteria(max_tokens=30, ignore_eos=True)
        return [sample.token_ids for sample in llm.generate(prompts, GREEDY, stop)]


def random_prompts(vocab: int = 500) -> list[list[int]]:
    lengths = (1, 7, 33, 150, 300, *[random.randrange(2, 40) for _ in range(20)])
    return [[random.randrange(3, vocab) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *[("llama", name) for name in ("gptq", "gptq act order", "awq", "compressed-tensors")],
        ("llama", "compressed-tensors with zeros"),
        ("llama", "compressed-tensors act order"),
        ("qwen3_moe", "compressed-tensors"),
        ("qwen3_moe", "gptq act order"),
    ],
)
def test_layouts_of_checkpoints(kind: str, name: str, tmp_path: Path) -> None:
    source = make_tiny(kind, tmp_path / "tiny", random.randrange(10**6), **SIZES)
    packed, floats = packed_models(source, tmp_path / "model", LAYOUTS[name])
    prompts = random_prompts()
    tokens = generate(packed, prompts)
    ties = ties_with(reference_model(floats, torch.bfloat16), prompts, tokens)
    ties.check(is_moe="moe" in kind)


@pytest.mark.parametrize("name", ["gptq act order", "gptq"])
def test_dense_layers_keep_their_bits(name: str, tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "tiny", random.randrange(10**6), **SIZES)
    packed, floats = packed_models(source, tmp_path / "model", LAYOUTS[name])
    loaded = load_model(packed, "bfloat16", "cuda")
    assert (loaded.weight_format, loaded.bytes_per_weight < 1) == ("int4", True)
    assert load_model(floats, "bfloat16", "cuda").described_format.startswith(
        "bfloat16, 2.00 bytes"
    )


def test_products_in_act_order_are_those_of_floats() -> None:
    hidden, inner, group = 256, 192, 32
    for rows, gated in itertools.product((1, 2, 9, 64, 300), (False, True)):
        plain, order = draw_groups(2 * inner, hidden, group, "offsets"), torch.randperm(hidden)
        matrix = replace(plain, order=order.int())
        wide = matrix.dequantised(torch.float32)
        moved = replace(
            matrix,
            **{
                name: getattr(matrix, name).cuda()
                for name in ("data", "scales", "offsets", "order")
            },
        )
        x = torch.randn(rows, hidden).bfloat16()
        exact = x.double() @ wide.double().T
        pack = pack_gate_up if gated else pack_linear
        w = pack(moved, dtype=torch.bfloat16)
        assert isinstance(w.form, PackedGroups)
        if gated:
            gate, up = exact.chunk(2, dim=1)
            exact, out = F.silu(gate) * up, gate_up_silu(x.cuda(), w)
        else:
            out = linear(x.cuda(), w)
        assert (out.double().cpu() - exact).norm() < 1e-2 * exact.norm()


def test_a_deterministic_request_does_not_depend_on_others(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "tiny", random.randrange(10**6), **SIZES)
    packed, _ = packed_models(source, tmp_path / "model", LAYOUTS["awq"])
    prompts = random_prompts()
    together = generate(packed, prompts, deterministic=True)
    for prompt, tokens in list(zip(prompts, together, strict=True))[2:5]:
        assert generate(packed, [prompt], deterministic=True) == [tokens]


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, floats = tmp_path / "packed", tmp_path / "floats"
    seed = random.randrange(10**6)
    for path in (packed, floats):
        make_reference("gpt_oss", path, seed, **GPT_OSS)
    weights, own = load_file(floats / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = weights[name].shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 123, (experts, rows, columns // 32), dtype=torch.uint8)
        own |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_weights(floats, weights)
    plain = {name: tensor for name, tensor in weights.items() if f"{name}_blocks" not in own}
    save_weights(packed, plain | own)
    fields = json.loads((packed / "config.json").read_text())
    config = json.dumps(fields | {"quantization_config": {"quant_method": "mxfp4"}})
    (packed / "config.json").write_text(config)
    prompts = random_prompts(fields["vocab_size"])
    tokens = generate(packed, prompts)
    ties_with(reference_model(floats, torch.bfloat16), prompts, tokens).check(is_moe=True)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_nvfp4(kind: str, tmp_path: Path) -> None:
    source = make_tiny(kind, tmp_path / "tiny", random.randrange(10**6), **SIZES)
    packed, floats = nvfp4_models(source, "modelopt")
    loaded = load_model(packed, "bfloat16", "cuda")
    assert (loaded.weight_format, loaded.bytes_per_weight < 0.7) == ("nvfp4", True)
    del loaded
    prompts = random_prompts()
    tokens = generate(packed, prompts)
    ties = ties_with(reference_model(floats, torch.bfloat16), prompts, tokens)
    ties.check(is_moe="moe" in kind)


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("llama", {"v_proj.weight": "Q6_K", "_proj.weight": "Q4_K"}),
        ("qwen3", {"_proj.weight": "Q4_1"}),
        ("qwen3_moe", {"self_attn.o_proj.weight": "Q4_0", "_proj.weight": "MXFP4"}),
    ],
)
def test_gguf(
    kind: str, types: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 4 bits are multiplied as they are, other types as floats."""
    monkeypatch.setattr("weft.checkpoint.gguf_folder.cache_folder", lambda: tmp_path / "cache")
    # Older releases of transformers on machines with GPUs do not convert tokenizers.
    monkeypatch.setattr("weft.checkpoint.gguf_folder.tokenizer_files", lambda metadata: {})
    source = make_tiny(kind, tmp_path / "tiny", random.randrange(10**6), **GGUF_SIZES)
    path, floats = gguf_models(source, tmp_path / "file.gguf", types)
    folder = resolve_model(str(path))
    loaded = load_model(folder, "bfloat16", "cuda")
    assert loaded.bytes_per_weight < 1.9
    del loaded
    prompts = random_prompts()
    tokens = generate(folder, prompts)
    ties = ties_with(reference_model(floats, torch.bfloat16), prompts, tokens)
    ties.check(is_moe="moe" in kind)
