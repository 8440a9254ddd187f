"""Passes between products against fp64, and what their bits may depend on."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from zerowaste_vae.engine.kernels.mixing import blocks, layer_normed, mixed

sys.path.insert(0, str(Path(__file__).parent))
from helpers import error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_norm(backend, dtype, adds):
    """Rows of one of two streams, first joined by a branch's result, which stays in the stream."""
    both = torch.randn(5, 2 * 48).to(dtype)
    more, weight, bias = torch.randn(5, 48).to(dtype), torch.rand(48) + 0.5, torch.randn(48)
    x, kept, out = both[:, 48:], both[:, :48].clone(), torch.empty(5, 48, dtype=dtype)
    stream = (x + more if adds else x).clone()
    ulp = torch.finfo(dtype).eps if adds and dtype == torch.bfloat16 else 0  # which the interpreter cuts off
    layer_normed(x, weight, bias, 1e-6, out, more=more if adds else None, backend=backend)
    torch.testing.assert_close(x, stream, rtol=ulp, atol=0)
    assert torch.equal(both[:, :48], kept)
    want = F.layer_norm(x.double(), (48,), weight.double(), bias.double(), 1e-6)
    assert error(out, want) < {torch.float16: 5e-4, torch.bfloat16: 8e-3, torch.float32: 1e-6}[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(7, 9), (1, 3), (5, 40)], ids=str)
def test_taps_and_sums(backend, dtype, size):
    h, w, c = *size, 144
    x, weight, bias = torch.randn(h, w, c).to(dtype), torch.randn(9, c) / 3, torch.randn(c)
    out, sums = torch.empty_like(x), torch.full((blocks(h * w), c), torch.nan)
    mixed(x, weight, bias, out, sums, backend=backend)
    taps = weight.t().reshape(c, 1, 3, 3).double()
    want = F.gelu(F.conv2d(x.double().permute(2, 0, 1)[None], taps, bias.double(), padding=1, groups=c))[0]
    assert error(out, want.permute(1, 2, 0)) < (5e-4 if dtype == torch.float16 else 8e-3)
    torch.testing.assert_close(sums.sum(0), want.sum((1, 2)).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays(backend, value):
    x = torch.randn(4, 6, 32)
    x[2, 3, 5] = value
    out, sums = torch.empty_like(x), torch.empty(blocks(24), 32)
    mixed(x, torch.rand(9, 32), torch.zeros(32), out, sums, backend=backend)
    assert not sums[:, 5].isfinite().all() and sums[:, :5].isfinite().all()
    rows = torch.empty(24, 32)
    layer_normed(x.view(24, 32), torch.ones(32), torch.zeros(32), 1e-6, rows, backend=backend)
    assert rows[2 * 6 + 3].isnan().any() and rows[:15].isfinite().all()
