"""Adapters that are damaged, hostile or not supported are refused, by an error that says where."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from weft.checkpoint.adapters.digest import adapter_digest
from weft.checkpoint.adapters.files import open_adapter
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import AdapterError, error_class
from weft.engine.model.adapters.formats import read_adapter
from weft.testing.models.tiny_adapters import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    adapter_tensors,
    make_adapter,
    write_adapter,
)
from weft.testing.models.tiny_models import tiny_config

CONFIG = tiny_config("llama")
MODEL = ModelConfig.from_dict(CONFIG)
NAME = f"{PREFIX}model.layers.1.self_attn.q_proj.lora_A.weight"
OTHER = NAME.replace("lora_A", "lora_B")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return make_adapter(tmp_path / "adapter", CONFIG, seed)


def read(directory: Path, **options: Any) -> Any:
    return read_adapter(directory, MODEL, **{"max_rank": 64, **options})


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(AdapterError) as caught:
        read(directory, **options)
    assert str(directory) in caught.value.message
    return caught.value.message


def change_tensors(directory: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(directory / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, directory / WEIGHTS_FILE)


def change_config(directory: Path, **settings: Any) -> None:
    config = json.loads((directory / CONFIG_FILE).read_text())
    (directory / CONFIG_FILE).write_text(json.dumps({**config, **settings}))


def change_header(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / WEIGHTS_FILE
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def test_the_error_is_the_callers_and_crosses_wires() -> None:
    assert error_class("ADAPTER_INVALID") is AdapterError
    assert (AdapterError.grpc_code, AdapterError.http_status) == ("INVALID_ARGUMENT", 400)
    assert not AdapterError.retryable


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file(adapter_dir: Path, share: float) -> None:
    path = adapter_dir / WEIGHTS_FILE
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert "truncated" in refusal(adapter_dir) or "header of" in refusal(adapter_dir)
    with pytest.raises(AdapterError):
        adapter_digest(adapter_dir)


def test_a_header_that_is_absurd(adapter_dir: Path) -> None:
    path = adapter_dir / WEIGHTS_FILE
    data = path.read_bytes()
    path.write_bytes((1 << 62).to_bytes(8, "little") + data[8:])
    assert "header of 4611686018427387904 bytes" in refusal(adapter_dir)
    path.write_bytes((5).to_bytes(8, "little") + data[8:])
    assert "not JSON" in refusal(adapter_dir)
    path.write_bytes((50_000).to_bytes(8, "little") + b"[" * 50_000 + data)
    assert "not JSON" in refusal(adapter_dir)
    path.write_bytes((2).to_bytes(8, "little") + b"[]")
    assert "not a JSON object" in refusal(adapter_dir)


def test_a_tensor_of_absurd_size(adapter_dir: Path) -> None:
    def huge(header: dict[str, Any]) -> None:
        header[NAME]["shape"] = [1 << 40, 1 << 40]

    change_header(adapter_dir, huge)
    message = refusal(adapter_dir)
    assert NAME in message
    assert str(4 << 80) in message


def test_a_tensor_of_many_long_sizes_is_not_multiplied_out(adapter_dir: Path) -> None:
    def huge(header: dict[str, Any]) -> None:
        header[NAME]["shape"] = [10**4000] * 500

    change_header(adapter_dir, huge)
    began = time.thread_time()
    assert "malformed" in refusal(adapter_dir)
    assert time.thread_time() - began < 5.0


def test_a_long_name_of_a_tensor(adapter_dir: Path) -> None:
    def long(header: dict[str, Any]) -> None:
        header["x" * 100_000] = header.pop(NAME)

    change_header(adapter_dir, long)
    message = refusal(adapter_dir)
    assert "100000 characters" in message
    assert len(message) < 1_000


@pytest.mark.parametrize(
    "fields", [{"layers_to_transform": 0}, {"target_modules": []}, {"target_modules": ""}]
)
def test_what_means_something_else_has_another_digest(
    adapter_dir: Path, fields: dict[str, Any]
) -> None:
    change_config(adapter_dir, layers_to_transform=None, target_modules=None)
    plain = adapter_digest(adapter_dir, is_lenient=True)
    change_config(adapter_dir, **fields)
    assert adapter_digest(adapter_dir, is_lenient=True) != plain


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [], "data_offsets": [0, 8]},
    ],
)
def test_a_malformed_entry_of_the_header(adapter_dir: Path, entry: Any) -> None:
    change_header(adapter_dir, lambda header: header.update({NAME: entry}))
    assert NAME in refusal(adapter_dir)


def test_tensors_that_overlap_or_leave_holes(adapter_dir: Path) -> None:
    def overlap(header: dict[str, Any]) -> None:
        header[NAME]["data_offsets"] = next(
            entry["data_offsets"]
            for name, entry in header.items()
            if name != NAME and entry.get("shape") == header[NAME]["shape"]
        )

    path = adapter_dir / WEIGHTS_FILE
    data = path.read_bytes()
    change_header(adapter_dir, overlap)
    assert "does not begin where" in refusal(adapter_dir)
    path.write_bytes(data + b"more")
    assert "4 bytes that belong to no tensor" in refusal(adapter_dir)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [NAME, OTHER])
def test_numbers_that_are_not_finite(adapter_dir: Path, name: str, number: float) -> None:
    def poison(tensors: Tensors) -> None:
        tensors[name][-1, -1] = number

    change_tensors(adapter_dir, poison)
    message = refusal(adapter_dir)
    assert name in message
    assert "NaN or infinite numbers, as stored" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_are_taken_and_what_is_beyond_is_not(
    adapter_dir: Path, dtype: torch.dtype
) -> None:
    most = torch.finfo(dtype).max
    for numbers in ([most, -most], [-torch.nan, 1.0], [1.0, -torch.inf], [torch.inf, 1.0]):

        def put(tensors: Tensors, numbers: list[float] = numbers) -> None:
            tensors[NAME] = tensors[NAME].to(dtype)
            tensors[NAME][-1, -2:] = torch.tensor(numbers)

        change_tensors(adapter_dir, put)
        if numbers[0] == most:
            assert read(adapter_dir, dtype=dtype).rank == 8
        else:
            assert "NaN or infinite numbers, as stored" in refusal(adapter_dir, dtype=dtype)


def test_numbers_that_overflow_when_scaled(adapter_dir: Path) -> None:
    def enlarge(tensors: Tensors) -> None:
        tensors[OTHER][0, 0] = 6e4

    change_tensors(adapter_dir, enlarge)
    assert read(adapter_dir).rank == 8
    assert "as scaled" in refusal(adapter_dir, dtype=torch.float16)


@pytest.mark.parametrize("half", [NAME, OTHER])
def test_a_missing_half(adapter_dir: Path, half: str) -> None:
    change_tensors(adapter_dir, lambda tensors: tensors.__delitem__(half))
    message = refusal(adapter_dir)
    assert ({NAME, OTHER} - {half}).pop() in message
    assert f"lora_{'A' if half == NAME else 'B'}, is missing" in message


def test_shapes_that_do_not_fit_the_model(adapter_dir: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        tensors[NAME] = tensors[NAME][:, 1:].contiguous()

    change_tensors(adapter_dir, narrow)
    message = refusal(adapter_dir)
    assert NAME in message
    assert "(8, 71)" in message
    assert "(8, 72)" in message


def test_shapes_that_do_not_fit_each_other(adapter_dir: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        tensors[OTHER] = tensors[OTHER][:, :7].contiguous()

    change_tensors(adapter_dir, narrow)
    assert OTHER in refusal(adapter_dir)


def test_ranks_that_do_not_fit_the_configuration_or_the_limit(adapter_dir: Path) -> None:
    assert "rank 8, more than max_lora_rank 7" in refusal(adapter_dir, max_rank=7)
    change_config(adapter_dir, rank_pattern={"layers.1.self_attn.q_proj": 16})
    assert f"{NAME} has rank 8, adapter_config.json says 16" in refusal(adapter_dir)


def test_dtypes_that_are_not_floats(adapter_dir: Path) -> None:
    change_tensors(adapter_dir, lambda t: t.update({NAME: t[NAME].to(torch.int32)}))
    assert f"{NAME} is I32" in refusal(adapter_dir)


@pytest.mark.parametrize("file", [WEIGHTS_FILE, CONFIG_FILE])
def test_files_that_lie_elsewhere(adapter_dir: Path, tmp_path: Path, file: str) -> None:
    path = adapter_dir / file
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert "outside the directory" in refusal(adapter_dir)
    path.unlink()
    path.symlink_to("../adapter/../outside")
    assert "outside the directory" in refusal(adapter_dir)
    path.unlink()
    path.symlink_to(path.name)
    assert "cannot open" in refusal(adapter_dir)
    path.unlink()
    assert f"{file} is missing" in refusal(adapter_dir)
    os.mkfifo(path)
    assert "not a regular file" in refusal(adapter_dir)


def test_links_inside_the_directory_are_followed(adapter_dir: Path) -> None:
    path = adapter_dir / WEIGHTS_FILE
    path.rename(adapter_dir / "weights")
    path.symlink_to("weights")
    assert read(adapter_dir).rank == 8


def test_directories_that_are_none(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "absent")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / CONFIG_FILE).write_text("{}")
    (tmp_path / "pickle" / "adapter_model.bin").write_bytes(b"")
    assert "is a pickle" in refusal(tmp_path / "pickle")


def test_configurations_that_are_malformed(adapter_dir: Path) -> None:
    path = adapter_dir / CONFIG_FILE
    text = path.read_text()
    for damaged in ("", "{", "[]", "null", "\x00", '{"r": ' + "[" * 10_000):
        path.write_text(damaged)
        assert CONFIG_FILE in refusal(adapter_dir)
    path.write_bytes(b"\xff\xfe\x00\x80")
    assert CONFIG_FILE in refusal(adapter_dir)
    path.write_text(text + " " * (2 << 20))
    assert "more than 2097152" in refusal(adapter_dir)
    path.write_text(text)
    assert read(adapter_dir).rank == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("r", 0),
        ("r", "8"),
        ("r", True),
        ("lora_alpha", None),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 10**400),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": -1}),
        ("rank_pattern", {"(": 4}),
        ("alpha_pattern", {"q_proj": "much"}),
        ("target_modules", [1]),
        ("target_modules", "(a+)+$"),
        ("target_modules", "(a|a)*b"),
        ("target_modules", "[a" * 3000),
        ("target_modules", "(?:q_proj){e<=1}"),
        ("alpha_pattern", {"[[:alpha:]]+_proj": 3}),
        ("layers_to_transform", ["1"]),
        ("use_dora", True),
        ("lora_bias", True),
        ("alora_invocation_tokens", [1, 2]),
    ],
)
def test_fields_that_are_wrong_or_not_supported(
    adapter_dir: Path, field: str, value: object
) -> None:
    change_config(adapter_dir, **{field: value})
    with pytest.raises(AdapterError, match=f"adapter_config.json: {field}: ") as caught:
        read(adapter_dir, is_lenient=True)
    assert caught.value.param == field


def test_dora_is_refused_by_its_tensors_too(adapter_dir: Path) -> None:
    name = NAME.replace("lora_A.weight", "lora_magnitude_vector")
    change_tensors(adapter_dir, lambda tensors: tensors.update({name: torch.ones(144)}))
    message = refusal(adapter_dir, is_lenient=True)
    assert name in message
    assert "DoRA" in message


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}model.layers.3.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}model.layers.1.self_attn.z_proj.lora_A.weight",
        f"{PREFIX}model.layers.1.self_attn.q_proj.lora_B.bias",
        f"{PREFIX}model.layers.1.self_attn.q_proj.base_layer.bias",
        f"{PREFIX}model.layers.1.input_layernorm.weight",
        f"{PREFIX}model.layers.1.mlp.experts.0.gate_proj.lora_A.weight",
        f"{PREFIX}score.weight",
        "something",
    ],
)
def test_what_is_not_applied_fails_the_load_unless_it_is_lenient(
    adapter_dir: Path, name: str
) -> None:
    complete = read(adapter_dir)
    change_tensors(adapter_dir, lambda tensors: tensors.update({name: torch.zeros(8, 72)}))
    assert f"tensor {name}: " in refusal(adapter_dir)
    adapter = read(adapter_dir, is_lenient=True)
    assert adapter.ignored == (name,)
    assert adapter.modules.keys() == complete.modules.keys()


def test_modules_that_the_configuration_does_not_target(adapter_dir: Path) -> None:
    change_config(adapter_dir, exclude_modules=["layers.1.self_attn.q_proj"])
    message = refusal(adapter_dir)
    assert NAME in message
    assert "does not target" in message
    assert set(read(adapter_dir, is_lenient=True).ignored) == {NAME, OTHER}


def test_one_projection_under_two_names(tmp_path: Path) -> None:
    tensors = adapter_tensors(CONFIG, 1)
    for half in ("A", "B"):
        name = f"layers.1.self_attn.q_proj.lora_{half}.weight"
        tensors[name] = tensors[f"{PREFIX}model.{name}"].clone()
    path = write_adapter(tmp_path / "twice", tensors)
    assert "change the same projection" in refusal(path)


def test_an_adapter_without_tensors(tmp_path: Path) -> None:
    assert "no tensors" in refusal(write_adapter(tmp_path / "empty", {}))


def test_files_that_change_while_they_are_read(adapter_dir: Path) -> None:
    path = adapter_dir / WEIGHTS_FILE
    with open_adapter(adapter_dir) as files:
        files.check_unchanged()
        os.truncate(path, 9000)
        last = max(files.tensors.values(), key=lambda entry: entry.end)
        with pytest.raises(AdapterError, match="ended at byte"):
            files.read(last)
        with pytest.raises(AdapterError, match="was changed while it was read"):
            files.check_unchanged()


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_damaged_nothing_but_a_refusal_comes(
    small_adapter: Path, data: st.DataObject
) -> None:
    """Bytes are changed, dropped or put in: mostly in the header, and in the configuration."""
    name = data.draw(st.sampled_from([WEIGHTS_FILE, CONFIG_FILE]))
    path = small_adapter / name
    original = path.read_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, min(len(damaged), 600)))
        end = data.draw(st.integers(start, min(start + 8, len(damaged))))
        damaged[start:end] = data.draw(st.binary(max_size=8))
    path.write_bytes(damaged)
    try:
        with suppress(AdapterError):
            adapter = read(small_adapter)
            assert all(torch.isfinite(pair.b).all() for pair in adapter.modules.values())
    finally:
        path.write_bytes(original)


@pytest.fixture(scope="module")
def small_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return make_adapter(folder, CONFIG, 1, targets=["v_proj"], layers=[0])
