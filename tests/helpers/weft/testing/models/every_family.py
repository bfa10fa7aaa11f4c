"""Small random models of every architecture, and what transformers makes of them."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
from weft.engine.model.interface import Model
from weft.testing.models.choices import Choices, where_experts_are_sure
from weft.testing.models.families import FAMILIES, make_family, name_own_code
from weft.testing.models.ling import is_ling, load_ling, to_ling
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.reference_models import make_reference

_BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": (
        "qwen3_moe", {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
    ),
}  # fmt: skip
OF_REFERENCES = _BASES | MOE_FAMILIES
"""Model types and fields for `make_reference`."""
EVERY_FAMILY = (*OF_REFERENCES, *FAMILIES)
"""Names for `write_model`."""


def write_model(name: str, path: Path, seed: int, **fields: Any) -> Any:
    """Writes a model directory; returns the same in transformers, float32.

    Args:
        name: One of `EVERY_FAMILY`.
        path: Directory to create.
        seed: Of the weights.
        **fields: Further fields of the configuration.
    """
    if name in OF_REFERENCES:
        kind, overrides = OF_REFERENCES[name]
        reference = make_reference(kind, path, seed, **(overrides | fields))
        name_own_code(name, path)
        if name == "ling2":
            to_ling(path)
        return reference
    return load_reference(make_family(name, path, seed, **fields))


def missing_type(name: str) -> str:
    """Why a family's models cannot be made: transformers lacks their model type. Else empty."""
    import transformers

    kind, _ = OF_REFERENCES.get(name) or FAMILIES[name]
    has_it = kind in transformers.CONFIG_MAPPING
    return "" if has_it else f"transformers {transformers.__version__} has no {kind}"


def load_reference(path: Path) -> Any:
    """A model directory in transformers, float32."""
    import transformers

    if is_ling(path):
        return load_ling(path)
    config = transformers.AutoConfig.from_pretrained(path)
    build: Any = transformers.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        build = transformers.AutoModelForImageTextToText
    return build.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def greedy_tokens(reference: Any, prompt: list[int], count: int) -> Choices:
    """The `count` tokens with which a model of transformers goes on, computed without a cache."""
    return Choices(
        lambda tokens: reference(torch.tensor([tokens]), use_cache=False).logits[0], prompt, count
    )


@torch.inference_mode()
def gaps_of(reference: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """How far each token's logit is below the reference's best one, in bfloat16 steps of the
    largest logit.
    """
    ids = torch.tensor([prompt + tokens[:-1]])
    logits = reference(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    ulp = 2.0 ** (torch.floor(torch.log2(logits.abs().amax(dim=-1))) - 7)
    gaps: list[float] = ((best - chosen) / ulp).tolist()
    return gaps


def check_logits(model: Model, floats: Path) -> None:
    """A random prompt's logits are those of the same weights in floats.

    Args:
        floats: Directory of that model.
    """
    prompt = [random.randrange(3, 500) for _ in range(33)]
    found = PagedDriver(model, 16).step([(PagedRequest(), prompt)], range(33))
    reference = load_reference(floats)
    with where_experts_are_sure(lambda: reference, prompt):
        assert_logits(found, reference, prompt, 1e-4)


@torch.inference_mode()
def assert_logits(
    found: torch.Tensor, reference: Any, text: list[int], bound: float, first: int = 0
) -> float:
    """Fails unless logits are those of a text's tokens, as exactly as float32 allows: where random
    weights nearly cancel, a reference of transformers is not exact either.

    Args:
        found: `[num_tokens, vocab]`, up to the text's end.
        reference: Of transformers, in float32.
        bound: Of errors, relative to the largest logit.
        first: The text's token that `found` begins with.

    Returns:
        Of errors, what is allowed.
    """
    ids, rows = torch.tensor([text]), slice(first, None)
    rounded = reference(ids, use_cache=False).logits[0, rows]
    assert found.shape == rounded.shape
    allowed = bound * float(rounded.abs().max())
    if float((found - rounded).abs().max()) < allowed:
        return allowed
    wide = copy.deepcopy(reference).double()
    wide.set_experts_implementation("eager")  # Others have no float64.
    exact = wide(ids, use_cache=False).logits[0, rows]
    # Largest errors of two computations of one model are alike: of 73 random models none was more
    # than 1.6 times the other. 4 leaves room. In a single row whose numbers nearly cancel, one may
    # round well where the other does not, and by 12 times was seen: so the rows count together.
    allowed += 4 * float((rounded - exact).abs().max())
    error = float((found - exact).abs().max())
    assert error < allowed, (error, allowed)
    return allowed
