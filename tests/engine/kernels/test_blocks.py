"""Fused products against fp64 arithmetic, and rows that do not depend on each other."""

import math
import sys
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.families.ltx_diffusion.kernels.blocks import (
    Place,
    added,
    angles,
    feed_forward,
    gated_product,
    projected,
    turned,
    turned_columns,
)
from zerowaste_vae.engine.families.ltx_diffusion.kernels.blocks.schedules import GROUP, Schedule
from zerowaste_vae.engine.kernels.targets import FP8
from zerowaste_vae.engine.kernels.tokens import LIMITS

sys.path.insert(0, str(Path(__file__).parent))
from helpers import CAST_STEP, TOLERANCE, error

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


@TYPES
@pytest.mark.parametrize("biased, more", [(False, False), (True, False), (True, True)])
def test_feed_forward(dtype, biased, more):
    """All after the attention, by its reference; the kernel runs on a GPU alone."""
    rows, c, d = 21, 32, 64
    x, gates = normal(rows, c, dtype=dtype), normal(2 * d, c, dtype=dtype, scale=c**-0.5)
    down, biases = normal(c, d, dtype=dtype, scale=d**-0.5), normal(2 * d, dtype=dtype) if biased else None
    product = normal(rows, c, dtype=dtype), normal(c, c, dtype=dtype, scale=c**-0.5), normal(c, dtype=dtype)
    g, u = (normed(x) @ gates.double().T + (0 if biases is None else biases.double())).unflatten(1, (-1, 2)).unbind(2)
    want = x.double() + (g * g.sigmoid() * u) @ down.double().T
    want += product[0].double() @ product[1].double().T + product[2].double() if more else 0
    made, apart, joined = (x.clone() for _ in range(3))
    feed_forward(made, gates, biases, EPS, turned_columns(down), more=product if more else None)
    assert error(made, want) < TOLERANCE[dtype]
    added(apart, *product)
    feed_forward(apart, gates, biases, EPS, turned_columns(down))
    feed_forward(joined, gates, biases, EPS, turned_columns(down), product)
    assert torch.equal(apart, joined)


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


NARROW = pytest.mark.parametrize("kind", [torch.int8, FP8])
#: Of a product whose operands were rounded to 8 bit, beside fp64; the interpreter truncates where a card rounds to fp8.
ROUNDING = {torch.int8: 2e-2, FP8: 8e-2}
#: The same beside a reference that rounds, too.
BESIDE = {torch.int8: 8e-3, FP8: CAST_STEP[FP8]}


def coded(weight, kind):
    """8-bit rows of a weight and their scales"""
    scales = weight.float().abs().amax(1) / LIMITS[kind]
    scaled = weight.float() / scales[:, None]
    return (scaled.round() if kind == torch.int8 else scaled).to(kind), scales


@NARROW
@TYPES
@pytest.mark.parametrize("head", [32, 64])
def test_narrow_projected(kind, dtype, head):
    place, rows, heads = Place(5, 3, 4), 24, 2
    c = heads * head
    x, weight = normal(rows, c, dtype=dtype, scale=3.0), normal(3 * c, c, dtype=dtype, scale=c**-0.5)
    bias, norms = normal(3 * c, dtype=dtype), normal(2, head, dtype=torch.float32)
    x[7] = 0.0
    codes, columns = coded(weight, kind)
    table, found = angles(8, head, x.device), {}
    for backend in ("triton", "reference"):
        made = [torch.full(s, torch.nan, dtype=dtype) for s in ((rows, heads, head), (rows, 2, heads, head))]
        rest = {"columns": columns, "backend": backend, "schedule": SMALL}
        projected(x, codes, bias, norms, table, place, EPS, *made, **rest)
        alone = [torch.empty_like(t) for t in made]
        projected(x, codes, bias, norms, table, place, EPS, alone[0], None, **rest)
        projected(x, codes, bias, norms, table, place, EPS, None, alone[1], **rest)
        assert all(map(torch.equal, made, alone))
        found[backend] = made
    assert max(map(error, *found.values())) < BESIDE[kind]
    wide = (normed(x) @ weight.double().T + bias.double()).view(rows, 3, heads, head)
    query, keys = found["triton"]
    assert error(query, rotated(wide[:, 0], norms[0], place)) < ROUNDING[kind]
    assert error(keys[:, 0], rotated(wide[:, 1], norms[1], place)) < ROUNDING[kind]
    assert error(keys[:, 1], wide[:, 2]) < ROUNDING[kind]


