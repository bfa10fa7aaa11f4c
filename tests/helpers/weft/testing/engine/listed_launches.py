"""Lists what a decode step and its drawing launch on a GPU, on a machine without one.

    TRITON_INTERPRET=1 python -m weft.testing.engine.listed_launches

writes the lists that `tests/engine/steps/test_listed_launches.py` compares: run it when launches
are meant to change, and review the difference. The step is captured as on a GPU, but on CPU tensors
that take a GPU's ways: kernels are noted with their grids and not run, operations of torch with the
shapes of their results.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from weft.engine.executor.draw_graphs import DrawKey
from weft.engine.executor.graphs import GraphBucket
from weft.engine.executor.ranks import share
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.kernels.ops.linear import pack as linear_pack
from weft.kernels.shared import cpu
from weft.testing.engine.captured_steps import RecordedSteps
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import tiny_config

LISTS = Path(__file__).parents[4] / "engine" / "steps" / "launches.json"
REQUESTS = 4
"""Of the step."""

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LATENTS = {
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_STATES = {
    "shared_expert_intermediate_size": 128,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
KINDS = ("dense", "experts", "latents", "recurrent", "windows", "adapters", "drafts")
"""Kinds of layers, and what steps of dense layers have beside decodes."""
DRAFTS = 3
"""Of each request, where it has any."""


def config_of(kind: str) -> dict[str, Any]:
    """config.json of a small model of two layers of a kind."""
    if kind == "drafts":  # A head reads what enters the third layer.
        return tiny_config("llama", **(_SIZES | {"num_hidden_layers": 3}))
    if kind in ("dense", "adapters"):
        return tiny_config("llama", **_SIZES)
    if kind == "experts":
        return tiny_config("qwen3_moe", **_SIZES, **_EXPERTS)
    import transformers

    family, architecture, own = {
        "latents": ("deepseek_v3", "DeepseekV3ForCausalLM", _LATENTS),
        "recurrent": ("qwen3_next", "Qwen3NextForCausalLM", _EXPERTS | _STATES),
        "windows": ("gemma3_text", "Gemma3ForCausalLM", _WINDOWS),
    }[kind]
    config = transformers.AutoConfig.for_model(family, **(_SIZES | own))
    return {**config.to_dict(), "architectures": [architecture]}


class _Launches(TorchDispatchMode):
    """Notes what is launched while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @property
    def kernel(self) -> Callable[..., None]:
        """Stands in for the launch of a Triton kernel."""

        def run(kernel: Any, *args: Any, grid: Sequence[int], **options: Any) -> None:
            self.found.append(f"{kernel.fn.__name__} {list(grid)}")

        return run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if "empty" in name:
            # What no kernel writes here must still be a valid index.
            return result.zero_()
        # Such as `reshape` and `to` are listed where they copy.
        is_view = func.is_view and _memory((args, kwargs)) >= _memory(result)
        if not is_view:
            shapes = (list(leaf.shape) for leaf in tree_leaves(result))
            self.found.append(" ".join([f"torch.{name}", *map(str, shapes)]))
        return result


def _memory(values: Any) -> set[int]:
    """Where the memory of tensors begins."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class _Listed(NamedTuple):
    """Stands in for a graph."""

    launches: list[str]


class _ListedSteps(RecordedSteps):
    """Steps that are listed where a GPU would capture them."""

    def capture(self, run: Callable[[], torch.Tensor]) -> Any:
        """See `StepGraphs.capture`."""
        with torch.inference_mode(), as_on_gpu(), _listing() as launches:
            result = run()
        return _Listed(launches), result


@contextmanager
def _listing() -> Iterator[list[str]]:
    with _Launches() as mode, mock.patch.object(InterpretedFunction, "run", mode.kernel):
        yield mode.found


def _load_as_on_gpu(*args: Any, **options: Any) -> Any:
    with as_on_gpu():
        return load_model(*args, **options)


def launches_of(kind: str) -> dict[str, list[str]]:
    """Launches of a captured step, and of the greedy drawing behind it, in order."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(cpu, "native_cpu", return_value=None),
        mock.patch.object(linear_pack, "onednn_has_bfloat16", return_value=False),
        mock.patch.object(share, "load_model", _load_as_on_gpu),
        mock.patch.object(InterpretedFunction, "run", return_value=None),
    ):
        (Path(folder) / "config.json").write_text(json.dumps(config_of(kind)))
        settings = {"dtype": "bfloat16", "dummy_weights": True, "max_running_requests": REQUESTS}
        settings |= {"max_step_tokens": 16, "prefill_chunk_tokens": 16}
        bucket, drafts = GraphBucket(REQUESTS, REQUESTS, "decode"), 0
        if kind == "adapters":
            settings, bucket = settings | {"enable_lora": True}, bucket._replace(has_lora=True)
        if kind == "drafts":
            head = make_tiny_draft(Path(folder) / "head", Path(folder), draft_vocab_size=256)
            settings |= {"drafter": "eagle3", "draft_dir": head, "max_draft_tokens": DRAFTS}
            rows, drafts = REQUESTS * (1 + DRAFTS), DRAFTS
            bucket = GraphBucket(rows, REQUESTS, "verify", drafts=DRAFTS)
        with LLM(Path(folder), num_pages=32, **settings) as llm:
            steps: Any = _ListedSteps(llm.engine, drafts, has_lora=bucket.has_lora)
            draws: Any = llm.engine.parts.local._draws
            step, _ = steps._graphs[bucket]
            draw, _ = draws._graphs[DrawKey(bucket, bucket.tokens, "greedy")]
    return {"step": step.launches, "draw": draw.launches}


if __name__ == "__main__":
    LISTS.write_text(json.dumps({kind: launches_of(kind) for kind in KINDS}, indent=1) + "\n")
