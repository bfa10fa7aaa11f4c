"""Compares a model over Weft's pages with the same model in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from weft.checkpoint.transformers_config import TransformersConfig
from weft.contract.errors import ModelError
from weft.engine.model.archs.by_transformers.model import TransformersModel, named, paged_step
from weft.engine.model.loader import load_model

_TOKENS = 384
_NEW = 16
_PAGE = 16
_LEAST = 0.97
"""Share of tokens that must agree: nearly equal logits change places."""


class Agreement(NamedTuple):
    """How many next tokens of a text are those of plain transformers."""

    equal: int
    of: int


@torch.inference_mode()
def compare_tokens(folder: Path, config: TransformersConfig) -> Agreement:
    """The most likely tokens behind each of a text, and those with which plain transformers goes
    on, both in float32. Raises ModelError if too few are equal.
    """
    with named(config):
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=bool(config.remote_class),
        ).eval()
        count = max(2, min(_TOKENS, config.max_position_embeddings - _NEW))
        ids = (7 + 13 * torch.arange(count) + torch.arange(count) ** 2 % 11) % config.vocab_size
        for _ in range(_NEW):
            ids = torch.cat((ids, _next(plain, ids)[-1:]))
        padding = getattr(plain.config, "pad_token_id", None)
        if padding is not None:
            # Plain transformers may give it no position, as if it were not in the text.
            ids = (ids + (ids == padding)) % config.vocab_size
        expected = _next(plain, ids)
    del plain
    model = load_model(folder, "float32", trust_remote_code=True).model
    assert isinstance(model, TransformersModel)
    pages = -(-len(ids) // _PAGE)
    layout = model.kv_layout(_PAGE)
    pool = torch.zeros(layout.pool_shape(2 + pages), dtype=torch.float32)
    table, found = torch.arange(2, 2 + pages, dtype=torch.int32)[None], []
    for first, last in ((0, count // 2 + 1), (count // 2 + 1, len(ids))):
        step = paged_step(ids[None, first:last], table, first, _PAGE)
        found.append(model.logits(model.forward_all(step, pool)).argmax(-1))
    equal = int((torch.cat(found) == expected).sum())
    if equal < _LEAST * len(ids):
        raise ModelError(
            f"{config.architecture}: only {equal} of {len(ids)} next tokens are those of plain "
            "transformers; it cannot be served this way"
        )
    return Agreement(equal, len(ids))


def _next(plain: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = plain(input_ids=ids[None], use_cache=False).logits
    return logits[0].argmax(-1)
