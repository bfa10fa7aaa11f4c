"""Models in Mistral's own layout: params.json, consolidated weights, tekken.json."""

from __future__ import annotations

import base64
import itertools
import json
import random
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
from safetensors.torch import load_file, save_file
from weft.checkpoint.mistral_params import mistral_name
from weft.checkpoint.resolve import resolve_model
from weft.checkpoint.tokenizer_files import read_tokenizer
from weft.contract.errors import ModelError
from weft.engine.model.loader import load_model
from weft.testing.models.families import make_family
from weft.testing.models.paging import PagedDriver, PagedRequest

pytestmark = pytest.mark.usefixtures("single_thread")

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = 10


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k for rotations of neighbours, from rows for rotations of halves."""
    dim = weight.shape[0] // heads
    return weight.view(heads, 2, dim // 2, -1).transpose(1, 2).reshape(weight.shape)


def in_own_layout(source: Path, path: Path, params: Mapping[str, Any]) -> None:
    path.mkdir()
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain = name.replace("language_model.model.", "model.").replace("language_model.lm", "lm")
        plain = plain.replace("model.language_model.", "model.")
        if "vision" in plain or "projector" in plain:
            continue
        if plain.endswith("experts.gate_up_proj") or plain.endswith("experts.down_proj"):
            base = plain.rpartition(".")[0]
            for number, expert in enumerate(tensor):
                gate_up = ("gate_proj", "up_proj") if "gate_up" in plain else ("down_proj",)
                for kind, part in zip(gate_up, expert.chunk(len(gate_up)), strict=True):
                    made = mistral_name(f"{base}.{number}.{kind}.weight")
                    tensors[made] = part.contiguous()
            continue
        if "llama" in params and ("q_proj" in plain or "k_proj" in plain):
            tensor = neighbours(tensor, params["n_heads" if "q_proj" in plain else "n_kv_heads"])
        tensors[mistral_name(plain)] = tensor.contiguous()
    tensors["vision_encoder.patch_conv.weight"] = torch.zeros(2, 2)
    save_file(tensors, path / "consolidated.safetensors")
    (path / "params.json").write_text(json.dumps({k: v for k, v in params.items() if k != "llama"}))


def params_of(source: Path) -> dict[str, Any]:
    config = json.loads((source / "config.json").read_text())
    text = config.get("text_config", config)
    rope = text["rope_parameters"]
    params = {
        "dim": text["hidden_size"], "n_layers": text["num_hidden_layers"],
        "n_heads": text["num_attention_heads"], "n_kv_heads": text["num_key_value_heads"],
        "hidden_dim": text["intermediate_size"], "norm_eps": text["rms_norm_eps"],
        "vocab_size": text["vocab_size"], "rope_theta": rope["rope_theta"],
        "max_seq_len": text["max_position_embeddings"], "head_dim": text["head_dim"],
        "tied_embeddings": False,
        "yarn": {"factor": rope["factor"], "beta": 32, "alpha": 1, "apply_scale": True,
                 "original_max_position_embeddings": rope["original_max_position_embeddings"]},
        "llama_4_scaling": {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
        },
    }  # fmt: skip
    if "kv_lora_rank" not in text:
        return params | {"llama": True}
    moe = {
        "num_experts": text["n_routed_experts"], "first_k_dense_replace": 1, "route_every_n": 1,
        "num_experts_per_tok": text["num_experts_per_tok"], "routed_scale": 1.0,
        "expert_hidden_dim": text["moe_intermediate_size"], "num_shared_experts": 1,
        "num_expert_groups": text["n_group"], "num_expert_groups_per_tok": text["topk_group"],
    }  # fmt: skip
    latent = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return params | {name: text[name] for name in latent} | {"moe": moe}


@pytest.mark.parametrize("family", ["mistral4", "ministral3"])
def test_weights_in_mistrals_layout_are_the_same_model(
    family: str, tmp_path: Path, seed: int
) -> None:
    source = make_family(family, tmp_path / "source", seed)
    in_own_layout(source, tmp_path / "own", params_of(source))
    folder = resolve_model(str(tmp_path / "own"))
    assert resolve_model(str(tmp_path / "own")) == folder
    text = [random.randrange(3, 250) for _ in range(70)]
    found = [
        PagedDriver(load_model(path, "float32").model, 20).step([(PagedRequest(), text)], range(70))
        for path in (source, folder)
    ]
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-4)


def trained_vocabulary(texts: list[str], count: int) -> list[bytes]:
    """Tokens by rank: bytes, then what BPE merges most often, written out once more."""
    pieces = [piece.encode() for text in texts for piece in regex.findall(PATTERN, text)]
    words = [[piece[i : i + 1] for i in range(len(piece))] for piece in pieces]
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < count:
        pairs: dict[bytes, int] = {}
        for word in words:
            for first, second in itertools.pairwise(word):
                pairs[first + second] = pairs.get(first + second, 0) + 1
        pairs = {pair: n for pair, n in pairs.items() if pair not in tokens}
        if not pairs:
            return tokens
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        tokens.append(best)
        for word in words:
            place = 0
            while place < len(word) - 1:
                if word[place] + word[place + 1] == best:
                    word[place : place + 2] = [best]
                place += 1
    return tokens


def tiktoken_ids(text: str, tokens: list[bytes]) -> list[int]:
    """tiktoken's own rule, piece by piece."""
    ranks, ids = {token: rank for rank, token in enumerate(tokens)}, []
    for piece in regex.findall(PATTERN, text):
        data = piece.encode()
        parts = [data[i : i + 1] for i in range(len(data))]
        if data in ranks:
            parts = [data]
        while True:
            pairs = [a + b for a, b in itertools.pairwise(parts)]
            known = [(ranks[pair], place) for place, pair in enumerate(pairs) if pair in ranks]
            if not known:
                break
            place = min(known)[1]
            parts[place : place + 2] = [pairs[place]]
        ids += [SPECIAL + ranks[part] for part in parts]
    return ids


