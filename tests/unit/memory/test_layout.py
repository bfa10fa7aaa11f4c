"""What layouts say of themselves, as pages on disks and in stores are named by it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from weft.contract.layout import CacheLayout, PagedPlane, PageGroup, StatePart, StatePlane
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.model.heads.place import HeadPlace
from weft.engine.parallel.shards import layout_of_rank
from weft.gateway.fleet.worker import _layout
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.v1 import kv_pb2, worker_pb2

HEAD = bytes(range(32))
HEAD_HEX = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"


class Shape(NamedTuple):
    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    page_size: int


DEMO = Shape(30, 3, 64, torch.float32, 16)
LARGE = Shape(80, 8, 128, torch.bfloat16, 16)
OTHER = Shape(6, 2, 24, torch.float16, 8)

DESCRIBED = [
    (
        DEMO,
        b"",
        "plane=target;layers=30;heads=3;parts=k:64:float32,v:64:float32;page_size=16;"
        "order=head,layer,part,position,dim",
        737_280,
    ),
    (
        LARGE,
        b"",
        "plane=target;layers=80;heads=8;parts=k:128:bfloat16,v:128:bfloat16;page_size=16;"
        "order=head,layer,part,position,dim",
        5_242_880,
    ),
    (
        LARGE,
        HEAD,
        "plane=target;layers=81;heads=8;parts=k:128:bfloat16,v:128:bfloat16;page_size=16;"
        f"order=head,layer,part,position,dim;draft={HEAD_HEX}",
        5_308_416,
    ),
    (
        OTHER,
        HEAD,
        "plane=target;layers=7;heads=2;parts=k:24:float16,v:24:float16;page_size=8;"
        f"order=head,layer,part,position,dim;draft={HEAD_HEX}",
        10_752,
    ),
]
"""Literals: a change of one makes every page that was kept under it another's."""


@pytest.mark.parametrize(("shape", "draft", "text", "page_bytes"), DESCRIBED)
def test_a_models_layout(shape: Shape, draft: bytes, text: str, page_bytes: int) -> None:
    planes = [(shape.heads, shape.dim, list(range(shape.layers)))]
    config = SimpleNamespace(page_planes=[(None, planes)])
    model: Any = SimpleNamespace(stage=None, config=config, dtype=shape.dtype)
    model.layout_of = partial(DecoderOnlyLM.layout_of, model)
    layout = model.layout_of(None, shape.page_size)
    if draft:
        head = SimpleNamespace(digest=draft, place=HeadPlace(shape.layers))
        drafted = SimpleNamespace(_target=model, head=head)
        layout = DraftedModel.layout_of(cast(DraftedModel, drafted), None, shape.page_size)
    assert layout.describe() == text
    assert layout.page_bytes == page_bytes
    pool = torch.empty(layout.pool_shape(3), dtype=shape.dtype)
    layers = shape.layers + bool(draft)
    assert pool.shape == (3, shape.heads, layers, 2, shape.page_size, shape.dim)
    assert pool[0].nbytes == page_bytes


@pytest.mark.parametrize(("shape", "draft", "text"), [case[:3] for case in DESCRIBED])
def test_the_gateway_finds_the_same_name(shape: Shape, draft: bytes, text: str) -> None:
    dtype = str(shape.dtype).removeprefix("torch.")
    parts = [kv_pb2.PlanePart(name=name, dim=shape.dim, dtype=dtype) for name in ("k", "v")]
    plane = kv_pb2.Plane(
        name="target",
        layers=shape.layers + bool(draft),
        heads=shape.heads,
        parts=parts,
        draft_digest=draft,
    )
    info = worker_pb2.GetInfoResponse(planes=[plane], page_size=shape.page_size)
    assert _layout(info) == text
    assert _layout(worker_pb2.GetInfoResponse(page_size=shape.page_size)) == ""


def test_layers_with_a_window_are_a_group_of_their_own() -> None:
    planes = [(None, [(2, 24, [1])]), (21, [(2, 24, [0, 2])])]
    config = SimpleNamespace(page_planes=planes)
    model: Any = SimpleNamespace(stage=None, config=config, dtype=torch.float16)
    layout = DecoderOnlyLM.layout_of(model, None, 8)
    rest = "heads=2;parts=k:24:float16,v:24:float16;page_size=8;order=head,layer,part,position,dim"
    text = f"plane=target;layers=1;{rest}|plane=window-21;layers=2;{rest}"
    assert layout.describe() == text
    assert [group.reach for group in layout.groups] == [None, 21]
    shapes = [layout.pool_shape(5, group) for group in (0, 1)]
    assert shapes == [(5, 2, 1, 2, 8, 24), (5, 2, 2, 2, 8, 24)]
    assert [group.page_bytes(8) for group in layout.groups] == [1536, 3072]
    parts = [kv_pb2.PlanePart(name=name, dim=24, dtype="float16") for name in ("k", "v")]
    planes = [
        kv_pb2.Plane(name=name, layers=layers, heads=2, parts=parts)
        for name, layers in (("target", 1), ("window-21", 2))
    ]
    assert _layout(worker_pb2.GetInfoResponse(planes=planes, page_size=8)) == text


