"""Models with int8 products against transformers on the same weights in floats."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from weft.checkpoint.quantization import Quantization
from weft.cli import model as command
from weft.contract.errors import ConfigError, ModelError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.executor.device import wider_experts
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.engine.model.stage import ModelShare
from weft.engine.model.weights.random_weights import RandomWeights
from weft.engine.model.weights.schemes.int8 import Int8Scheme
from weft.engine.model.weights.schemes.registry import scheme_of
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.shared import cpu
from weft.kernels.shared.formats.quantised import Int8Channels, quantise_channels
from weft.kernels.shared.formats.rotated import RotatedChannels, quantise_rotated
from weft.testing.models.choices import check_choices, check_same, where_experts_are_sure
from weft.testing.models.every_family import load_reference
from weft.testing.models.families import make_family
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.quantised_models import CHANNELS, dequantised_copy, quantised_copy
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny, save_weights


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "model"
    return make_tiny("llama", folder, random.randrange(10**6), tokenizer=True)


def check_greedy(model: Any, floats: Path) -> None:
    """Greedy tokens are those that transformers draws with the same weights in floats."""
    prompt = [random.randrange(3, 500) for _ in range(33)]
    (tokens,) = PagedDriver(model, num_pages=64).greedy([prompt], 40)
    reference = load_reference(floats)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    with where_experts_are_sure(lambda: reference, prompt + tokens):
        check_choices(logits[len(prompt) - 1 :], tokens)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
    ],
)
def test_weights_made_at_load(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    source = make_tiny(kind, tmp_path / "model", random.randrange(10**6), **fields)
    loaded = load_model(source, "float32", quantization="int8")
    assert (loaded.dtype, loaded.weight_format) == ("float32", "int8")
    check_greedy(loaded.model, dequantised_copy(source, tmp_path / "floats"))


def test_experts_that_a_gpu_keeps_in_floats_are_told(tmp_path: Path) -> None:
    source = make_family("nemotron_h-experts", tmp_path, random.randrange(10**6))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    plain = load_model(source, "float32", dummy=True)
    assert wider_experts(plain, gpu) == []
    loaded = load_model(source, "float32", quantization="int8", dummy=True)
    assert wider_experts(loaded, cpu) == []
    (notice,) = wider_experts(loaded, gpu)
    assert notice == "experts without gates are kept in float32 on GPUs, other weights in int8"


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_weights_of_a_checkpoint(kind: str, tmp_path: Path) -> None:
    source = make_tiny(kind, tmp_path / "model", random.randrange(10**6))
    loaded = load_model(quantised_copy(source, tmp_path / "int8"), "float32")
    assert loaded.weight_format == "int8"
    floats = dequantised_copy(source, tmp_path / "floats", at_load=False)
    check_greedy(loaded.model, floats)


def test_ignored_modules_stay_in_floats(model_dir: Path, tmp_path: Path) -> None:
    config = copy.deepcopy(CHANNELS)
    config["ignore"] = ["lm_head", r"re:.*layers\.1\.mlp", "model.layers.0.self_attn.o_proj"]
    names = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
    floats = ("model.layers.0.self_attn.o_proj", *names)
    path = quantised_copy(model_dir, tmp_path / "int8", config, floats)
    model = load_model(path, "float32").model
    kept = load_file(model_dir / "model.safetensors")
    expected = dequantised_copy(model_dir, tmp_path / "floats", at_load=False)
    tensors = load_file(expected / "model.safetensors")
    tensors |= {f"{name}.weight": kept[f"{name}.weight"] for name in floats}
    save_weights(expected, tensors)
    check_greedy(model, expected)


def test_a_product_that_is_ignored_in_part_is_refused(model_dir: Path, tmp_path: Path) -> None:
    floats = ("model.layers.0.self_attn.k_proj",)
    path = quantised_copy(model_dir, tmp_path / "int8", None, floats)
    with pytest.raises(ModelError, match=r"q_proj.*one product.*only k_proj"):
        load_model(path, "float32")


def test_bfloat16_stays_near_the_floats(model_dir: Path) -> None:
    prompt = [random.randrange(3, 500) for _ in range(60)]
    logits = []
    for settings in ({"dtype": "float32"}, {"dtype": "bfloat16"}):
        model = load_model(model_dir, **settings, quantization="int8").model
        driver = PagedDriver(model, num_pages=8)
        logits.append(driver.step([(PagedRequest(), prompt)], range(len(prompt))))
    wide, narrow = (one.log_softmax(-1) for one in logits)
    assert (wide.exp() * (wide - narrow)).sum(-1).mean() < 0.01


def test_rotated_weights_give_a_token_what_they_give_it_alone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 320}
    source = make_tiny("llama", tmp_path / "model", random.randrange(10**6), **sizes)
    model = load_model(source, "bfloat16", quantization="int8").model
    native = cpu.native_cpu()
    for part in (model.model.layers[0].mixer.qkv_proj, model.model.layers[0].feed.down_proj):
        if part.native is not None:
            assert part.native.struct.is_rotated == (native is not None and native.takes_int8_rows)
    if native is None:
        return
    prompt = [random.randrange(3, 500) for _ in range(41)]
    together = PagedDriver(model, num_pages=8)
    expected = together.step([(PagedRequest(), prompt)], range(len(prompt)))
    apart, request = PagedDriver(model, num_pages=8), PagedRequest()
    found = [
        apart.step([(request, part)], range(len(part))) for part in (prompt[:17], prompt[17:19])
    ]
    found += [apart.step([(request, [token])], [0]) for token in prompt[19:]]
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("width", [256, 320])
def test_ranks_have_the_scales_of_whole_rows(width: int) -> None:
    """A share of 160 columns cuts a block, so it is not rotated."""
    spec = LinearSpec(names=("down_proj",), in_features=width, rows=(40,), split="in")
    whole = torch.randn(40, width).to(torch.bfloat16)
    scheme = scheme_of(Quantization(format="int8", source="load"))
    assert isinstance(scheme, Int8Scheme)
    total = torch.zeros(40, width)
    for rank in range(2):
        reader, dtype = RandomWeights(torch.device("cpu")), torch.bfloat16
        share = ModelShare(peers=SimpleNamespace(rank=rank, size=2))
        weights = Weights(reader, scheme, dtype, torch.device("cpu"), share=share)
        made = scheme.made_linear(whole, spec, weights)
        native = cpu.native_cpu()
        is_rotated = width == 256 and native is not None and native.takes_int8_rows
        assert isinstance(made, RotatedChannels if is_rotated else Int8Channels)
        expected = quantise_rotated(whole) if is_rotated else quantise_channels(whole)
        assert torch.equal(made.scales, expected.scales)
        total[:, spec.columns_of(share.shard)] = made.dequantised(torch.float32)
    assert (total - whole).norm() < 0.02 * whole.float().norm()
    whole[3, 7] = float("inf")
    with pytest.raises(ModelError, match="not finite"):
        scheme.made_linear(whole, spec, weights)


def test_every_tensor_is_used_and_every_parameter_filled(model_dir: Path, tmp_path: Path) -> None:
    path = quantised_copy(model_dir, tmp_path / "int8")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight_scale"
    save_weights(path, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(ModelError, match=rf"lacks tensors: {name}"):
        load_model(path, "float32")
    save_weights(path, tensors | {"model.layers.0.mlp.up_proj.weight_zero_point": torch.ones(1)})
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.0\.mlp\.up_proj.weight_z"):
        load_model(path, "float32")
    for bad in (-1.0, float("nan")):
        save_weights(path, tensors | {name: torch.full_like(tensors[name], bad)})
        with pytest.raises(ModelError, match=r"up_proj.*weight_scale .*(negative|not finite)"):
            load_model(path, "float32")
    weight = name.removesuffix("_scale")
    save_weights(path, tensors | {weight: tensors[weight].float()})
    with pytest.raises(ModelError, match=r"up_proj\.weight is F32; only I64"):
        load_model(path, "float32")


def changed(*path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(CHANNELS)
    below: Any = config
    for name in path[:-1]:
        below = below[name]
    below[path[-1]] = value
    return config


WEIGHTS = ("config_groups", "group_0", "weights")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "hqq"}, "'hqq' is not supported"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor"),
        (
            {
                **{"quant_method": "bitsandbytes", "load_in_4bit": True},
                "bnb_4bit_quant_storage": "bfloat16",
            },
            "storage 'bfloat16'",
        ),
        (changed("sparsity_config", value={"format": "sparse-24-bitmask"}), "'sparse-24-bitmask'"),
        (changed("quantization_status", value="calibration"), "compressed or frozen"),
        ({"bits": 4}, "'' is not supported"),
        (changed("format", value="marlin-24"), "'marlin-24' is not supp"),
        (changed(*WEIGHTS, "num_bits", value=4), "weights.num_bits = 4"),
        (changed(*WEIGHTS, "strategy", value="group"), "weights.strategy = 'group'"),
        (changed(*WEIGHTS, "symmetric", value=False), "weights.symmetric = False"),
        (changed("config_groups", "group_0", "targets", value=["Conv2d"]), "targets"),
        (changed("config_groups", "group_1", value={}), "weights of None bits"),
        (
            changed("config_groups", "group_0", "input_activations", "dynamic", value=False),
            "fixed scales",
        ),
        (changed("kv_cache_scheme", value={"num_bits": 8}), "kv_cache_scheme"),
        (changed("ignore", value=["re:("]), r"ignore: 're:\('"),
        (changed("ignore", value="lm_head"), "ignore: expected a list"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], problem: str, model_dir: Path, tmp_path: Path
) -> None:
    path = quantised_copy(model_dir, tmp_path / "int8")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    with pytest.raises(ModelError, match=rf"quantization_config: .*{problem}"):
        load_model(path, "float32")


def test_settings_that_do_not_fit_are_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'int3' is none of auto, int8"):
        load_model(model_dir, "float32", quantization="int3")
    path = quantised_copy(model_dir, tmp_path / "int8")
    with pytest.raises(ConfigError, match="the checkpoint is int8 already"):
        load_model(path, "float32", quantization="int8")


def test_pages_of_models_with_other_weights_are_never_the_same(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    floats = load_model(model_dir, "float32")
    made = load_model(model_dir, "float32", quantization="int8")
    narrow = load_model(model_dir, "bfloat16", quantization="int8")
    path = quantised_copy(model_dir, tmp_path / "int8")
    config = changed("ignore", value=["lm_head", "re:nothing"])
    fields = json.loads((path / "config.json").read_text())
    found = load_model(path, "float32")
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    other = load_model(path, "float32")
    assert len({one.digest for one in (floats, made, found, other)}) == 4
    for one in (made, narrow):
        arguments = ["verify", str(model_dir), "--dtype", one.dtype, "--quantization", "int8"]
        assert command.main(arguments) == 0
        assert f"{one.dtype}, int8, model digest {one.digest.hex()}" in capsys.readouterr().out


@pytest.mark.parametrize("takes_int8_rows", [True, False])
def test_rotated_weights_have_a_fingerprint_of_their_own(
    takes_int8_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "native_cpu", lambda: SimpleNamespace(takes_int8_rows=takes_int8_rows))
    host, gpu = torch.device("cpu"), torch.device("cuda")
    sources: tuple[Literal["checkpoint", "load"], ...] = ("checkpoint", "load")
    for source in sources:
        quantization = Quantization(format="int8", source=source)
        scheme, plain = scheme_of(quantization), quantization.fingerprint()
        assert scheme.fingerprint(torch.float32, host) == plain
        assert scheme.fingerprint(torch.bfloat16, gpu) == plain
        is_rotated = takes_int8_rows and source == "load"
        assert (scheme.fingerprint(torch.bfloat16, host) != plain) == is_rotated


def test_int8_is_multiplied_by_bfloat16_unless_told_otherwise(model_dir: Path) -> None:
    assert load_model(model_dir, quantization="int8").dtype == "bfloat16"


def test_an_engine_serves_int8(model_dir: Path, tmp_path: Path) -> None:
    floats = dequantised_copy(model_dir, tmp_path / "floats")
    prompts = [[random.randrange(3, 500) for _ in range(n)] for n in (1, 20, 70)]
    texts = []
    int8 = {"quantization": "int8"}
    cases: list[tuple[Path, dict[str, Any]]] = [
        (floats, {}),
        (model_dir, int8),
        (model_dir, int8 | {"drafter": "ngram"}),
        (model_dir, int8 | {"deterministic": True}),
    ]
    for path, settings in cases:
        with LLM(path, dtype="float32", num_pages=64, **settings) as llm:
            sampling = SamplingParams(temperature=0.0)
            samples = llm.generate(prompts, sampling, StopCriteria(max_tokens=24))
            texts.append([sample.token_ids for sample in samples])
            expected = "int8" if settings else "float32"
            assert llm.engine.info.weight_format.startswith(f"{expected}, ")
    for found in texts[1:]:
        for prompt, one, other in zip(prompts, found, texts[0], strict=True):
            check_same(lambda: load_reference(floats), prompt, one, other)
