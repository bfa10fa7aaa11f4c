"""GGUF files against transformers on their numbers in floats."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from weft.checkpoint import demo, gguf_folder
from weft.checkpoint.files import GGUF_FILE
from weft.checkpoint.gguf_metadata import GgufMetadata
from weft.checkpoint.gguf_tokenizer import tokenizer_files
from weft.checkpoint.resolve import resolve_model
from weft.contract.errors import ModelError
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.layers.attention import Attention
from weft.engine.model.loader import LoadedModel, load_model
from weft.engine.model.weights.gguf_file import GgufFile
from weft.engine.model.weights.reader import TensorSlice
from weft.kernels.ops.linear.spec import NativeForm
from weft.testing.models.choices import check_choices
from weft.testing.models.gguf_models import (
    SIZES,
    gguf_models,
    source_tokenizer,
    write_layer,
    write_tokenizer,
)
from weft.testing.models.paging import PagedDriver
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny

CASES = {
    "Q4_0": ("llama", {"_proj.weight": "Q4_0", "embed_tokens.weight": "Q8_0"}),
    "Q4_K and Q6_K": (
        "llama",
        {"v_proj.weight": "Q6_K", "_proj.weight": "Q4_K", "embed_tokens.weight": "Q6_K"},
    ),
    "Q4_1": ("qwen3", {"_proj.weight": "Q4_1", "embed_tokens.weight": "F16"}),
    "Q8_0": ("qwen2", {"_proj.weight": "Q8_0", "embed_tokens.weight": "BF16"}),
    "Q4_0, Q4_1 and Q8_0 in a product": (
        "llama",
        {"q_proj.weight": "Q4_0", "k_proj.weight": "Q4_1", "v_proj.weight": "Q8_0"},
    ),
    "Q4_0 and Q4_1 in a product": (
        "llama",
        {"q_proj.weight": "Q4_0", "k_proj.weight": "Q4_1", "v_proj.weight": "Q4_0"},
    ),
    "Q5_0, Q5_1 and Q5_K": (
        "llama",
        {"q_proj.weight": "Q5_0", "k_proj.weight": "Q5_1", "_proj.weight": "Q5_K"},
    ),
    "Q2_K, Q3_K, IQ4_NL and IQ4_XS": (
        "qwen3",
        {
            "o_proj.weight": "Q2_K",
            "down_proj.weight": "Q3_K",
            "v_proj.weight": "IQ4_NL",
            "_proj.weight": "IQ4_XS",
        },
    ),
    "experts in Q4_K and Q6_K": (
        "qwen3_moe",
        {"down_proj.weight": "Q6_K", "_proj.weight": "Q4_K"},
    ),
    "experts in Q4_0 and MXFP4": (
        "qwen3_moe",
        {"self_attn.o_proj.weight": "Q4_0", "_proj.weight": "MXFP4"},
    ),
    "floats": ("llama", {"o_proj.weight": "F16", "_proj.weight": "BF16"}),
}
IN_EVERY_RUN = (
    *("Q4_0", "Q4_K and Q6_K", "Q4_1", "Q5_0, Q5_1 and Q5_K"),
    *("Q2_K, Q3_K, IQ4_NL and IQ4_XS", "experts in Q4_0 and MXFP4"),
)


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of the files goes here; what was compiled is found where it was."""
    for module in ("gguf_folder",):
        monkeypatch.setattr(f"weft.checkpoint.{module}.cache_folder", lambda: tmp_path / "cache")


def make(kind: str, types: dict[str, str], tmp_path: Path, **fields: object) -> tuple[Path, Path]:
    sizes = SIZES | fields
    source = make_tiny(kind, tmp_path / "source", random.randrange(10**6), **sizes)
    return gguf_models(source, tmp_path / "tiny.gguf", types)


def load(path: Path) -> LoadedModel:
    return load_model(resolve_model(str(path)), "float32")


def check_greedy(loaded: LoadedModel, floats: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = [random.randrange(3, 500) for _ in range(33)]
    (tokens,) = PagedDriver(loaded.model, num_pages=64).greedy([prompt], 40)
    reference = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    check_choices(logits[len(prompt) - 1 :], tokens)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in IN_EVERY_RUN else pytest.mark.full) for n in CASES],
)
def test_types(name: str, tmp_path: Path) -> None:
    kind, types = CASES[name]
    path, floats = make(kind, types, tmp_path)
    loaded = load(path)
    assert loaded.described_format.endswith("; file: gguf")
    check_greedy(loaded, floats)


def test_integers_stay_integers(tmp_path: Path) -> None:
    path, _ = make("llama", CASES["Q4_0, Q4_1 and Q8_0 in a product"][1], tmp_path)
    model = load(path).model
    assert isinstance(model, DecoderOnlyLM)
    mixer = model.model.layers[0].mixer
    assert isinstance(mixer, Attention)
    form = mixer.qkv_proj.form
    if isinstance(form, NativeForm):
        assert (form.struct.bits, form.struct.group) == (8, 32)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K", "IQ4_XS", "Q6_K"])
