"""The common structure of decoder-only models: embedding, layers, final norm, LM head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.layout import CacheLayout, PagedPlane, PageGroup, plane_beside, window_plane
from weft.engine.model.layers.layer import StackLayer
from weft.engine.model.pooled_heads import DenseLayers, read_dense
from weft.engine.model.stack import Stack
from weft.engine.model.stage import Stage
from weft.engine.model.step import Step
from weft.engine.model.weights.computed_format import dtype_name
from weft.engine.model.weights.specs import Shard
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import weight_rows
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.lora.spec import LoraStep
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.kernels.ops.replaced import hide_unknown_tokens, replaced_linear
from weft.kernels.ops.stream.taps import Taps


class LMHead:
    def __init__(self, weight: LinearWeight) -> None:
        self.weight = weight

    def __call__(self, hidden: torch.Tensor, lora: LoraStep | None = None) -> torch.Tensor:
        """[L, hidden] and the adapters of these L rows -> [L, vocab] float32."""
        added = None if lora is None else lora.of("lm_head", 0)
        if lora is not None and lora.heads is not None:
            return replaced_linear(hidden, self.weight, lora.heads, lora.segments, added)
        return linear(hidden, self.weight, out_dtype=torch.float32, lora=added)

    def part(self, tokens: slice) -> LinearWeight | None:
        """The weight of consecutive tokens; None: the weight's number format cannot be cut."""
        w = self.weight
        if not isinstance(w.form, PlainForm) or w.bias is not None:
            return None
        size = tokens.stop - tokens.start
        return replace(w, out_features=size, form=PlainForm(w.form.data[tokens]))

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A copy of the weight's rows, [N, hidden], of N tokens, whose ids are [N] int64 on its
        device.
        """
        return weight_rows(self.weight, token_ids)


class DecoderOnlyLM:
    """A `Model` of layers over a residual stream; its constructor calls `_take`."""

    def _take(
        self, config: ModelConfig, weights: Weights, stack: Stack, head_name: str = "lm_head"
    ) -> None:
        self.config = config
        self.stage = weights.stage
        """The layers that run here; None: all of them."""
        self.dtype = weights.dtype
        self.model = stack
        self._lm_head = _read_lm_head(config, weights, stack.embed_tokens, head_name)
        self.classes: DenseLayers | None = None
        """None: the model has no classification head."""
        if config.head == "classes":
            score = read_dense(weights, "score", config.num_labels, config.hidden_size, bias=False)
            self.classes = DenseLayers([score])

    @property
    def lm_head(self) -> LMHead:
        """Only for models that have an LM head."""
        assert self._lm_head is not None, "the model has no LM head"
        return self._lm_head

    @property
    def waits_for_layers(self) -> bool:
        """As of its stack."""
        return self.model.waits_for_layers

    def kv_layout(self, page_size: int) -> CacheLayout:
        return self.layout_of(self.stage, page_size)

    def layout_of(self, stage: Stage | None, page_size: int) -> CacheLayout:
        """The layout of pages with the layers of a stage; None: with all layers."""
        return paged_layout(planes_of_stage(self.config, stage), self.dtype, page_size)

    def forward(self, step: Step, pool: torch.Tensor, taps: Taps | None = None) -> torch.Tensor:
        """Runs one ragged step: [L, hidden], final hidden states of `step.logits_rows`. `taps` gets
        the inputs of the layers that it names.
        """
        return self.model(step, pool, taps)

    def forward_all(self, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """As `forward`, but returns the hidden states of all rows, [T, hidden]."""
        return self.model.of_all_rows(step, pool)

    def logits(self, hidden: torch.Tensor, lora: LoraStep | None = None) -> torch.Tensor:
        """[L, hidden] and the adapters of these L rows -> [L, num_embeddings] float32."""
        logits = self.lm_head(hidden, lora)
        self.finish_logits(logits, slice(None))
        if self.config.num_added_tokens:
            hide_unknown_tokens(logits, self.config.vocab_size, lora)
        return logits

    def logits_part(self, hidden: torch.Tensor, tokens: slice) -> torch.Tensor | None:
        weight = self.lm_head.part(tokens)
        if weight is None or self.config.num_added_tokens:
            return None
        logits = linear(hidden, weight, out_dtype=torch.float32)
        self.finish_logits(logits, tokens)
        return logits

    def finish_logits(self, logits: torch.Tensor, tokens: slice) -> None:
        """Changes logits of the tokens of this range in place, as the model does after its product
        with the LM head. A model without such a change does nothing.
        """


def _read_lm_head(
    config: ModelConfig, weights: Weights, embed_tokens: torch.Tensor, name: str
) -> LMHead | None:
    if config.head != "tokens":
        return None
    weights = weights.of_head()
    if config.tie_word_embeddings:
        return LMHead(weights.packed(embed_tokens))
    return LMHead(weights.packed(weights.vocabulary(name, *vocabulary_size(config))))


PagePlanes = Sequence[tuple[int | None, list[tuple[int, int, list[int]]]]]
"""As `ModelConfig.page_planes`."""


def paged_layout(page_planes: PagePlanes, dtype: torch.dtype, page_size: int) -> CacheLayout:
    """The layout of pages of K and V by layer."""
    groups = []
    for reach, planes in page_planes:
        name = "target" if reach is None else window_plane(reach)
        made = (
            PagedPlane(
                name=plane_beside(name, heads, dim) if number else name,
                layers=len(layers),
                heads=heads,
                dim=dim,
                dtype=dtype_name(dtype),
            )
            for number, (heads, dim, layers) in enumerate(planes)
        )
        groups.append(PageGroup(tuple(made), reach))
    return CacheLayout(page_size, tuple(groups))


def planes_of_stage(config: ModelConfig, stage: Stage | None) -> PagePlanes:
    """`ModelConfig.page_planes` of the layers whose K and V lie in the pages of this process."""
    if stage is None:
        return config.page_planes
    return [
        (reach, [(heads, dim, stage.of_pages(layers)) for heads, dim, layers in planes])
        for reach, planes in config.page_planes
    ]


def place_in_pools(
    config: ModelConfig,
    layers: Sequence[StackLayer],
    stage: Stage | None = None,
    shard: Shard = Shard(),  # noqa: B008 - frozen
) -> None:
    """Assigns the layers of a stack to page groups. Call it before runs are made."""
    places = places_in_pools(planes_of_stage(config, stage), shard)
    for number in config.attention_layers:
        if (source := config.kv_source(number)) in places:
            layers[number].mixer.move(*places[source])


def places_in_pools(
    page_planes: PagePlanes,
    shard: Shard = Shard(),  # noqa: B008 - frozen
) -> dict[int, tuple[int, int, PlaneInPage | None]]:
    """The page group, the layer in its pool, and the plane of each layer; None: its group has one
    plane. Of several planes a rank has its heads, in pages that all ranks of a CPU share.
    """
    places: dict[int, tuple[int, int, PlaneInPage | None]] = {}
    for group, (_, planes) in enumerate(page_planes):
        vectors = [2 * heads * len(numbers) for heads, _, numbers in planes]
        widths = [count * dim for count, (_, dim, _) in zip(vectors, planes, strict=True)]
        for index, (heads, dim, numbers) in enumerate(planes):
            own = shard.of(heads, 1, may_repeat=True)
            others = own.start * 2 * len(numbers)
            plane = PlaneInPage(
                sum(widths[:index]) + others * dim,
                sum(widths),
                sum(vectors[:index]) + others,
                sum(vectors),
                own.stop - own.start,
                len(numbers),
                2,
                dim,
            )
            for in_plane, number in enumerate(numbers):
                places[number] = group, in_plane, plane if len(planes) > 1 else None
    return places


def vocabulary_size(config: ModelConfig) -> tuple[int, int, int]:
    """Rows, columns and additional rows of zeros of the embedding and the LM head."""
    return config.vocab_size, config.hidden_size, config.num_added_tokens
