"""Sums, tokens and logits of ranks with a GPU each, by Triton's interpreter in a process a rank."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from weft.contract.errors import ConfigError
from weft.engine.parallel.device_peers import MappedCounters
from weft.testing.kernels.peer_ranks import EPS, KINDS, cases_of, run_ranks

pytestmark = pytest.mark.needs("triton-interpreter")


@pytest.mark.full_after(1)
@pytest.mark.parametrize("size", [3, 2, 4])
def test_all_ranks_get_the_same_bits_of_the_right_sums(size: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)

    found, digests = run_ranks(size, seed, str(tmp_path / "store"))

    assert len(set(digests)) == 1
    for kind, results in zip(KINDS, found, strict=True):
        for case, one in zip(cases_of(size, kind, seed), results, strict=True):
            added = torch.zeros(case.stream.shape)
            for part in case.parts:
                added += part
            total = (case.stream + added).to(kind.dtype)
            assert torch.equal(one.total, total)
            assert torch.equal(one.tap, total)
            assert torch.equal(one.plain, total)
            wide = total.double()
            scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS)
            near = 1e-5 if kind.dtype == torch.float32 else 2**-10
            normed = wide * scale * case.gain
            torch.testing.assert_close(one.normed.double(), normed, atol=near, rtol=near)
            assert torch.equal(one.tokens, case.tokens)
            assert torch.equal(one.logits, case.logits)


def test_counters_are_unmapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often an engine is closed."""
    status, unmapped = 0, list[int]()
    calls = SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, flags: status,
        cudaHostUnregister=unmapped.append,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    counters = MappedCounters((4096, 8192), torch.device("cuda:1"), "pp", 2)
    counters.close()
    counters.close()
    assert unmapped == [4096]
    status = 712
    with pytest.raises(ConfigError, match="pp = 2: cudaHostRegister: error 712"):
        MappedCounters((4096, 8192), torch.device("cuda:1"), "pp", 2)
