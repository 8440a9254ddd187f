"""Passes between products against fp64, and what their bits may depend on."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from zerowaste_vae.engine.families.mage.kernels.mixing import blocks, gates, layer_normed, mixed, unwindowed, windowed

sys.path.insert(0, str(Path(__file__).parent))
from helpers import error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_norm(backend, dtype, adds):
    """Rows of one of two streams, first joined by a branch's result, which stays in the stream, beside a vector that is
    not normalised."""
    both, later = torch.randn(5, 2 * 48).to(dtype), torch.randn(48)
    more, weight, bias = torch.randn(5, 48).to(dtype), torch.rand(48) + 0.5, torch.randn(48)
    x, kept, out = both[:, 48:], both[:, :48].clone(), torch.empty(5, 48, dtype=dtype)
    total = (x + more if adds else x).clone()
    stream = (x.float() + more.float() + later).to(dtype) if adds else total
    ulp = torch.finfo(dtype).eps if adds and dtype == torch.bfloat16 else 0  # which the interpreter cuts off
    layer_normed(x, weight, bias, 1e-6, out, more=(more, later) if adds else None, backend=backend)
    torch.testing.assert_close(x, stream, rtol=ulp, atol=0)
    assert torch.equal(both[:, :48], kept)
    want = F.layer_norm(total.double(), (48,), weight.double(), bias.double(), 1e-6)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gates(backend, dtype):
    """In several steps and programs, of which the last is not full."""
    c, count = 200, 77
    sums, weight, bias, second = torch.randn(c) * count, torch.randn(c, c) / 14, torch.randn(c), torch.randn(c, c)
    out = torch.empty(c, c, dtype=dtype)
    gates(sums, count, weight, bias, second, out, backend=backend)
    want = second.double() * torch.sigmoid(weight.double() @ (sums.double() / count) + bias.double())
    assert error(out, want) < (5e-4 if dtype == torch.float16 else 1e-6)
    sums[3] = float("nan")
    gates(sums, count, weight, bias, second, out, backend=backend)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(4, 8), (3, 5), (9, 1)], ids=str)
def test_windows(backend, dtype, size):
    """Whole ones, and such as go beyond the picture; what is added to it comes from where it was copied to."""
    side, c = 4, 24
    picture = torch.randn(*size, c).to(dtype)
    rows, columns = (-(-n // side) for n in size)
    padded = picture.permute(2, 0, 1).float()[None]
    padded = F.pad(padded, (0, columns * side - size[1], 0, rows * side - size[0]), mode="replicate")[0].to(dtype)
    want = padded.view(c, rows, side, columns, side).permute(1, 3, 2, 4, 0).reshape(-1, c)
    flat = torch.empty(want.shape, dtype=dtype)
    windowed(picture, side, flat, backend=backend)
    assert torch.equal(flat, want)
    total = picture.clone()
    unwindowed(flat, side, total, backend=backend)
    assert torch.equal(total, 2 * picture)
