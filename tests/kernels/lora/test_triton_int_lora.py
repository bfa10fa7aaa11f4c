"""Adapters on products with integer weights, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gpu_groups as groups_linear
from weft.kernels.ops.linear import triton_int8 as int8_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.shared.formats.packed_groups import pack_groups
from weft.kernels.shared.formats.quantised import quantise_channels
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.kernels.group_cases import draw_groups
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import make_lora, poison_new_memory, segments_of

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.full), 4])
def test_fixed_rows_do_not_depend_on_others_adapters(bits: int) -> None:
    fresh_seed()
    k, columns, slots = 80, 96, [0, 1, 0]
    case = make_lora(k, columns, [0, 8], torch.float16)
    lora = LoraAddition((case.weights,), 0, segments_of(slots))
    x, residual = torch.randn(3, k).half(), torch.randn(3, columns).half()
    if bits == 4:
        form, module = pack_groups(draw_groups(columns, k, 32, "offsets")), groups_linear
    else:
        form, module = quantise_channels(torch.randn(columns, k) / k**0.5), int8_linear
    w = LinearWeight(columns, k, torch.float16, True, form, None, is_fixed=True)
    with as_on_gpu():
        for run in (
            lambda lora: module.linear(x, w, residual, lora=lora),
            lambda lora: module.gate_up_silu(x, w, lora),
        ):
            plain, added = run(None), run(lora)
            assert torch.equal(plain[::2], added[::2])
            assert not torch.equal(plain[1], added[1])


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.full), 4])
def test_few_rows_with_adapters(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    k, columns, slots = 80, 96, [2, 1]
    case = make_lora(k, columns, [0, 8, 20], torch.float16)
    lora = LoraAddition((case.weights,), 0, segments_of(slots))
    x = torch.randn(2, k).half()
    if bits == 4:
        groups = draw_groups(columns, k, 32, "offsets")
        form, weight, module = pack_groups(groups), groups.dequantised(torch.float32), groups_linear
    else:
        form = quantise_channels(torch.randn(columns, k) / k**0.5)
        weight, module = form.dequantised(torch.float32), int8_linear
    w = LinearWeight(columns, k, torch.float16, True, form, None)

    def peer(dtype: torch.dtype) -> torch.Tensor:
        wide = x.to(dtype)
        product = F.linear(wide, weight.to(dtype))
        # The product is rounded before what adapters add.
        product = product.half().to(dtype) if dtype != torch.float64 else product
        gate, up = case.add(product, wide, slots, 0).chunk(2, dim=1)
        return F.silu(gate) * up

    with as_on_gpu():
        out = module.gate_up_silu(x, w, lora)
    assert_as_exact(out, peer(torch.float32).half(), peer(torch.float64))