def test_value_heads_of_qwen35_get_the_models_order(kind: str, tmp_path: Path) -> None:
    """The file has the first value head of each of 4 key heads, then the second of each."""
    keys, shared, dim, state = 4, 2, 32, 8
    of_file = [r * keys + k for k in range(keys) for r in range(shared)]
    rows = [dim * head + n for head in of_file for n in range(dim)]
    first = [*range(2 * keys * state)]
    orders = {
        "attn_qkv": ("in_proj_qkv", first + [len(first) + row for row in rows], None),
        "attn_gate": ("in_proj_z", rows, None),
        "ssm_beta": ("in_proj_b", of_file, None),
        "ssm_out": ("out_proj", None, rows),
    }
    sizes = {"group_count": keys, "state_size": state, "time_step_rank": keys * shared}
    numbers = sizes | {"inner_size": keys * shared * dim}
    names = {own: len(rows or range(256)) for own, (_, rows, _) in orders.items()}
    written = write_layer(tmp_path / GGUF_FILE, "qwen35", kind, numbers, names)
    with GgufFile(tmp_path) as file:
        for own, (name, rows_of, columns_of) in orders.items():
            full = f"model.layers.0.linear_attn.{name}.weight"
            expected = torch.from_numpy(written[own])
            expected = expected if rows_of is None else expected[rows_of]
            expected = expected if columns_of is None else expected[:, columns_of]
            found = torch.empty_like(expected)
            file.read_into(TensorSlice(full, tuple(found.shape)), found)
            assert torch.equal(found, expected)
            groups = file.groups(full)
            assert (groups is None) == (kind in ("F32", "Q6_K"))
            if groups is not None:
                scales = groups.scales.repeat_interleave(32, dim=1)
                values = groups.numbers * scales
                if groups.offsets is not None:
                    values += groups.offsets.repeat_interleave(32, dim=1)
                assert torch.allclose(values, expected, rtol=1e-5, atol=1e-6)
        file.finish()


def test_one_of_many_first_readers_makes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = make("llama", CASES["Q8_0"][1], tmp_path)
    written: list[Path] = []
    write = gguf_folder._write

    def counted(path: Path, folder: Path) -> None:
        written.append(folder)
        write(path, folder)

    monkeypatch.setattr(gguf_folder, "_write", counted)
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(gguf_folder.gguf_folder, [path] * 8))
    (folder,) = folders
    assert len(written) == 1
    assert (folder / "config.json").is_file()
    assert [name for name in folder.parent.iterdir() if name.name.startswith(".tmp")] == []


def test_a_head_of_its_own(tmp_path: Path) -> None:
    types = {"_proj.weight": "Q4_0", "lm_head.weight": "Q8_0"}
    path, floats = make("llama", types, tmp_path, tie_word_embeddings=False)
    check_greedy(load(path), floats)


def test_the_tokenizer_is_that_of_the_file(tmp_path: Path) -> None:
    path, _ = make("llama", {}, tmp_path)
    folder = resolve_model(str(path))
    assert folder.name == "tiny"
    ours, theirs = Tokenizer.from_file(str(folder / "tokenizer.json")), source_tokenizer(path)
    for text in ("def f(x):\n    return 12345 + x", "  Grüße, 世界! ", "a<|end|>b"):
        ids = ours.encode(text).ids
        assert ids == [0, *theirs.encode(text).ids]
        assert ours.decode(ids[1:], skip_special_tokens=False) == text
    assert resolve_model(str(path)) == folder


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "IT'S 12345+x", "IT|'|S| 12345|+|x"),
        ("olmo", "it's  12\n\n x", "it|'s| | 12|\n\n| x"),
        ("refact", "it's 123", "it|'s| |1|2|3"),
        ("command-r", "a 1b22", "a| |1|b|2|2"),
        ("glm4", "IT'S 12345+x\n\ny", "IT|'S| |123|45|+x|\n\n|y"),
        ("hunyuan", "a\nb 123 (c).\n d", "a|\n|b| |1|2|3| (|c|).\n| d"),
        ("bailingmoe2", "it'd 1\n\nx", "it|'d| |1|\n\n|x"),
        ("seed-coder", "f(x);\n12", "f|(x|);|\n|1|2"),
        ("deepseek-v3", "世界kana カナ1234 *b", "世界|kana| |カナ|123|4| *|b"),
        ("hunyuan-dense", "a.b+ 12", "a|.b|+| |12"),
    ],
)
def test_texts_are_split_as_llama_cpp_splits_them(
    pre: str, text: str, pieces: str, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "one.gguf", pre)
    content = tokenizer_files(GgufMetadata(tmp_path / "one.gguf"))["tokenizer.json"]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    assert tokenizer.pre_tokenizer is not None
    found = [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces.split("|")
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path, _ = make("llama", {}, tmp_path)
    content = path.read_bytes()
    bad = tmp_path / "bad.gguf"
    for data, problem in (
        (b"nonsense" * 9, "is not a GGUF file"),
        (content.replace(b"blk.1.ffn_up", b"blk.9.ffn_up"), r"unexpected tensor blk\.9\.ffn_up"),
        (content.replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"), r"unexpected tensor blk\.1\.ffn_xx"),
        (content.replace(b"gpt-2", b"gpt-9"), "tokenizer.ggml.pre 'gpt-9' is not supported"),
    ):
        bad.write_bytes(data)
        with pytest.raises(ModelError, match=problem):
            load(bad)


@pytest.mark.full
def test_the_demo_models_own_file_has_the_demo_models_numbers() -> None:
    folder = resolve_model(demo.DEMO_GGUF)
    prompt = [random.randrange(3, 40_000) for _ in range(20)]
    texts = [
        PagedDriver(load_model(one, "float32").model, num_pages=16).greedy([prompt], 12)
        for one in (folder, resolve_model(demo.DEMO_NAME))
    ]
    assert texts[0] == texts[1]
