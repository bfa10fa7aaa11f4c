"""A causal language model whose layers transformers computes: a `Model`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import transformers
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.rope import RopeConfig
from weft.checkpoint.transformers_config import TransformersConfig
from weft.contract.errors import ConfigError, ModelError
from weft.contract.layout import CacheLayout
from weft.engine.model.archs.by_transformers.attention import (
    IMPLEMENTATION,
    Call,
    PagedCalls,
    Recorder,
    attention_by,
    noted_masks,
)
from weft.engine.model.archs.by_transformers.fused import (
    NotLeftError,
    Rotation,
    fuse_mlps,
    fuse_norms,
    leave_rotations,
    leaving,
)
from weft.engine.model.archs.by_transformers.names import Converted
from weft.engine.model.archs.by_transformers.plan import RankPlan
from weft.engine.model.archs.by_transformers.products import (
    JoinedProduct,
    Product,
    ProductPart,
    adapters_of,
    place_products,
)
from weft.engine.model.decoder_only import paged_layout, places_in_pools
from weft.engine.model.layers.rotary import cos_sin_table
from weft.engine.model.step import Step
from weft.engine.model.weights.checkpoint import Checkpoint
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.sent import SentTensors
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.engine.parallel.shards import layout_of_rank
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.lora.spec import LoraStep

logger = logging.getLogger(__name__)

_TRIED = 12
"""Tokens of the text with which a loaded model is tried."""
_TRIED_PAGE = 4
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest difference of hidden states, relative to their size, that roundings may make."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear modules that have the same input."""
_GATES = frozenset(("gate", "router", "shared_expert_gate"))
"""Last names of modules that choose among experts, which stay in floats."""


