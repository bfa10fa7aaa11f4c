"""What becomes of a checkpoint's tensors: packed bytes, shards of products, parts of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weft.contract.errors import ModelError
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.layers.attention import o_spec, qkv_spec
from weft.engine.model.layers.mlp import GatedMLP, down_spec, gate_up_spec
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.loader import load_model
from weft.engine.model.stage import ModelShare
from weft.engine.model.weights.checkpoint import Checkpoint
from weft.engine.model.weights.random_weights import RandomWeights
from weft.engine.model.weights.reader import ChangedWeights, CheckpointReader, TensorSlice
from weft.engine.model.weights.schemes.plain import PlainScheme
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec, Shard
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.linear.spec import LinearWeight, OneDnnForm
from weft.kernels.ops.moe.spec import ExpertWeights
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import (
    fuse_experts,
    make_tiny,
    save_weights,
    tiny_config,
    tiny_weights,
)

CPU = torch.device("cpu")
HIDDEN, INNER, HEADS, KV_HEADS, DIM = 72, 136, 6, 2, 24
EXPERTS, EXPERT_INNER = 7, 44
QKV = qkv_spec(HIDDEN, HEADS, KV_HEADS, DIM, bias=True)
O_PROJ = o_spec(HIDDEN, HEADS, DIM, bias=True)
GATE_UP = gate_up_spec(HIDDEN, INNER, bias=True)
DOWN = down_spec(HIDDEN, INNER, bias=True)


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def biased(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model", 5, attention_bias=True, mlp_bias=True)


def make_stacked(path: Path) -> Path:
    """A mixture of experts whose checkpoint has one tensor a projection."""
    config = tiny_config("qwen3_moe")
    weights = tiny_weights(config, 5)
    fuse_experts(config, weights)
    make_tiny("qwen3_moe", path, 5)
    save_weights(path, {name: tensor.contiguous() for name, tensor in weights.items()})
    return path


def open_weights(
    reader: CheckpointReader, shard: Shard | None = None, dtype: torch.dtype = torch.float32
) -> Weights:
    # Of other ranks, reading needs the number and the size alone.
    return Weights(reader, PlainScheme(), dtype, CPU, share=ModelShare(peers=shard))


def assert_alike(found: LinearWeight, expected: LinearWeight) -> None:
    assert (found.in_features, found.out_features) == (expected.in_features, expected.out_features)
    assert (found.gated, type(found.form)) == (expected.gated, type(expected.form))
    first, second = (
        w.data.to_dense() if isinstance(w.form, OneDnnForm) else w.data for w in (found, expected)
    )
    assert torch.equal(first, second)
    assert (found.bias is None) == (expected.bias is None)
    if found.bias is not None and expected.bias is not None:
        assert torch.equal(found.bias, expected.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["llama", "biased", "mistral", "qwen2", "qwen3", "qwen3_moe", "stacked"]
)
def test_packed_weights_are_those_of_a_plain_reading(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    if kind == "stacked":
        path = make_stacked(tmp_path / "model")
    elif kind == "biased":
        path = make_tiny("llama", tmp_path / "model", 5, attention_bias=True, mlp_bias=True)
    else:
        path = make_tiny(kind, tmp_path / "model", 5)
    tensors = {n: t.to(dtype) for n, t in load_file(path / "model.safetensors").items()}
    model = load_model(path, str(dtype).removeprefix("torch.")).model
    assert isinstance(model, DecoderOnlyLM)

    def product(prefix: str, *names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = torch.cat([tensors.pop(f"{prefix}.{name}.weight") for name in names])
        biases = [
            tensors.pop(f"{prefix}.{n}.bias") for n in names if f"{prefix}.{n}.bias" in tensors
        ]
        return weight, torch.cat(biases) if biases else None

    def taken(name: str) -> torch.Tensor:
        return tensors.pop(f"{name}.weight")

    for number, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        assert torch.equal(layer.input_norm.weight, taken(f"{prefix}.input_layernorm"))
        post = taken(f"{prefix}.post_attention_layernorm")
        assert torch.equal(layer.post_norm.weight, post)
        qkv = pack_linear(*product(attention, "q_proj", "k_proj", "v_proj"))
        assert_alike(layer.mixer.qkv_proj, qkv)
        assert_alike(layer.mixer.o_proj, pack_linear(*product(attention, "o_proj")))
        for name in ("q_norm", "k_norm"):
            norm = getattr(layer.mixer, name)
            if norm is not None:
                assert torch.equal(norm.weight, taken(f"{attention}.{name}"))
        if isinstance(layer.feed, GatedMLP):
            gate_up = pack_gate_up(*product(f"{prefix}.mlp", "gate_proj", "up_proj"))
            assert_alike(layer.feed.gate_up_proj, gate_up)
            down = pack_linear(*product(f"{prefix}.mlp", "down_proj"))
            assert_alike(layer.feed.down_proj, down)
            continue
        assert isinstance(layer.feed, SparseMLP)
        assert_alike(layer.feed.weight.router, pack_linear(taken(f"{prefix}.mlp.gate")))
        experts, below = layer.feed.weight.experts, f"{prefix}.mlp.experts"
        stacks = [tensors.pop(f"{below}.{n}", None) for n in ("gate_up_proj", "down_proj")]
        assert experts.num_experts == EXPERTS
        for expert, (w13, w2) in enumerate(zip(experts.w13, experts.w2, strict=True)):
            if stacks[0] is not None and stacks[1] is not None:
                assert_alike(w13, pack_gate_up(stacks[0][expert]))
                assert_alike(w2, pack_linear(stacks[1][expert]))
            else:
                names = ("gate_proj", "up_proj")
                assert_alike(w13, pack_gate_up(*product(f"{below}.{expert}", *names)))
                assert_alike(w2, pack_linear(*product(f"{below}.{expert}", "down_proj")))
    assert torch.equal(model.model.norm.weight, taken("model.norm"))
    assert torch.equal(model.model.embed_tokens, taken("model.embed_tokens"))
    assert_alike(model.lm_head.weight, pack_linear(taken("lm_head")))
    assert not tensors


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "spec"), [("self_attn", O_PROJ), ("mlp", GATE_UP), ("mlp", DOWN)])
def test_shards_of_a_product_put_together_are_the_whole(
    name: str, spec: LinearSpec, size: int, biased: Path
) -> None:
    if spec is O_PROJ:
        size = {4: 3, 8: 6}.get(size, size)
    with Checkpoint(biased) as file:
        weights = open_weights(file).at("model.layers.1").at(name)
        whole = [weights.read([part]) for part in spec.weights(Shard())]
        shards = [[weights.read([p]) for p in spec.weights(Shard(r, size))] for r in range(size)]
    axis = 0 if spec.split == "out" else 1
    for parts, expected in zip(zip(*shards, strict=True), whole, strict=True):
        assert {part.shape for part in parts} == {parts[0].shape}
        assert torch.equal(torch.cat(parts, axis), expected)


@pytest.mark.parametrize("size", [1, 2, 6])
def test_heads_stay_whole_and_few_kv_heads_are_repeated(size: int, biased: Path) -> None:
    tensors = load_file(biased / "model.safetensors")
    below = "model.layers.1.self_attn"
    q, k, v = (
        torch.cat(
            [tensors[f"{below}.{n}_proj.weight"], tensors[f"{below}.{n}_proj.bias"][:, None]], 1
        )
        for n in "qkv"
    )
    with Checkpoint(biased) as file:
        for rank in range(size):
            weights, shard = open_weights(file).at(below), Shard(rank, size)
            found = torch.cat(
                [weights.read(QKV.weights(shard)), weights.read(QKV.biases(shard))[:, None]], 1
            )
            heads = range(rank * HEADS // size, (rank + 1) * HEADS // size)
            # The heads of k and v that those of q attend to.
            kv_heads = sorted({head * KV_HEADS // HEADS for head in heads})
            wanted = [(q, heads), (k, kv_heads), (v, kv_heads)]
            expected = [one[h * DIM : (h + 1) * DIM] for one, which in wanted for h in which]
            assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_rows_that_a_checkpoint_keeps_by_head_are_read_by_kind(size: int, kv_heads: int) -> None:
    """Of each K and V head its queries, key and value follow one another."""
    heads, dim = 8, 6
    spec = qkv_spec(HIDDEN, heads, kv_heads, dim, fused="qkv", groups=kv_heads)
    plain = qkv_spec(HIDDEN, heads, kv_heads, dim, fused="qkv")
    by_kind = torch.randn(sum(spec.rows), HIDDEN)
    kinds = [part.view(kv_heads, -1, HIDDEN) for part in by_kind.split(list(spec.rows))]
    by_head = torch.cat(kinds, dim=1).flatten(0, 1)
    for rank in range(size):
        shard = Shard(rank, size)
        found = torch.cat([by_head[part.slices] for part in spec.weights(shard)])
        expected = torch.cat([by_kind[part.slices] for part in plain.weights(shard)])
        assert torch.equal(found, expected)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ModelError, match=r"144 .*24.* 4"):
        QKV.weights(Shard(0, 4))
    with pytest.raises(ModelError, match=r"144 .*24.* 12"):
        O_PROJ.weights(Shard(0, 12))
    with pytest.raises(ModelError, match=r"136 .* 3"):
        GATE_UP.weights(Shard(0, 3))


def test_results_of_shards_of_the_input_add_up_to_those_of_the_whole(biased: Path) -> None:
    x = torch.randn(5, INNER, generator=torch.Generator().manual_seed(1))
    with Checkpoint(biased) as file:
        below = "model.layers.0.mlp"
        whole = linear(x, open_weights(file).at(below).linear(DOWN))
        parts = [
            linear(part.contiguous(), open_weights(file, Shard(rank, 2)).at(below).linear(DOWN))
            for rank, part in enumerate(x.chunk(2, 1))
        ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_shards_of_experts_are_packed_from_shards_of_each(is_stacked: bool, tmp_path: Path) -> None:
    plain = make_tiny("qwen3_moe", tmp_path / "plain", 5)
    tensors = load_file(plain / "model.safetensors")
    spec = ExpertSpec(
        num_experts=EXPERTS,
        gate_up=gate_up_spec(HIDDEN, EXPERT_INNER),
        down=down_spec(HIDDEN, EXPERT_INNER),
    )
    below = "model.layers.2.mlp.experts"
    for rank in range(2):
        with Checkpoint(make_stacked(tmp_path / "stacked") if is_stacked else plain) as file:
            packed = open_weights(file, Shard(rank, 2)).at(below).experts(spec)
        assert isinstance(packed, ExpertWeights)
        assert packed.inner_size == EXPERT_INNER // 2
        own = slice(rank * EXPERT_INNER // 2, (rank + 1) * EXPERT_INNER // 2)
        for number in range(EXPERTS):
            gate, up, down = (
                tensors[f"{below}.{number}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            assert_alike(packed.w13[number], pack_gate_up(torch.cat([gate[own], up[own]])))
            assert_alike(packed.w2[number], pack_linear(down[:, own]))


def test_made_up_shards_are_cut_from_the_same_whole() -> None:
    def read(shard: Shard) -> torch.Tensor:
        return open_weights(RandomWeights(CPU), shard).read(DOWN.weights(shard))

    assert torch.equal(torch.cat([read(Shard(rank, 2)) for rank in range(2)], 1), read(Shard()))


def test_a_part_of_a_changed_tensor_has_its_part_of_the_change(biased: Path) -> None:
    name, change = "model.layers.0.mlp.up_proj.weight", torch.randn(INNER, HIDDEN)
    part = TensorSlice(name, (INNER, HIDDEN), (slice(3, 9), slice(10, 70)))
    expected = load_file(biased / "model.safetensors")[name][3:9, 10:70] + change[3:9, 10:70]
    with Checkpoint(biased) as file:
        assert torch.equal(
            open_weights(ChangedWeights(file, {name: change})).read([part]), expected
        )


def test_a_tensor_counts_as_read_with_its_first_part(tmp_path: Path) -> None:
    tmp_path.joinpath("m").mkdir()
    save_weights(tmp_path / "m", {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2)})
    part = TensorSlice("a", (3, 4), (1, slice(2, 4)))
    assert part.size == (2,)
    with Checkpoint(tmp_path / "m") as file:
        assert open_weights(file).read([part]).tolist() == [6.0, 7.0]
        with pytest.raises(ModelError, match=r"does not use: b$"):
            file.finish()
        open_weights(file).read([TensorSlice("b", (2,))])
        file.finish()


def test_whole_numbers_and_floats_are_not_taken_for_each_other(tmp_path: Path) -> None:
    tmp_path.joinpath("m").mkdir()
    save_weights(tmp_path / "m", {"n": torch.tensor([True, False]), "x": torch.ones(2)})
    with Checkpoint(tmp_path / "m") as file:
        weights = open_weights(file)
        assert weights.table("n", 2).tolist() == [1, 0]
        with pytest.raises(ModelError, match="n is BOOL; only F32"):
            weights.read([TensorSlice("n", (2,))])
        with pytest.raises(ModelError, match="x is F32; only I64"):
            weights.table("x", 2)
