"""Families made of parts against transformers, in float32."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import kl_div
from weft.contract.tasks import PoolingParams
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.kernels.shared.formats.int_groups import quantise_groups
from weft.testing.models.choices import where_experts_are_sure
from weft.testing.models.every_family import assert_logits, load_reference
from weft.testing.models.families import FAMILIES, make_family
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.quantised_models import round_rows
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_embedders import write_modules


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@torch.inference_mode()
def logits_of(reference: Any, text: list[int]) -> torch.Tensor:
    """[len(tokens), vocab] of a text alone, without any cache."""
    found: torch.Tensor = reference(torch.tensor([text]), use_cache=False).logits[0]
    return found


FULL = (
    *("kimi_k25", "qwen3_vl_moe", "gemma4-keys", "vaultgemma", "cwm", "youtu"),
    *("apertus", "jais2", "olmo", "phi", "phimoe", "gptj", "gpt_bigcode", "gpt_bigcode-heads"),
    *("opt", "gpt_neo", "falcon", "falcon-new", "falcon-heads", "lfm3"),
    *("granite_swa", "granite_moe_swa", "minimax", "ling3", "codegen", "xglm"),
    *("llava", "llava_next", "llava_onevision", "idefics3", "internvl", "smolvlm", "lfm2_vl"),
    "paddleocr_vl",
)
"""Those whose parts others have too; they run behind --full."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in FAMILIES],
)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """Whole prompts, chunks, a common prefix that is in pages already, and generated tokens."""
    path = make_family(name, tmp_path, seed := random.randrange(10**6))
    print(f"seed {seed}")
    model = load_model(path, "float32").model
    vocab = model.config.vocab_size
    # Longer than windows and original contexts.
    prompts = [[random.randrange(3, vocab) for _ in range(count)] for count in (90, 17)]
    prompts.append(prompts[0][:48] + [random.randrange(3, vocab) for _ in range(30)])
    driver = PagedDriver(model, num_pages=64)
    first, second, third = requests = [PagedRequest() for _ in prompts]
    parts: list[list[torch.Tensor]] = [[], [], []]

    def step(*work: tuple[int, int]) -> None:
        """So many tokens of requests, by their numbers."""
        taken = []
        for number, count in work:
            begin = requests[number].num_cached
            taken.append((requests[number], prompts[number][begin : begin + count]))
        rows = sum(len(tokens) for _, tokens in taken)
        logits = driver.step(taken, range(rows)).split([len(tokens) for _, tokens in taken])
        for (number, _), made in zip(work, logits, strict=True):
            parts[number].append(made)

    step((0, 41), (1, 17))
    step((0, 49))
    third.begin_with(first, 6, driver.page_size)
    step((2, 9))
    step((2, 21))
    assert second.num_cached == 17
    texts = [list(prompt) for prompt in prompts]
    last = [int(made[-1][-1].argmax(-1)) for made in parts]
    for _ in range(12):
        for text, token in zip(texts, last, strict=True):
            text.append(token)
        work = [(r, text[-1:]) for r, text in zip(requests, texts, strict=True)]
        last = driver.step(work).argmax(-1).tolist()
    reference = load_reference(path)
    # States add up rounding over all rows, in transformers' form as in any other: of random models
    # one in a hundred is beyond 1e-4.
    bound = 3e-5 if model.kv_layout(8).states is None else 2e-3
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        logits = logits_of(reference, text)
        drawn = torch.tensor(text[len(prompt) :])[:, None]
        best = logits[len(prompt) - 1 : -1].max(-1).values
        gap = best - logits[len(prompt) - 1 : -1].gather(-1, drawn)[:, 0]
        with where_experts_are_sure(lambda: reference, text):
            seen = 48 if number == 2 else 0
            found = torch.cat(parts[number])
            allowed = assert_logits(found, reference, text[: len(prompt)], bound, seen)
            assert bool((gap <= 2 * allowed).all()), gap