def test_the_gateway_finds_the_name_of_pages_of_one_part() -> None:
    plane = PagedPlane(layers=3, heads=1, dim=576, dtype="bfloat16", parts=("latent",))
    part = kv_pb2.PlanePart(name="latent", dim=576, dtype="bfloat16")
    described = kv_pb2.Plane(name="target", layers=3, heads=1, parts=[part])
    layout = CacheLayout.of_plane(plane, 16)
    assert layout.page_bytes == 3 * 16 * 576 * 2
    info = worker_pb2.GetInfoResponse(planes=[described], page_size=16)
    assert _layout(info) == layout.describe()


def test_layers_with_other_heads_have_a_plane_of_their_own_in_the_same_pages() -> None:
    planes = [(None, [(2, 24, [0, 2, 3]), (1, 32, [1])]), (21, [(4, 16, [4])])]
    config = SimpleNamespace(page_planes=planes)
    model: Any = SimpleNamespace(stage=None, config=config, dtype=torch.float16)
    layout = DecoderOnlyLM.layout_of(model, None, 8)
    names = [plane.name for group in layout.groups for plane in group.planes]
    assert names == ["target", "target-1x32", "window-21"]
    widths = [2 * 24 * 3 * 2, 32 * 2, 4 * 16 * 2]
    assert layout.pool_shape(5) == (5, 8 * (widths[0] + widths[1]))
    assert [group.page_bytes(8) for group in layout.groups] == [
        16 * (widths[0] + widths[1]), 16 * widths[2]
    ]  # fmt: skip
    planes_of = [plane for group in layout.groups for plane in group.planes]
    assert CacheLayout.of_planes(planes_of, 8).describe() == layout.describe()
    pool = torch.zeros(layout.pool_shape(5))
    first, second = (
        PlaneInPage(before, widths[0] + widths[1], 0, 0, heads, layers, 2, dim).of(pool)
        for before, heads, layers, dim in ((0, 2, 3, 24), (widths[0], 1, 1, 32))
    )
    first += 1.0
    second += 2.0
    assert pool[:, : 8 * widths[0]].eq(1).all()
    assert pool[:, 8 * widths[0] :].eq(2).all()


def test_states_of_recurrent_layers_are_named_behind_the_pages() -> None:
    parts = (StatePart("state", (4, 8, 8), "float32"), StatePart("tail", (96, 3), "bfloat16"))
    ring = (StatePart("inputs", (96,), "bfloat16"), StatePart("decay", (4,), "float32"))
    rows = (StatePart("hidden", (32,), "float32"),)
    states = StatePlane(name="delta", layers=6, parts=parts, ring=ring, rows=rows)
    pages = CacheLayout.of_plane(PagedPlane(layers=2, heads=2, dim=16, dtype="bfloat16"), 16)
    layout = CacheLayout(16, pages.groups, states)
    text = "|states=delta;layers=6;parts=state:256:float32,tail:288:bfloat16;rows=hidden:32:float32"
    assert layout.describe() == pages.describe() + text
    assert (states.block_bytes, states.ring_row_bytes) == (
        6 * (1024 + 576) + 128,
        6 * (192 + 16) + 128,
    )
    of_pages = [kv_pb2.PlanePart(name=name, dim=16, dtype="bfloat16") for name in ("k", "v")]
    of_blocks = [
        kv_pb2.PlanePart(name=part.name, dim=part.size, dtype=part.dtype) for part in parts
    ]
    planes = [
        kv_pb2.Plane(name="target", layers=2, heads=2, parts=of_pages),
        kv_pb2.Plane(name="delta", layers=6, parts=of_blocks),
        kv_pb2.Plane(
            name="delta-rows",
            layers=1,
            parts=[kv_pb2.PlanePart(name="hidden", dim=32, dtype="float32")],
        ),
    ]
    assert _layout(worker_pb2.GetInfoResponse(planes=planes, page_size=16)) == layout.describe()


def test_a_rank_has_its_heads_of_every_group_and_of_states() -> None:
    def layout(heads: int, of_states: int) -> CacheLayout:
        planes = [
            PagedPlane(name=name, layers=2, heads=heads, dim=16, dtype="float32")
            for name in ("target", "window-24")
        ]
        groups = PageGroup((planes[0],)), PageGroup((planes[1],), 24)
        state = (StatePart("state", (of_states, 8), "float32"),)
        return CacheLayout(16, groups, StatePlane(name="s", layers=1, parts=state, ring=state))

    assert layout_of_rank(layout(6, 12), 1) == layout(6, 12)
    assert layout_of_rank(layout(6, 12), 3) == layout(2, 4)
    assert layout_of_rank(layout(2, 8), 8) == layout(1, 1)
