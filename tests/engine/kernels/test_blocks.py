"""Fused products against fp64 arithmetic, and rows that do not depend on each other."""

import math
import sys
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.kernels.blocks import Place, added, angles, gated_product, projected, turned
from zerowaste_vae.engine.kernels.blocks.schedules import Schedule

sys.path.insert(0, str(Path(__file__).parent))
from helpers import TOLERANCE, error

pytestmark = pytest.mark.usefixtures("interpreter")
EPS, SMALL = 1e-6, Schedule(16, 16, 16, 4, 2)
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])
TYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def normal(*shape, dtype, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype)


def normed(x, weight=1.0):
    return x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x, norm, place):
    """Heads [R, heads, head], normalised and turned one angle at a time."""
    head = x.shape[2]
    frames = head // 4 // 2 * 2
    sizes = (frames, (head - frames) // 2, (head - frames) // 2)
    wide, out = normed(x, norm.double()), torch.empty_like(x, dtype=torch.float64)
    for r in range(len(x)):
        token = r % (place.height * place.width)
        where = (place.first + r // (place.height * place.width), token // place.width, token % place.width)
        turns = [p * 10000.0 ** (-2 * i / n) for p, n in zip(where, sizes, strict=True) for i in range(n // 2)]
        for i, angle in enumerate(turns):
            a, b, cos, sin = wide[r, :, 2 * i], wide[r, :, 2 * i + 1], math.cos(angle), math.sin(angle)
            out[r, :, 2 * i], out[r, :, 2 * i + 1] = a * cos - b * sin, a * sin + b * cos
    return out


@BACKENDS
@TYPES
@pytest.mark.parametrize("head", [32, 64])
def test_projected(backend, dtype, head):
    place, rows, heads = Place(5, 3, 4), 24, 2
    c = heads * head
    x, weight = normal(rows, c, dtype=dtype), normal(3 * c, c, dtype=dtype, scale=c**-0.5)
    bias, norms = normal(3 * c, dtype=dtype), normal(2, head, dtype=torch.float32)
    query, keys = (torch.full(s, torch.nan, dtype=dtype) for s in ((rows, heads, head), (rows, 2, heads, head)))
    for q, k in ((query, None), (None, keys)):
        projected(x, weight, bias, norms, angles(8, head, x.device), place, EPS, q, k, backend=backend, schedule=SMALL)
    both = torch.empty_like(query), torch.empty_like(keys)
    projected(x, weight, bias, norms, angles(8, head, x.device), place, EPS, *both, backend=backend, schedule=SMALL)
    assert torch.equal(both[0], query) and torch.equal(both[1], keys)
    made = (normed(x) @ weight.double().T + bias.double()).view(rows, 3, heads, head)
    assert error(query, rotated(made[:, 0], norms[0], place)) < TOLERANCE[dtype]
    assert error(keys[:, 0], rotated(made[:, 1], norms[1], place)) < TOLERANCE[dtype]
    assert error(keys[:, 1], made[:, 2]) < TOLERANCE[dtype]


@BACKENDS
@pytest.mark.parametrize("head", [32, 64])
def test_turned(backend, head):
    place, heads = Place(5, 3, 4), 2
    both, bias, norm = torch.randn(24, 2, heads, head), torch.randn(heads * head), torch.randn(head)
    x, other = both[:, 0], both[:, 1].clone()
    want = rotated(x.double() + bias.double().view(heads, head), norm, place)
    turned(x, bias, norm, angles(8, head, x.device), place, EPS, backend=backend)
    assert error(x, want) < 1e-5
    assert torch.equal(both[:, 1], other)


@BACKENDS
@TYPES
@pytest.mark.parametrize("biased", [False, True])
def test_gated(backend, dtype, biased):
    rows, c, d = 21, 32, 48
    x, gate, up = normal(rows, c, dtype=dtype), *(normal(d, c, dtype=dtype, scale=c**-0.5) for _ in range(2))
    biases = normal(2, d, dtype=dtype) if biased else None
    out = torch.full((rows, d), torch.nan, dtype=dtype)
    joined = None if biases is None else biases.T.flatten()
    gated_product(x, torch.stack((gate, up), 1).flatten(0, 1), joined, EPS, out, backend=backend, schedule=SMALL)
    more = torch.zeros(2, d, dtype=torch.float64) if biases is None else biases.double()
    g, u = normed(x) @ gate.double().T + more[0], normed(x) @ up.double().T + more[1]
    assert error(out, g * g.sigmoid() * u) < TOLERANCE[dtype]


@BACKENDS
@TYPES
@pytest.mark.parametrize("biased, more", [(False, False), (True, False), (True, True)])
def test_added(backend, dtype, biased, more):
    rows, c, k = 21, 32, 64
    x, y, weight = normal(rows, c, dtype=dtype), normal(rows, k, dtype=dtype), normal(c, k, dtype=dtype, scale=k**-0.5)
    bias = normal(c, dtype=dtype) if biased else None
    second = (normal(rows, c, dtype=dtype), normal(c, c, dtype=dtype, scale=c**-0.5)) if more else None
    want = x.double() + y.double() @ weight.double().T
    want += 0 if bias is None else bias.double()
    want += 0 if second is None else second[0].double() @ second[1].double().T
    added(x, y, weight, bias, second, backend=backend, schedule=SMALL)
    assert error(x, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_not_finite(bad):
    """A row that is not finite does not give finite results, and no other row changes."""
    x, weight = (normal(*s, dtype=torch.float16) for s in ((20, 32), (96, 32)))
    want, got = torch.empty(20, 48, dtype=torch.float16), torch.empty(20, 48, dtype=torch.float16)
    gated_product(x, weight, None, EPS, want, backend="triton", schedule=SMALL)
    x[3, 5] = bad
    gated_product(x, weight, None, EPS, got, backend="triton", schedule=SMALL)
    others = torch.arange(20) != 3
    assert not got[3].isfinite().any() and torch.equal(got[others], want[others])