def test_older_files_of_gpt2_are_the_same_model(tmp_path: Path) -> None:
    """Without a prefix, and with the masks of attention."""
    path = make_family("gpt2", tmp_path, seed=random.randrange(10**6))
    tokens = [random.randrange(3, 250) for _ in range(20)]
    expected = PagedDriver(load_model(path, "float32").model, 8).step([(PagedRequest(), tokens)])
    tensors = load_file(path / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for layer in range(4):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 512, 512).tril()
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(old, path / "model.safetensors")
    found = PagedDriver(load_model(path, "float32").model, 8).step([(PagedRequest(), tokens)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["gemma3n", pytest.param("gemma4", marks=pytest.mark.full)])
def test_files_with_images_and_unused_keys_are_the_same_model(name: str, tmp_path: Path) -> None:
    """As the hub has them: towers, and K and V of layers that use those of others."""
    path = make_family(name, tmp_path, seed=random.randrange(10**6))
    tokens = [random.randrange(3, 250) for _ in range(20)]
    expected = PagedDriver(load_model(path, "float32").model, 8).step([(PagedRequest(), tokens)])
    body = "model.language_model."
    tensors = {
        tensor_name.replace("model.", body, 1): tensor
        for tensor_name, tensor in load_file(path / "model.safetensors").items()
    }
    for part in ("k_proj", "v_proj", "k_norm"):
        unused = f"layers.4.self_attn.{part}.weight"
        assert body + unused not in tensors
        tensors[body + unused] = tensors[body + unused.replace("4", "1")].clone()
    for tower in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"):
        tensors[f"model.{tower}.layers.4.self_attn.k_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    names = [each.replace("CausalLM", "ConditionalGeneration") for each in raw["architectures"]]
    (path / "config.json").write_text(json.dumps({"architectures": names, "text_config": raw}))
    found = PagedDriver(load_model(path, "float32").model, 8).step([(PagedRequest(), tokens)])
    assert torch.equal(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("bits", [8, 4])
def test_gemma_3n_rounded_at_load(bits: int, tmp_path: Path) -> None:
    """Equals transformers with the rounded weights, and loses as little as such weights lose."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256, "head_dim": 32}
    sizes |= {"hidden_size_per_layer_input": 32, "laurel_rank": 32}
    path = make_family("gemma3n", tmp_path / "m", seed := random.randrange(10**6), **sizes)
    print(f"seed {seed}")
    tokens = [random.randrange(3, 200) for _ in range(60)]
    loaded = load_model(path, "float32", quantization=f"int{bits}")
    assert loaded.weight_format.startswith(f"int{bits}")
    work = [(PagedRequest(), tokens)]
    found = PagedDriver(loaded.model, 16).step(work, range(60)).double().log_softmax(-1)
    reference = load_reference(path)
    floats = logits_of(reference, tokens).double().log_softmax(-1)
    for name, module in reference.named_modules():
        if not isinstance(module, torch.nn.Linear) or ".altup." in name:
            continue
        weight = module.weight.detach()
        if bits == 8 or name == "lm_head":
            numbers, scales = round_rows(weight)
            rounded = numbers.float() * scales
        else:
            rounded = quantise_groups(weight).dequantised(torch.float32)
        # A new parameter: the embedding, which shares the head's, stays in floats.
        module.weight = torch.nn.Parameter(rounded)
    expected = logits_of(reference, tokens).double().log_softmax(-1)
    assert float(kl_div(found, expected, reduction="batchmean", log_target=True)) < 1e-5
    lost = float(kl_div(found, floats, reduction="batchmean", log_target=True))
    assert lost < (0.002 if bits == 8 else 0.2)


def test_gpt_neox_without_a_head_has_the_same_states(tmp_path: Path) -> None:
    """Its files have no prefix."""
    import transformers

    path = make_family("gpt_neox", tmp_path / "m", seed=random.randrange(10**6))
    tokens = [random.randrange(3, 250) for _ in range(20)]
    base = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    base.save_pretrained(tmp_path / "headless")
    write_modules(tmp_path / "headless", base.config.hidden_size, 0, pooling="lasttoken")
    with torch.inference_mode():
        expected = base(torch.tensor([tokens])).last_hidden_state[0, -1]
    with LLM(tmp_path / "headless", dtype="float32", num_pages=16) as llm:
        found = torch.from_numpy(llm.pool([tokens], PoolingParams(output="embedding"))[0][0].copy())
    expected = expected / expected.norm()
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
