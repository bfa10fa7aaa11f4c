"""LoRA on experts: as PEFT writes it, expert by expert, and with shared outer sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import AdapterError
from weft.engine.model.adapters.adapter import Adapter
from weft.testing.models.merged_adapters import (
    assert_equals_peft,
    assert_same_logits,
    load_base,
    read,
)
from weft.testing.models.tiny_adapters import PREFIX, write_adapter
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

EXPERTS, HIDDEN, INNER = 7, 72, 44
SIZES = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}
LETTERS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("moe"), seed, num_hidden_layers=2)


def single_tensors(seed: int, rank: int = 4) -> Tensors:
    """Tensors of every expert of both layers, under the names of the single experts."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{PREFIX}model.layers.{layer}.mlp.experts.{expert}.{name}.lora_{half}.weight": 0.2
        * torch.randn((rank, width) if half == "A" else (out, rank), generator=generator)
        for layer in range(2)
        for expert in range(EXPERTS)
        for name, (width, out) in SIZES.items()
        for half in ("A", "B")
    }


def shared_tensors(seed: int, rank: int = 4) -> Tensors:
    """Stacked tensors, of which the sides towards the stream are one for all experts."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for layer in range(2):
        for name, (width, out) in SIZES.items():
            count_a, count_b = (EXPERTS, 1) if name == "down_proj" else (1, EXPERTS)
            stem = f"{PREFIX}model.layers.{layer}.mlp.experts.{LETTERS[name]}"
            for half, shape in (("A", (count_a, rank, width)), ("B", (count_b, out, rank))):
                tensors[f"{stem}.lora_{half}.weight"] = 0.2 * torch.randn(
                    shape, generator=generator
                )
    return tensors


def write(path: Path, tensors: Tensors, **settings: Any) -> Path:
    targets = [*SIZES, *LETTERS.values()]
    return write_adapter(path, tensors, **{"r": 4, "target_modules": targets, **settings})


def shares_experts(adapter: Adapter) -> bool:
    """One A for gate and up and one B for down, for all experts of a layer."""
    return any(1 in (pair.a.shape[0], pair.b.shape[0]) for pair in adapter.experts.values())


def assert_same(first: Adapter, second: Adapter) -> None:
    assert first.experts.keys() == second.experts.keys()
    for key, pair in first.experts.items():
        assert torch.equal(pair.a, second.experts[key].a)
        assert torch.equal(pair.b, second.experts[key].b)


def test_attention_beside_experts(model_dir: Path, tmp_path: Path, seed: int) -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapter = assert_equals_peft(model_dir, tmp_path, seed, r=4, target_modules=targets)
    assert {kind for _, kind in adapter.modules} == {"q", "k", "v", "o"}
    assert not adapter.experts


def test_all_linear_modules(model_dir: Path, tmp_path: Path, seed: int) -> None:
    adapter = assert_equals_peft(model_dir, tmp_path, seed, r=4, lora_alpha=6)
    assert {kind for _, kind in adapter.modules} == {"q", "k", "v", "o", "router"}
    assert {kind for _, kind in adapter.experts} == {"gate", "up", "down"}
    parts = ["dense", "experts"]
    with pytest.raises(AdapterError, match=r"mlp\.gate\.lora_A.*\(router\) are not applied here"):
        read(tmp_path, model_dir, parts=parts)


def test_excluded_modules_whose_parameters_are_wrapped(
    model_dir: Path, tmp_path: Path, seed: int
) -> None:
    """PEFT wraps them all the same: it excludes modules, not parameters."""
    adapter = assert_equals_peft(
        model_dir, tmp_path, seed, r=4, target_modules="all-linear", exclude_modules=["gate"]
    )
    assert "router" in {kind for _, kind in adapter.modules}


@pytest.mark.parametrize("names", [["gate_up_proj", "down_proj"], ["gate_up_proj"], ["down_proj"]])
def test_parameters_of_all_experts_as_peft_wraps_them(
    model_dir: Path, tmp_path: Path, seed: int, names: list[str]
) -> None:
    adapter = assert_equals_peft(
        model_dir,
        tmp_path,
        seed,
        r=3,
        lora_alpha=5,
        target_modules=["q_proj"],
        target_parameters=[f"mlp.experts.{name}" for name in names],
        rank_pattern={r"layers.1.mlp.experts.down_proj": 6, r".*\.gate_up_proj": 5},
        alpha_pattern={"down_proj": 11},
    )
    kinds = {"gate_up_proj": {"gate", "up"}, "down_proj": {"down"}}
    assert {kind for _, kind in adapter.experts} == set().union(*(kinds[name] for name in names))
    if "down_proj" in names:
        assert [adapter.experts[layer, "down"].rank for layer in range(2)] == [3, 6]
    assert not shares_experts(adapter)


def test_single_experts(model_dir: Path, tmp_path: Path, seed: int) -> None:
    from peft import PeftModel

    path = write(tmp_path, single_tensors(seed), target_modules=list(SIZES))
    adapter = read(path, model_dir)
    assert adapter.experts[1, "up"].a.shape == (EXPERTS, 4, HIDDEN)
    assert adapter.experts[1, "down"].b.shape == (EXPERTS, HIDDEN, 4)
    expected = PeftModel.from_pretrained(load_base(model_dir), path)
    assert_same_logits(model_dir, adapter, expected, seed)


def test_letters_are_other_names(model_dir: Path, tmp_path: Path, seed: int) -> None:
    plain = single_tensors(seed)
    adapter = read(write(tmp_path / "plain", plain), model_dir)
    letters = {
        name.replace(word, letter).replace("mlp", "block_sparse_moe"): tensor
        for name, tensor in plain.items()
        for word, letter in LETTERS.items()
        if word in name
    }
    assert_same(read(write(tmp_path / "letters", letters), model_dir), adapter)
    assert_same(read(write(tmp_path / "stacked", stacked(plain)), model_dir), adapter)


def stacked(tensors: Tensors) -> Tensors:
    """The tensors of single experts in one for each projection."""
    groups: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".experts.")
        groups.setdefault(f"{head}.experts.{rest.partition('.')[2]}", []).append(tensor)
    return {name: torch.stack(members) for name, members in groups.items()}


def test_experts_that_are_left_alone_or_have_other_ranks(
    model_dir: Path, tmp_path: Path, seed: int
) -> None:
    stem = f"{PREFIX}model.layers.1.mlp.experts"
    tensors = {
        name: tensor
        for name, tensor in single_tensors(seed).items()
        if name.startswith((f"{stem}.2.gate", f"{stem}.5.gate"))
    }
    a, b = (f"{stem}.5.gate_proj.lora_{half}.weight" for half in "AB")
    tensors[a], tensors[b] = tensors[a][:3].clone(), tensors[b][:, :3].clone()
    pattern = {"experts.5.gate_proj": 3}
    adapter = read(write(tmp_path, tensors, rank_pattern=pattern, lora_alpha=4), model_dir)
    assert set(adapter.experts) == {(1, "gate")}
    pair = adapter.experts[1, "gate"]
    products = pair.b @ pair.a
    assert torch.allclose(products[5], 4 / 3 * tensors[b] @ tensors[a], atol=1e-5)
    assert not products[[0, 1, 3, 4, 6]].any()
    assert products[2].any()


def test_shared_sides_need_memory_once(model_dir: Path, tmp_path: Path, seed: int) -> None:
    """Not for each of the experts that share them."""
    tensors = shared_tensors(seed)
    path = write(tmp_path / "shared", tensors)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    adapter = read(path, model_dir, max_bytes=stored)
    assert adapter.num_bytes == stored
    with pytest.raises(AdapterError, match=f"take {stored} bytes"):
        read(path, model_dir, max_bytes=stored - 1)


def test_shared_outer_sides(model_dir: Path, tmp_path: Path, seed: int) -> None:
    tensors = shared_tensors(seed)
    adapter = read(write(tmp_path / "shared", tensors), model_dir)
    assert shares_experts(adapter)
    assert adapter.experts[0, "gate"].a.shape == (1, 4, HIDDEN)
    assert adapter.experts[0, "down"].b.shape == (1, HIDDEN, 4)
    repeated = {
        name: tensor.expand(EXPERTS, -1, -1).contiguous() for name, tensor in tensors.items()
    }
    assert_same(read(write(tmp_path / "repeated", repeated), model_dir), adapter)
    single = {
        name.replace("experts.w", f"experts.{expert}.w"): tensor[expert].clone()
        for name, tensor in repeated.items()
        for expert in range(EXPERTS)
    }
    assert_same(read(write(tmp_path / "single", single), model_dir), adapter)
    changed = f"{PREFIX}model.layers.1.mlp.experts.4.w1.lora_A.weight"
    single[changed] = single[changed] + 0.01
    other = read(write(tmp_path / "changed", single), model_dir)
    assert not shares_experts(other)
    assert other.experts[0, "down"].b.shape == (EXPERTS, HIDDEN, 4)
    for layer in range(2):
        pair = adapter.experts[layer, "down"]
        same = other.experts[layer, "down"]
        assert torch.allclose(pair.b @ pair.a, same.b @ same.a)


def test_mixtures_are_refused(model_dir: Path, tmp_path: Path, seed: int) -> None:
    shared, single = shared_tensors(seed), single_tensors(seed)
    mixed = {name: tensor for name, tensor in shared.items() if "layers.0" in name}
    mixed |= {name: tensor for name, tensor in single.items() if "layers.1" in name}
    with pytest.raises(AdapterError, match="mixtures are not supported"):
        read(write(tmp_path / "layers", mixed), model_dir)
    with pytest.raises(AdapterError, match="change the same projection"):
        read(write(tmp_path / "both", {**shared, **single}), model_dir)
    with pytest.raises(AdapterError, match="change the same projection"):
        read(write(tmp_path / "again", {**single, **shared}), model_dir)


def test_what_does_not_fit_is_refused(model_dir: Path, tmp_path: Path, seed: int) -> None:
    single, stem = single_tensors(seed), f"{PREFIX}model.layers.0.mlp"
    name = f"{stem}.experts.3.up_proj.lora_B.weight"
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({name: single[name][1:].clone()}, rf"{name} has shape \(43, 4\)"),
        ({f"{stem}.experts.7.up_proj.lora_A.weight": torch.zeros(4, 72)}, "has 7 experts"),
        ({f"{stem}.up_proj.lora_A.weight": torch.zeros(4, 72)}, "experts in the place of this"),
        ({f"{stem}.shared.lora_A.weight": torch.zeros(4, 72)}, "no such projection"),
        ({f"{stem}.gate.lora_A.weight": torch.zeros(4, 72)}, "does not target"),
        ({f"{stem}.experts.lora_A.weight": torch.zeros(28, 72)}, "lora_B, is missing"),
    ]
    for number, (extra, problem) in enumerate(cases):
        path = write(tmp_path / str(number), {**single, **extra})
        with pytest.raises(AdapterError, match=problem):
            read(path, model_dir)
    with pytest.raises(AdapterError, match=r"\(experts\) are not applied"):
        read(write(tmp_path / "dense", single), model_dir, parts=["dense"])
