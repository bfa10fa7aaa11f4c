"""Loading of weights: names, shapes, dtypes, files, digests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weft.checkpoint import architectures, digest
from weft.checkpoint.dtypes import cpu_has_fast_bfloat16, resolve_dtype
from weft.checkpoint.quantization import AT_LOAD, resolve_quantization
from weft.contract.errors import ConfigError, ModelError
from weft.engine.model import loader
from weft.engine.model.archs.decoder import Decoder
from weft.engine.model.loader import LoadedModel, load_model
from weft.engine.model.stage import ModelShare, Stage
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny, save_weights

TOKENS = [5, 99, 12, 300, 41]


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's file digests are kept."""
    monkeypatch.setattr(digest, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "digests"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model", seed=int.from_bytes(os.urandom(3), "little"))


def logits(loaded: LoadedModel) -> torch.Tensor:
    return PagedDriver(loaded.model, 4).step([(PagedRequest(), TOKENS)])


def rewrite(model_dir: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Adds or replaces tensors of the checkpoint; None removes one."""
    weights = {**load_file(model_dir / "model.safetensors"), **change}
    save_weights(model_dir, {name: t for name, t in weights.items() if t is not None})


def edit_config(model_dir: Path, **fields: object) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_shards_give_the_same_model_as_one_file(tmp_path: Path) -> None:
    one = make_tiny("llama", tmp_path / "one", 3)
    many = make_tiny("llama", tmp_path / "many", 3, shards=4)
    assert torch.equal(
        logits(load_model(one, "float32")),
        logits(load_model(many, "float32")),
    )


def test_progress_counts_every_byte_of_the_weights(model_dir: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(model_dir, "float32", progress=lambda done, total: calls.append((done, total)))
    weights = load_file(model_dir / "model.safetensors")
    total = sum(tensor.nbytes for tensor in weights.values())
    assert calls[-1] == (total, total)
    assert {seen for _, seen in calls} == {total}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) >= len(weights)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_dtype_asked_for(model_dir: Path, stored: torch.dtype) -> None:
    weights = load_file(model_dir / "model.safetensors")
    narrow = {name: tensor.to(stored) for name, tensor in weights.items()}
    save_weights(model_dir, narrow)
    from_narrow = logits(load_model(model_dir, "float32"))
    save_weights(model_dir, {name: tensor.float() for name, tensor in narrow.items()})
    assert torch.equal(from_narrow, logits(load_model(model_dir, "float32")))


def test_bfloat16_stays_near_float32(model_dir: Path) -> None:
    wide, narrow = load_model(model_dir, "float32"), load_model(model_dir, "bfloat16")
    assert narrow.model.kv_layout(8).plane.dtype == "bfloat16"
    expected, found = logits(wide), logits(narrow)
    assert found.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(expected, found, dim=-1).min() > 0.999


def test_missing_tensors_are_all_named(model_dir: Path) -> None:
    lost = ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"]
    rewrite(model_dir, dict.fromkeys(lost))
    with pytest.raises(ModelError) as caught:
        load_model(model_dir, "float32")
    assert all(name in caught.value.message for name in lost)


def test_a_checkpoint_with_far_too_few_layers_is_refused_at_once(model_dir: Path) -> None:
    edit_config(model_dir, num_hidden_layers=10**6)
    with pytest.raises(ModelError, match=r"layers\.3\.input_layernorm\.weight.* and more"):
        load_model(model_dir, "float32")


def test_left_over_tensors_are_named(model_dir: Path) -> None:
    rewrite(model_dir, {"model.layers.3.mlp.up_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(ModelError, match=r"model\.layers\.3\.mlp\.up_proj\.weight"):
        load_model(model_dir, "float32")


def test_rotary_buffers_of_old_checkpoints_are_ignored(model_dir: Path) -> None:
    rewrite(model_dir, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(12)})
    load_model(model_dir, "float32")


def test_a_wrong_shape_names_tensor_and_both_shapes(model_dir: Path) -> None:
    rewrite(model_dir, {"model.layers.2.mlp.down_proj.weight": torch.zeros(72, 135)})
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.down_proj.*\(72, 135\).*\(72, 136\)"):
        load_model(model_dir, "float32")


def test_a_quantised_tensor_is_refused(model_dir: Path) -> None:
    rewrite(model_dir, {"model.norm.weight": torch.zeros(72, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is I8"):
        load_model(model_dir, "float32")


def test_a_tied_model_ignores_a_stored_copy_and_an_untied_one_needs_it(tmp_path: Path) -> None:
    tied = make_tiny("llama", tmp_path / "tied", 1, tie_word_embeddings=True)
    expected = logits(load_model(tied, "float32"))
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tied, {"lm_head.weight": embedding.clone()})
    assert torch.equal(logits(load_model(tied, "float32")), expected)
    # A head of its own was trained, and the flag forgotten.
    rewrite(tied, {"lm_head.weight": torch.randn(517, 72)})
    with pytest.raises(ModelError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        load_model(tied, "float32")
    bare = make_tiny("llama", tmp_path / "bare", 1, tie_word_embeddings=True)
    tensors = load_file(bare / "model.safetensors")
    changes: dict[str, torch.Tensor | None] = dict.fromkeys(tensors)
    changes |= {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    rewrite(bare, {**changes, "lm_head.weight": torch.randn(517, 72)})
    with pytest.raises(ModelError, match=r"lm_head\.weight is not embed_tokens\.weight"):
        load_model(bare, "float32")
    rewrite(tied, {"lm_head.weight": None})
    edit_config(tied, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_model(tied, "float32")


@pytest.mark.parametrize("keep", [0, 5, 2000])
def test_a_cut_file_is_refused(model_dir: Path, keep: int) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(model_dir, "float32")


def test_a_directory_without_weights_is_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="only safetensors"):
        load_model(model_dir, "float32")


def test_weights_of_both_kinds_in_a_directory_are_refused(model_dir: Path) -> None:
    (model_dir / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="a folder of its own"):
        load_model(model_dir, "float32")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not an index"),
        ('{"weight_map": [1]}', "not an index"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not a plain file name"),
        ('{"weight_map": {"a": "model-9.safetensors"}}', "remove the one that is not meant"),
        (
            '{"weight_map": {"a": "model.safetensors", "b": "model-9.safetensors"}}',
            "not there: model-9",
        ),
        ('{"weight_map": {"a": "' + "x" * 5000 + '"}}', "not a plain file name"),
    ],
)
def test_a_bad_index_is_refused(model_dir: Path, index: str, message: str) -> None:
    (model_dir / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=message):
        load_model(model_dir, "float32")


def test_weights_that_are_written_in_place_have_another_digest(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where their times are kept, as by `rsync --inplace --times`, in any part of a file."""
    path = model_dir / "model.safetensors"
    monkeypatch.setattr(digest, "_PART_BYTES", path.stat().st_size // 3)
    before, stat = load_model(model_dir, "float32").digest, path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\x3f")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert load_model(model_dir, "float32").digest != before


def test_the_digest_follows_weights_configuration_and_dtype(model_dir: Path) -> None:
    first = load_model(model_dir, "float32").digest
    assert len(first) == 32
    assert load_model(model_dir, "float32").digest == first
    assert load_model(model_dir, "bfloat16").digest != first
    weights = load_file(model_dir / "model.safetensors")
    norm = weights["model.norm.weight"]
    rewrite(model_dir, {"model.norm.weight": norm.nextafter(norm + 1)})
    assert load_model(model_dir, "float32").digest != first
    rewrite(model_dir, {"model.norm.weight": norm})
    assert load_model(model_dir, "float32").digest == first
    edit_config(model_dir, rms_norm_eps=2e-5)
    assert load_model(model_dir, "float32").digest != first


def test_file_digests_are_read_from_the_cache_and_survive_its_damage(
    model_dir: Path, own_records: Path
) -> None:
    first = load_model(model_dir, "float32").digest
    (record,) = own_records.iterdir()
    stored = json.loads(record.read_text())
    record.write_text(json.dumps({**stored, "digest": "00" * 32}))
    assert load_model(model_dir, "float32").digest != first, "the record was not used"
    for damage in ("", "[]", '{"key": 1}', json.dumps({**stored, "digest": "xy"})):
        record.write_text(damage)
        assert load_model(model_dir, "float32").digest == first


def test_made_up_weights_need_no_checkpoint(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    one, two = (load_model(model_dir, "float32", dummy=True) for _ in range(2))
    assert one.digest == two.digest
    assert torch.equal(logits(one), logits(two))
    assert logits(one).isfinite().all()


@pytest.mark.parametrize("form", AT_LOAD)
def test_made_up_weights_are_quantised_in_stages(
    form: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU can hold FP8, which is refused there because it is slow.
    any_device = lambda asked, found, _: resolve_quantization(asked, found)  # noqa: E731
    monkeypatch.setattr(loader, "resolve_quantization", any_device)
    found = [
        load_model(
            model_dir, "float32", quantization=form, share=ModelShare(stage=stage), dummy=True
        ).digest
        for stage in (None, Stage(0, 2, range(1)), Stage(1, 2, range(1, 2)))
    ]
    assert len(set(found)) == 1


def test_an_unknown_architecture_is_refused_with_those_supported(model_dir: Path) -> None:
    edit_config(model_dir, architectures=["BloomForCausalLM"])
    with pytest.raises(ModelError, match=r"BloomForCausalLM.*LlamaForCausalLM"):
        load_model(model_dir, "float32")


def test_other_distributions_add_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("Mine", "weft.engine.model.archs.decoder:Decoder", "weft.models"),
        EntryPoint("Broken", "weft.engine.model.archs.decoder:Missing", "weft.models"),
    ]
    monkeypatch.setattr(architectures, "entry_points", lambda group: points)
    assert architectures.load_class("Mine") is Decoder
    assert {"Mine", "Qwen3ForCausalLM"} <= set(architectures.supported_architectures())
    with pytest.raises(ModelError, match="Broken"):
        architectures.load_class("Broken")


def test_dtypes_are_resolved_by_device_and_checked(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    for flags in ("avx512_bf16", "avx2"):
        fast.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} ssse3\n")
        assert cpu_has_fast_bfloat16(fast)
    slow.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512f ssse3 notavx512_bf16\n")
    assert not cpu_has_fast_bfloat16(slow)
    assert not cpu_has_fast_bfloat16(tmp_path / "absent")
    assert resolve_dtype("auto", "cuda:0") == "bfloat16"
    assert resolve_dtype("auto", "cpu") in ("bfloat16", "float32")
    assert resolve_dtype("float16", "cuda") == "float16"
    for bad in ("float16", "int8", ""):
        with pytest.raises(ConfigError, match="dtype"):
            resolve_dtype(bad, "cpu")
