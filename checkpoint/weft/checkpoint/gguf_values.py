"""What llama.cpp's converter does to a model's numbers, undone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeTensor:
    """A tensor of the model that is computed from tensors of the file."""

    pattern: re.Pattern[str]
    """Of the model's name; its first group is the layer's number."""
    sources: tuple[str, ...]
    """Names in the file, with `{}` in place of the layer's number. `key[{}]` is the number that
    the metadata have for the layer.
    """
    make: Callable[[Sequence[Array]], Array]


def _made(pattern: str, make: Callable[[Sequence[Array]], Array], *sources: str) -> MadeTensor:
    return MadeTensor(pattern=re.compile(pattern), sources=sources, make=make)


def _less_one(values: Sequence[Array]) -> Array:
    return np.asarray(values[0] - np.float32(1))


def _squeezed_conv(values: Sequence[Array]) -> Array:
    """[channels, taps] -> [channels, 1, taps]."""
    return values[0].reshape(len(values[0]), 1, -1)


def _latent_rows(values: Sequence[Array]) -> Array:
    """K [heads, latent, nope] and V [heads, v, latent] -> [heads * (nope + v), latent]."""
    both = np.concatenate((values[0].swapaxes(1, 2), values[1]), axis=1)
    return both.reshape(-1, both.shape[2])


def _alternating(values: Sequence[Array]) -> Array:
    """Gate and up [experts, n] each -> [experts, 2 n], one of each in turns."""
    return np.stack(values, axis=-1).reshape(len(values[0]), -1)


def _stacked_rows(values: Sequence[Array]) -> Array:
    return np.concatenate(values, axis=-2)


def _same(values: Sequence[Array]) -> Array:
    return values[0]


def _one_number(values: Sequence[Array]) -> Array:
    return values[0].reshape(1)


def _scalar(values: Sequence[Array]) -> Array:
    return np.asarray(values[0].reshape(()))


def _one_row(values: Sequence[Array]) -> Array:
    return values[0].reshape(1, -1)


def _upper_half(values: Sequence[Array]) -> Array:
    return values[0][: len(values[0]) // 2]


def _lower_half(values: Sequence[Array]) -> Array:
    return values[0][len(values[0]) // 2 :]


def _flat(values: Sequence[Array]) -> Array:
    return values[0].reshape(-1)


def _log_of_negative(values: Sequence[Array]) -> Array:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(-_flat(values)))


_LAYER = r"^model\.layers\.(\d+)\."
_NORMS = tuple(
    _made(rf"{_LAYER}{own}\.weight$", _less_one, f"blk.{{}}.{name}.weight")
    for own, name in (
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        (r"self_attn\.q_norm", "attn_q_norm"),
        (r"self_attn\.k_norm", "attn_k_norm"),
    )
)
_LAST_NORM = _made(r"^model\.norm\.weight$", _less_one, "output_norm.weight")
_FEED_NORM = _made(
    rf"{_LAYER}post_attention_layernorm\.weight$", _less_one, "blk.{}.ffn_norm.weight"
)
_SHARED_GATE = _made(
    rf"{_LAYER}mlp\.shared_expert_gate\.weight$", _one_row, "blk.{}.ffn_gate_inp_shexp.weight"
)
_LATENT = _made(
    rf"{_LAYER}self_attn\.kv_b_proj\.weight$",
    _latent_rows,
    "blk.{}.attn_k_b.weight",
    "blk.{}.attn_v_b.weight",
)
_CONV = _made(rf"{_LAYER}conv\.conv\.weight$", _squeezed_conv, "blk.{}.shortconv.conv.weight")
_GEMMA4 = tuple(
    _made(rf"{_LAYER}router\.{own}$", _same, f"blk.{{}}.{name}.scale")
    for own, name in (("scale", "ffn_gate_inp"), ("per_expert_scale", "ffn_down_exps"))
)
_GPT_OSS = (
    _made(
        rf"{_LAYER}mlp\.experts\.gate_up_proj_bias$",
        _alternating,
        "blk.{}.ffn_gate_exps.bias",
        "blk.{}.ffn_up_exps.bias",
    ),
    _made(rf"{_LAYER}mlp\.experts\.down_proj_bias$", _same, "blk.{}.ffn_down_exps.bias"),
    _made(rf"{_LAYER}self_attn\.sinks$", _same, "blk.{}.attn_sinks.weight"),
)
_SHARED_ROWS = _made(
    rf"{_LAYER}shared_mlp\.input_linear\.weight$",
    _stacked_rows,
    "blk.{}.ffn_gate_shexp.weight",
    "blk.{}.ffn_up_shexp.weight",
)
_DELTA = (
    *(*_NORMS, _LAST_NORM, _SHARED_GATE),
    _made(rf"{_LAYER}linear_attn\.A_log$", _log_of_negative, "blk.{}.ssm_a"),
    _made(rf"{_LAYER}linear_attn\.dt_bias$", _same, "blk.{}.ssm_dt.bias"),
    _made(rf"{_LAYER}linear_attn\.conv1d\.weight$", _squeezed_conv, "blk.{}.ssm_conv1d.weight"),
)
_DELTA_NEXT = (
    *_DELTA,
    _made(rf"{_LAYER}linear_attn\.in_proj_b\.weight$", _upper_half, "blk.{}.ssm_ba.weight"),
    _made(rf"{_LAYER}linear_attn\.in_proj_a\.weight$", _lower_half, "blk.{}.ssm_ba.weight"),
)
_BLOCK = r"^backbone\.layers\.(\d+)\.mixer\."
_MAMBA2 = (
    _made(rf"{_BLOCK}A_log$", _log_of_negative, "blk.{}.ssm_a"),
    _made(rf"{_BLOCK}D$", _flat, "blk.{}.ssm_d"),
    _made(rf"{_BLOCK}dt_bias$", _same, "blk.{}.ssm_dt.bias"),
    _made(rf"{_BLOCK}conv1d\.weight$", _squeezed_conv, "blk.{}.ssm_conv1d.weight"),
    _made(rf"{_BLOCK}norm\.weight$", _flat, "blk.{}.ssm_norm.weight"),
)
_APERTUS = tuple(
    _made(rf"{_LAYER}mlp\.act_fn\.{name}$", make, f"xielu.{name}[{{}}]")
    for name, make in (
        *(("alpha_n", _one_number), ("alpha_p", _one_number)),
        *(("beta", _scalar), ("eps", _scalar)),
    )
)

MADE: Mapping[str, tuple[MadeTensor, ...]] = {
    "apertus": _APERTUS,
    "deepseek2": (_LATENT,),
    "gemma": (*_NORMS[:1], _FEED_NORM, _LAST_NORM),
    "gemma2": (*_NORMS, _LAST_NORM),
    "gemma3": (*_NORMS, _LAST_NORM),
    "gemma4": _GEMMA4,
    "gpt-oss": _GPT_OSS,
    "granitemoe": (_SHARED_ROWS,),
    "lfm2": (_CONV,),
    "lfm2moe": (_CONV,),
    "mistral4": (_LATENT,),
    "nemotron_h": _MAMBA2,
    "nemotron_h_moe": _MAMBA2,
    "nemotron": (*_NORMS[:1], _FEED_NORM, _LAST_NORM),
    "qwen2moe": (_SHARED_GATE,),
    "qwen3next": _DELTA_NEXT,
    "qwen35": _DELTA,
    "qwen35moe": _DELTA,
}
"""By `general.architecture`."""
PAIRED = frozenset(
    ("arcee", "granite", "granitemoe", "llama", "minicpm", "mistral3", "olmo", "smollm3")
)
"""Architectures whose rows of Q and K that are rotated together are next to each other in files.
Hugging Face pairs row i with i + head_dim / 2.
"""
TILED = frozenset(("qwen35", "qwen35moe"))
"""Architectures whose files have the first value head of each key head, then the second of each.
Hugging Face has all value heads of the first key head, then those of the second.
"""


class Order(NamedTuple):
    """Which rows or columns of a file's tensor are those of the model, in the model's order."""

    axis: int
    """0: rows, 1: columns."""
    numbers: npt.NDArray[np.int64]

    def of(self, values: Array, per: int = 1) -> Array:
        """The tensor's values, or its scales, of which each is that of `per` columns."""
        numbers = self.numbers[::per] // per if self.axis else self.numbers
        return values.take(numbers, axis=self.axis)

    def keeps_groups(self, size: int) -> bool:
        """Whether all that share a scale with `size` columns stay together, in their order."""
        if self.axis == 0:
            return True
        if len(self.numbers) % size:
            return False
        groups = self.numbers.reshape(-1, size)
        return bool((groups == groups[:, :1] // size * size + np.arange(size)).all())


def turned(outer: int, first: int, second: int, inner: int = 1) -> npt.NDArray[np.int64]:
    """Positions in [outer, first, second, inner] as they follow each other in
    [outer, second, first, inner].
    """
    numbers = np.arange(outer * first * second * inner).reshape(outer, first, second, inner)
    return np.ascontiguousarray(numbers.swapaxes(1, 2)).reshape(-1)