def tekken(tokens: list[bytes]) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    names = ("<unk>", "<s>", "</s>", "[INST]")
    return {
        "config": {
            "pattern": PATTERN, "default_num_special_tokens": SPECIAL, "version": "v3",
            "default_vocab_size": len(tokens) + SPECIAL, "num_vocab_tokens": len(vocab),
        },
        "vocab": vocab,
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
        ],
    }  # fmt: skip


@pytest.mark.parametrize("letters", ["ab ", string.ascii_letters + " \n0123.,!", "aäßzœ ﬁ-😀 "])
def test_tekken_makes_tiktokens_tokens(letters: str, tmp_path: Path, seed: int) -> None:
    """Of a trained vocabulary, and of one with tokens that no training has merged."""
    source = random.Random(seed)

    def text(length: int) -> str:
        return "".join(source.choice(letters) for _ in range(length))

    tokens = trained_vocabulary([text(60) for _ in range(20)], 330)
    more = {text(source.randint(2, 5)).encode() for _ in range(60)} - set(tokens)
    for name, vocabulary in (("trained", tokens), ("mixed", [*tokens, *sorted(more)])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        (folder / "tekken.json").write_text(json.dumps(tekken(vocabulary)))
        tokenizer = read_tokenizer(resolve_model(str(folder))).tokenizer
        for _ in range(60):
            sample = text(source.randint(1, 80))
            ids = tokenizer.encode(sample, add_special_tokens=False).ids
            assert ids == tiktoken_ids(sample, vocabulary), sample
            assert tokenizer.decode(ids) == sample
        assert tokenizer.encode("[INST]x").ids[:2] == [1, 3]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t["vocab"].pop(5), "order of their ranks"),
        (lambda t: t["vocab"][3].update(token_bytes="?"), "not a list of tokens"),
        (lambda t: t["vocab"][3].update(token_bytes="AA=="), "twice"),
        (lambda t: t["special_tokens"][1].update(token_str="x"), "expected 10 names"),
    ],
)
def test_damaged_tekken_files_are_refused(change: Any, problem: str, tmp_path: Path) -> None:
    content = tekken([bytes([byte]) for byte in range(256)])
    change(content)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=problem):
        resolve_model(str(tmp_path))