class TransformersModel:
    """A model of transformers' registry, or of a file beside its checkpoint. Its attention keeps K
    and V in Weft's pages; its linear modules are Weft's products, in any format that Weft has.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Reads every parameter, and tries the model with a short text.

        Raises:
            ModelError: transformers cannot build the model, it asks of attention what pages do not
                have, or its tokens depend on one another in other ways than by attention.
        """
        assert isinstance(config, TransformersConfig)
        self.config: ModelConfig = config
        self.dtype = weights.dtype
        causal = _built(config, weights.dtype)
        peers = weights.peers
        plan = None if peers is None else RankPlan(causal, config.architecture, peers)
        self._plan, self._num_ranks = plan, 1 if peers is None else peers.size
        _read_parameters(causal, weights, plan)
        if plan is not None:
            plan.place_sums(causal)
        is_here = weights.device != torch.device("meta")
        if is_here:
            fuse_norms(causal)
            fuse_mlps(causal, weights.dtype, weights.device)
        self._leaves: tuple[bool, ...] = ()
        """Whether attention also computes norms of heads; the last one counts, the others are tried
        if the model's code does not allow it. Empty: the code's rotation runs.
        """
        if is_here and leave_rotations(causal):
            self._leaves = (False, True)
        self.config = replace(config, linears=place_products(config, causal, self._num_ranks))
        self._body, self._given, self._head = _parted(causal)
        self._first_position = 0
        self._calls: tuple[Call, ...] = ()
        if not is_here:
            return
        self._calls = self._record(weights.device)
        dims = {call.dim for call in self._calls}
        rope = RopeConfig(theta=1.0)
        self._turns = {dim: cos_sin_table(rope, dim, 1).to(weights.device) for dim in dims}
        self._places = places_in_pools(self._planes())
        while True:
            try:
                self._try_pages(weights.device)
            except (NotLeftError, ModelError):
                if not self._leaves:
                    raise
                self._leaves = self._leaves[:-1]
            else:
                break

    def modules(self) -> Iterator[torch.nn.Module]:
        """The modules that compute hidden states."""
        modules: Iterator[torch.nn.Module] = self._body.modules()
        return modules

    def kv_layout(self, page_size: int) -> CacheLayout:
        return paged_layout(self._planes(), self.dtype, page_size)

    def _planes(self) -> list[tuple[int | None, list[tuple[int, int, list[int]]]]]:
        """As `ModelConfig.page_planes`, for the calls of attention in place of layers."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for number, call in enumerate(self._calls):
            shapes.setdefault((call.kv_heads, call.dim), []).append(number)
        return [(None, [(*shape, numbers) for shape, numbers in shapes.items()])]

    def forward(self, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """Runs one ragged step: [L, hidden], final hidden states of `step.logits_rows`."""
        hidden = self.forward_all(step, pool)
        return hidden if step.wants_all else hidden.index_select(0, step.logits_rows)

    def forward_all(self, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """As `forward`, but returns the hidden states of all rows, [T, hidden]."""
        rotation = Rotation(leaves_norms=self._leaves[-1]) if self._leaves else None
        paged = PagedCalls(self._calls, self._places, self._turns, step, pool, rotation)
        with attention_by(paged), adapters_of(step.lora), leaving(rotation):
            return self._run(step.token_ids, step.positions)

    def logits(self, hidden: torch.Tensor, lora: LoraStep | None = None) -> torch.Tensor:
        """[L, hidden] -> [L, num_embeddings] float32."""
        if not hidden.shape[0]:
            return hidden.new_empty((0, self.config.num_embeddings), dtype=torch.float32)
        self._given.hidden = hidden[None]
        made: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return made[0].float()

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        positions = positions + self._first_position if self._first_position else positions
        out = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def _record(self, device: torch.device) -> tuple[Call, ...]:
        ids, positions = self._text(device)
        longest = self.config.max_position_embeddings
        recorder = Recorder(longest, self._plan)
        with named(self.config), noted_masks(longest), attention_by(recorder):
            self._run(ids, positions)
        if not recorder.calls:
            raise ModelError(
                f"{self.config.architecture}: its code does not take attention from transformers' "
                "interface"
            )
        if self._plan is not None and len({(one.kv_heads, one.dim) for one in recorder.calls}) > 1:
            raise ConfigError(
                f"tp = {self._num_ranks}: {self.config.architecture} has heads of several shapes, "
                "which are not divided among ranks; take tp = 1",
                param="tp",
            )
        return tuple(recorder.calls)

    def _tried_pool(self, device: torch.device) -> torch.Tensor:
        layout = layout_of_rank(self.kv_layout(_TRIED_PAGE), self._num_ranks)
        return torch.zeros(layout.pool_shape(8), dtype=self.dtype, device=device)

    def _text(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        ids = 7 + 13 * torch.arange(_TRIED, device=device)
        return ids % self.config.vocab_size, torch.arange(_TRIED, device=device)

    @cached_property
    @torch.inference_mode()
    def can_capture(self) -> bool:
        """Whether a pass can become a CUDA graph: on a GPU, one over pages does not wait for it."""
        device = self._turns[self._calls[0].dim].device
        pool = self._tried_pool(device)
        pages = torch.tensor([[2, 3, 4], [5, 6, 7]], dtype=torch.int32, device=device)
        step = paged_step(self._text(device)[0].view(2, -1), pages, 0, _TRIED_PAGE)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.logits(self.forward_all(step, pool))
        except RuntimeError as error:
            logger.info("no CUDA graphs for %s: %s", self.config.architecture, error)
            return False
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return True

    def _difference(self, found: torch.Tensor, wanted: torch.Tensor) -> float:
        """The median over rows, since experts may be chosen otherwise in single rows, where two are
        nearly alike.
        """
        sizes = wanted.float().norm(dim=-1).clamp(min=1e-6)
        return float(((found.float() - wanted.float()).norm(dim=-1) / sizes).median())

    @torch.inference_mode()
    def _try_pages(self, device: torch.device) -> None:
        """Compares one text in two steps over pages, beside another one, with transformers' own
        attention. Raises ModelError if they differ: then the code mixes tokens in other ways.
        """
        ids, positions = self._text(device)
        with _implementation(self._body, "eager"), named(self.config):
            expected = self._body(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            padding = getattr(self._body.config, "pad_token_id", None)
            for first in (0, 0 if padding is None else padding + 1):
                self._first_position = first
                found = self._run(ids, positions)
                if self._difference(found, expected) <= _TOLERANCE[self.dtype]:
                    break
        cut = _TRIED // 2 + 1
        pool = self._tried_pool(device)
        pages = torch.tensor([[2, 3, 4], [5, 6, 7]], dtype=torch.int32, device=device)
        difference = 0.0
        for first, last in ((0, cut), (cut, _TRIED)):
            both = torch.stack((ids.flip(0)[first:last], ids[first:last]))
            step = paged_step(both, pages, first, _TRIED_PAGE)
            found, wanted = self.forward_all(step, pool)[last - first :], expected[first:last]
            difference = max(difference, self._difference(found, wanted))
        if not difference <= _TOLERANCE[self.dtype]:
            raise ModelError(
                f"{self.config.architecture}: hidden states over pages differ from transformers' "
                f"by {difference:.1%}; its tokens depend on one another in other ways than by "
                "attention, which is not supported"
            )


def _built(config: TransformersConfig, dtype: torch.dtype) -> Any:
    """The model with parameters that are not set, and attention of this module."""
    with named(config):
        values = json.loads(config.values)
        if config.remote_class:
            kind = get_class_from_dynamic_module(config.remote_class, config.folder)
            own = transformers.AutoConfig.from_pretrained(config.folder, trust_remote_code=True)
        else:
            kind = getattr(transformers, config.architecture)
            own = transformers.AutoConfig.for_model(**{**values})
            own = own if isinstance(own, kind.config_class) else own.get_text_config(decoder=True)
        with no_init_weights():
            causal = kind._from_config(own, dtype=dtype, attn_implementation=IMPLEMENTATION)
    causal.requires_grad_(requires_grad=False)
    return causal.eval()


def _read_parameters(causal: Any, weights: Weights, plan: RankPlan | None) -> None:
    """Sets every parameter and buffer of a model; linear modules become `Product`s."""
    if isinstance(weights.reader, Checkpoint | SentTensors):
        reader = Converted(weights.reader, weights.reader.names, causal)
        weights = weights.over(reader)
    tied = dict(causal.all_tied_weights_keys)
    head = causal.get_output_embeddings()
    done: dict[str, torch.Tensor] = {}
    later: list[tuple[Any, str, str]] = []
    if not weights.has_own_formats:
        _join_products(causal, weights, {*tied, *_path_of(causal, head)}, plan)
    for path, module in list(causal.named_modules()):
        below = weights.at(path) if path else weights
        if isinstance(module, ProductPart):
            continue
        if type(module) is torch.nn.Linear and f"{path}.weight" not in tied and module is not head:
            above, _, leaf = path.rpartition(".")
            parent = causal.get_submodule(above)
            spec = LinearSpec(
                names=(leaf,),
                in_features=module.in_features,
                rows=(module.out_features,),
                bias=module.bias is not None,
                is_gate=leaf in _GATES,
            )
            spec = spec if plan is None else plan.spec(path, spec)
            packed = (weights.at(above) if above else weights).linear(spec)
            peers, device = weights.peers, weights.device
            setattr(parent, leaf, Product(packed, device=device, split=spec.split, peers=peers))
            continue
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if full in tied and not weights.has(full):
                later.append((module, name, tied[full]))
                continue
            shape = tuple(parameter.shape)
            whole = [TensorSlice(name, shape)], 0
            read = below.joined(*(whole if plan is None else plan.parts(full, name, shape, module)))
            done[full] = read
            module._parameters[name] = torch.nn.Parameter(read, requires_grad=False)
        for name, buffer in module.named_buffers(recurse=False):
            is_kept = name not in module._non_persistent_buffers_set
            if is_kept and weights.has(f"{path}.{name}") and buffer.is_floating_point():
                shape = tuple(buffer.shape)
                buffer = below.tensor(TensorSlice(name, shape), buffer.dtype)
            module._buffers[name] = buffer.to(weights.device)
    for module, name, source in later:
        module._parameters[name] = torch.nn.Parameter(done[source], requires_grad=False)
    if type(head) is torch.nn.Linear:
        path = next(path for path, module in causal.named_modules() if module is head)
        above, _, leaf = path.rpartition(".")
        made = Product(weights.packed(head.weight.data), torch.float32, head.bias)
        setattr(causal.get_submodule(above), leaf, made)


def _path_of(causal: Any, head: Any) -> list[str]:
    return [f"{path}.weight" for path, module in causal.named_modules() if module is head]


def _join_products(causal: Any, weights: Weights, apart: set[str], plan: RankPlan | None) -> None:
    """Makes one product of linear modules that have the same input by their names."""
    for path, parent in list(causal.named_modules()):
        for names in _JOINED:
            found = [getattr(parent, name, None) for name in names]
            modules = [module for module in found if type(module) is torch.nn.Linear]
            if len(modules) < len(names):
                continue
            kinds = {(module.in_features, module.bias is None) for module in modules}
            at = f"{path}." if path else ""
            if len(kinds) > 1 or any(f"{at}{name}.weight" in apart for name in names):
                continue
            if plan is not None and len({plan.style(at + name) for name in names}) > 1:
                continue
            rows = tuple(module.out_features for module in modules)
            spec = LinearSpec(
                names=names,
                in_features=modules[0].in_features,
                rows=rows,
                bias=modules[0].bias is not None,
            )
            spec = spec if plan is None else plan.spec(at + names[0], spec)
            if spec.split == "out":
                rows = tuple(count // weights.shard.size for count in rows)
            packed = (weights.at(path) if path else weights).linear(spec)
            joined = JoinedProduct(packed, rows, spec.split)
            for number, name in enumerate(names):
                setattr(parent, name, ProductPart(joined, number, weights.device))


class _Hidden:
    """The output of a body as far as heads read it: all else is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, at: int | slice) -> Any:
        return (self.last_hidden_state,)[at]