@NARROW
@TYPES
@pytest.mark.parametrize("biased", [False, True])
def test_narrow_gate(kind, dtype, biased):
    """The gated product and the one after it, at rows that fill no tile and with results of very different sizes."""
    rows, c, d = 21, 32, 2 * GROUP
    x, gate, up = normal(rows, c, dtype=dtype), *(normal(d, c, dtype=dtype, scale=c**-0.5) for _ in range(2))
    up[GROUP:] *= 100
    down, biases = normal(c, d, dtype=dtype, scale=d**-0.5), normal(2 * d, dtype=dtype) if biased else None
    bias, more = normal(c, dtype=dtype), (normal(rows, c, dtype=dtype), normal(c, c, dtype=dtype, scale=c**-0.5))
    codes, columns = coded(torch.stack((gate, up), 1).flatten(0, 1), kind)
    second, its = coded(down, kind)
    found = {}
    for backend in ("triton", "reference"):
        out, scales = torch.empty(rows, d, dtype=kind), torch.full((rows, d // GROUP), torch.nan)
        how = {"backend": backend, "schedule": SMALL}
        gated_product(x, codes, biases, EPS, out, columns=columns, scales=scales, **how)
        sums = [x.clone() for _ in range(2)]
        added(sums[0], out, second, columns=its, scales=scales, **how)
        added(sums[1], out, second, bias, more, columns=its, scales=scales, **how)
        found[backend] = [(out.double().view(rows, -1, GROUP) * scales[..., None]).flatten(1), *sums]
    assert max(map(error, *found.values())) < BESIDE[kind]
    both = torch.zeros(2, d, dtype=torch.float64) if biases is None else biases.double().view(d, 2).T
    g, u = normed(x) @ gate.double().T + both[0], normed(x) @ up.double().T + both[1]
    inner = g * g.sigmoid() * u
    for part in (slice(GROUP), slice(GROUP, None)):  # each group keeps its own precision
        assert error(found["triton"][0][:, part], inner[:, part]) < 1.5 * ROUNDING[kind]
    wide = inner @ down.double().T
    assert error(found["triton"][1].double() - x.double(), wide) < 2 * ROUNDING[kind]
    wide += bias.double() + more[0].double() @ more[1].double().T
    assert error(found["triton"][2].double() - x.double(), wide) < 2 * ROUNDING[kind]


@NARROW
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@BACKENDS
def test_narrow_rows_are_not_finite(kind, bad, backend):
    """A row that is not finite gives nothing finite in any product, and no other row changes."""
    rows, c, d = 20, 32, GROUP
    x, bias = normal(rows, c, dtype=torch.float16), normal(3 * c, dtype=torch.float16)
    weights = [coded(normal(*s, dtype=torch.float16), kind) for s in ((3 * c, c), (2 * d, c), (c, d))]
    norms, table, place = torch.ones(2, 32), angles(8, 32, x.device), Place(0, 4, 5)
    how, made = {"backend": backend, "schedule": SMALL}, []
    for broken in (False, True):
        if broken:
            x[3, 5] = bad
        query, keys = torch.empty(rows, 1, 32, dtype=x.dtype), torch.empty(rows, 2, 1, 32, dtype=x.dtype)
        projected(x, weights[0][0], bias, norms, table, place, EPS, query, keys, columns=weights[0][1], **how)
        inner, scales, out = torch.empty(rows, d, dtype=kind), torch.empty(rows, 1), torch.zeros_like(x)
        gated_product(x, weights[1][0], None, EPS, inner, columns=weights[1][1], scales=scales, **how)
        added(out, inner, weights[2][0], columns=weights[2][1], scales=scales, **how)
        made.append((query, keys, out))
    others = torch.arange(rows) != 3
    for fine, broken in zip(*made, strict=True):
        assert not broken[3].isfinite().any() and fine.isfinite().all()
        assert torch.equal(fine[others], broken[others])
