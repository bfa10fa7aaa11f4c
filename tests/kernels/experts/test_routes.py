"""Routes of experts: the front and the GPU's kernel, by Triton's interpreter, one row at a time."""

from __future__ import annotations

import pytest
import torch
from weft.kernels.ops.moe.spec import SOFTMAX
from weft.kernels.ops.routes import RouteRecord, record_reference, record_routes
from weft.testing.kernels.kernel_checks import fresh_seed

PAGE = 5


def case(dtype: torch.dtype, top_k: int) -> tuple[RouteRecord, torch.Tensor]:
    """Routes of three layers at the end of pages of 300 bytes, and experts of eleven rows."""
    itemsize, width = dtype.itemsize, PAGE * 3 * top_k
    memory = torch.randint(0, 100, (9, 300), dtype=torch.uint8)
    used = memory[:, 300 - width * itemsize :].view(dtype)
    begin = used.storage_offset()
    strides = (used.stride(0), 3 * top_k, top_k, 1)
    routes = used.as_strided((9, PAGE, 3, top_k), strides, begin)
    places = torch.randperm(9 * PAGE)[:11]
    ids = torch.randint(0, 2 ** (8 * itemsize), (11, top_k), dtype=torch.int32)
    return RouteRecord(routes, places, 1), ids


@pytest.mark.parametrize("top_k", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
@pytest.mark.parametrize(
    "way", ["cpu", pytest.param("triton", marks=pytest.mark.needs("triton-interpreter"))]
)
def test_rows_go_to_their_places_and_nothing_else_changes(
    way: str, dtype: torch.dtype, top_k: int
) -> None:
    fresh_seed()
    record, ids = case(dtype, top_k)
    expected = record.routes.clone()
    for row, place in enumerate(record.places.tolist()):
        for number in range(top_k):
            value = int(ids[row, number])
            value -= 2**16 if dtype == torch.int16 and value >= 2**15 else 0
            expected[place // PAGE, place % PAGE, 1, number] = value
    if way == "cpu":
        record_routes(record, ids)
    else:
        from weft.kernels.ops.routes import triton_record

        triton_record.record(*record[:2], record.layer, ids)
    assert (record.routes == expected).all()


def test_ranks_with_a_share_record_the_numbers_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.ops.moe import gpu, route

    fresh_seed()
    record, _ = case(torch.uint8, 2)
    logits = torch.randn(11, 6)
    placement = torch.tensor([3, 0, 3, 1, 3, 2], dtype=torch.int32)
    own = route(logits, 2, renormalise=True, placement=placement, record=record)
    whole = route(logits, 2, renormalise=True)
    found = record.routes[record.places // PAGE, record.places % PAGE, 1]
    assert (found == whole.ids).all()
    assert (own.ids == placement[whole.ids]).all()
    # The GPU's way takes the same steps.
    found.zero_()
    monkeypatch.setattr(gpu, "route", lambda *given, **_: whole if len(given) == 4 else own)
    ids, shares = gpu.recorded_route(logits, 2, True, SOFTMAX, placement, record)
    assert (ids == own.ids).all()
    assert (shares == whole.weights).all()


def test_what_does_not_fit_is_refused() -> None:
    record, ids = case(torch.uint8, 3)
    for wrong in (ids.long(), ids[:5], ids[:, :2]):
        with pytest.raises(ValueError, match="experts"):
            record_routes(record, wrong)
    with pytest.raises(ValueError, match="routes"):
        record_routes(record._replace(routes=record.routes.float()), ids)
    record_reference(record, ids)