class _Given(torch.nn.Module):
    """Stands for a body whose hidden states are known: `hidden`, [1, L, hidden]."""

    hidden: torch.Tensor

    def forward(self, *_: Any, **__: Any) -> _Hidden:
        return _Hidden(self.hidden)


def _parted(causal: Any) -> tuple[Any, _Given, Any]:
    """The body, what stands in its place, and the model with that: it makes logits."""
    name = causal.base_model_prefix
    body, given = getattr(causal, name, None), _Given()
    if body is None or body is causal:
        raise ModelError(f"{type(causal).__name__} has no body apart from its head")
    setattr(causal, name, given)
    return body, given, causal


@contextmanager
def _implementation(body: Any, name: str) -> Iterator[None]:
    body.set_attn_implementation(name)
    try:
        yield
    finally:
        body.set_attn_implementation(IMPLEMENTATION)


@contextmanager
def named(config: ModelConfig) -> Iterator[None]:
    """Inside, errors of transformers' code become ModelErrors that name the architecture."""
    try:
        yield
    except ModelError as error:
        raise ModelError(
            f"{config.architecture}, by transformers: {error.message}", param="architectures"
        ) from error
    except Exception as error:
        kind = type(error).__name__
        raise ModelError(
            f"{config.architecture} cannot be run by transformers' code: {kind}: {error}",
            param="architectures",
        ) from error


def paged_step(token_ids: torch.Tensor, pages: torch.Tensor, first: int, page_size: int) -> Step:
    """A step of several texts of the same length, whose earlier tokens are in their pages.

    Args:
        token_ids: [R, N] int64: the new tokens.
        pages: [R, pages] int32: each text's pages.
        first: Position of the new tokens' first.
    """
    device, (requests, count) = token_ids.device, token_ids.shape
    positions = torch.arange(first, first + count, device=device).repeat(requests)
    tables = torch.repeat_interleave(torch.arange(requests, device=device), count)
    group = AttentionMetadata(
        page_table=pages,
        places=pages[tables, positions // page_size].long() * page_size + positions % page_size,
        cu_q_lens=torch.arange(requests + 1, dtype=torch.int32, device=device) * count,
        kv_lens=torch.full((requests,), first + count, dtype=torch.int32, device=device),
        max_q_len=count,
        max_kv_len=first + count,
    )
    return Step(
        token_ids=token_ids.flatten(),
        positions=positions,
        groups=(group,),
        logits_rows=torch.arange(requests * count, device=device),
        wants_all=True,
    )
