"""LTX-2.5's diffusion decoder at its published widths on a real GPU: kernels beside their references, bits in every
chunking, noise, and memory."""

import gc

import pytest
import torch
from zerowaste_vae import Cancelled
from zerowaste_vae.engine.families.ltx_diffusion.kernels.blocks import (
    GROUP,
    Place,
    added,
    angles,
    feed_forward,
    feeds,
    gated_product,
    projected,
    turned_columns,
)
from zerowaste_vae.engine.families.ltx_diffusion.kernels.neighbourhood import Window, neighbourhood
from zerowaste_vae.engine.network.products import coded

from ..gpu_models import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
EPS, BF16 = 1e-6, torch.bfloat16
#: Where kernels run beside their references: tools/build_kernels.py --tests launches them on "meta".
DEVICE = "cuda"


@pytest.fixture(scope="module")
def vae():
    made = make("ltx-diffusion", "bf16")
    if not made.kernels("decoder") or not made.kernels("decoder").kernels:
        pytest.skip("no kernels run this decoder here")
    return made


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def normal(*shape, scale=1.0, dtype=BF16):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


@pytest.mark.parametrize("shape, kernel", [
    ((6, 18, 20), (11, 11, 11)), ((5, 9, 10), (11, 11, 11)), ((3, 37, 23), (3, 7, 7)), ((1, 6, 40), (3, 5, 5)),
    ((4, 21, 35), (3, 5, 5)), ((12, 16, 16), (11, 11, 11)), ((13, 33, 47), (11, 11, 11)),
])  # fmt: skip
@pytest.mark.parametrize("bound", [24.0, float("inf")])
def test_neighbourhood(vae, shape, kernel, bound):
    q, k, v = normal(*shape, 3, 4, 64).unbind(3)
    q = q / 8
    made = []
    for first, count in ((0, shape[0]), (shape[0] // 2, 1)):
        window = Window(kernel, first, shape[0])
        made.append([neighbourhood(q[first : first + count], k, v, window, bound=bound, backend=b)
                     for b in ("triton", "reference")])  # fmt: skip
    assert max(error(*pair) for pair in made) < 1e-2


@pytest.mark.parametrize("height, width, c", [(7, 9, 256), (16, 20, 256), (5, 7, 64)])
def test_products(vae, height, width, c):
    """At row counts that fill no tile."""
    rows, d = 2 * height * width, 4 * c
    x, weight, bias = normal(rows, c), normal(3 * c, c, scale=c**-0.5), normal(3 * c)
    norms, table, place = normal(2, 64, dtype=torch.float32), angles(64, 64, x.device), Place(6, height, width)
    gates, biases = normal(2 * d, c, scale=c**-0.5), normal(2 * d)
    inner, down, context = normal(rows, d), normal(c, d, scale=d**-0.5), normal(rows, c)
    found = []
    for backend in ("triton", "reference"):
        query, keys = x.new_empty(rows, c // 64, 64), x.new_empty(rows, 2, c // 64, 64)
        projected(x, weight, bias, norms, table, place, EPS, query, keys, backend=backend)
        one, other = torch.empty_like(query), torch.empty_like(keys)
        for results in ((one, None), (None, other)):
            projected(x, weight, bias, norms, table, place, EPS, *results, backend=backend)
        out, sum_of = x.new_empty(rows, d), x.clone()
        gated_product(x, gates, biases, EPS, out, backend=backend)
        added(sum_of, inner, down, bias[:c], (context, weight[:c]), backend=backend)
        found.append((query, keys, one, other, out, sum_of))
    assert max(map(error, *found)) < 8e-3


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("height, width, c", [(7, 9, 256), (16, 20, 256), (5, 7, 64)])
def test_narrow_products(vae, kind, height, width, c):
    """8-bit products at row counts that fill no tile; a row that is not finite spoils no other one."""
    if kind == "fp8" and not vae.kernels("decoder").fp8:
        pytest.skip("no fp8 here")
    rows, d = 2 * height * width, 4 * c
    x, bias = normal(rows, c, scale=3.0), normal(3 * c)
    norms, table, place = normal(2, 64, dtype=torch.float32), angles(64, 64, x.device), Place(6, height, width)
    qkv, gates, down = (coded(normal(*s, scale=s[1] ** -0.5), kind) for s in ((3 * c, c), (2 * d, c), (c, d)))
    biases, more = normal(2 * d), (normal(rows, c), normal(c, c, scale=c**-0.5))
    found = {}
    for backend in ("triton", "reference", "broken"):
        how = {"backend": "reference" if backend == "reference" else "triton"}
        if backend == "broken":
            x[5, 3] = torch.nan
        query, keys = x.new_empty(rows, c // 64, 64), x.new_empty(rows, 2, c // 64, 64)
        projected(x, qkv[0], bias, norms, table, place, EPS, query, keys, columns=qkv[1], **how)
        inner, scales = x.new_empty(rows, d, dtype=gates[0].dtype), x.new_empty(rows, d // GROUP, dtype=torch.float32)
        gated_product(x, gates[0], biases, EPS, inner, columns=gates[1], scales=scales, **how)
        sums = torch.zeros_like(x)
        added(sums, inner, down[0], bias[:c], more, columns=down[1], scales=scales, **how)
        found[backend] = query.flatten(1), keys.flatten(1), sums
    assert max(map(error, found["triton"], found["reference"])) < 2e-2
    others = torch.arange(rows) != 5
    for fine, broken in zip(found["triton"], found["broken"], strict=True):
        assert torch.equal(fine[others], broken[others]) and not broken[5].isfinite().any()


@pytest.mark.parametrize("rows", [1, 64, 65, 129, 17001])
@pytest.mark.parametrize("biased, first, last", [(True, True, True), (True, False, True), (False, False, False)])
def test_feed_forward(vae, rows, biased, first, last):
    """All after the attention in one kernel, at row counts that fill no tile: beside its reference, and the same bits
    as of three kernels; a row does not depend on others, and what is behind the rows stays."""
    c, d = 256, 1024
    if not feeds(c, d, torch.device(DEVICE)):
        pytest.skip("three kernels run here")
    room = torch.cat((normal(rows, c, scale=3.0), torch.full((130, c), 7.0, device=DEVICE, dtype=BF16)))
    x, gates, biases = room[:rows].clone(), normal(2 * d, c, scale=c**-0.5), normal(2 * d) if biased else None
    down = normal(c, d, scale=d**-0.5)
    before, more = (
        (normal(rows, c), normal(c, c, scale=c**-0.5), normal(c)) if there else None for there in (first, last)
    )

    def run(x, part=slice(None), **how):
        own = [None if t is None else (t[0][part].clone(), *t[1:]) for t in (before, more)]
        feed_forward(x, gates, biases, EPS, turned_columns(down), *own, **how)
        return x

    made, inner, apart = room.clone(), x.new_empty(rows, d), x.clone()
    run(made[:rows])
    assert torch.equal(made[rows:], room[rows:])
    assert error(made[:rows], run(x.clone(), backend="reference")) < 8e-3
    if before is not None:
        added(apart, *before)
    gated_product(apart, gates, biases, EPS, inner)
    added(apart, inner, down, None if more is None else more[2], None if more is None else more[:2])
    assert torch.equal(made[:rows], apart)
    if rows > 300:
        part = x[200:301].clone()
        part[50, 3] = torch.nan
        run(part, slice(200, 301))
        others = torch.arange(101) != 50
        assert torch.equal(part[others], made[200:301][others]) and part[50].isnan().all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_8_bit(vae, kind):
    """Every chunking has the same bits, and the frames are near those of 16 bit."""
    z = torch.randn(1, 128, 4, 4, 6, generator=torch.Generator().manual_seed(1))
    made = make("ltx-diffusion", kind)
    if made.precision != kind:
        pytest.skip(f"{made.precision} runs here")
    whole = made.decode(z, seed=3)
    assert torch.equal(made.decode(z, chunk=1, seed=3), whole)
    assert torch.equal(made.decode(z, start=9, frames=4, seed=3), whole[:, 9:13])
    assert (whole - vae.decode(z, seed=3)).square().mean().item() < {"int8": 10**-2.5, "fp8": 10**-2}[kind]


def test_bits(vae):
    """Every chunking has the same bits; bf16 is as near to fp32 as rounding lets it."""
    z = torch.randn(1, 128, 4, 4, 6, generator=torch.Generator().manual_seed(1))
    whole = vae.decode(z)
    assert whole.shape == (1, 25, 128, 192, 3) and whole.isfinite().all()
    for chunk in (1, 3):
        assert torch.equal(vae.decode(z, chunk=chunk), whole)
    assert torch.equal(vae.decode(z, start=9, frames=4), whole[:, 9:13])
    exact = make("ltx-diffusion", "fp32")
    # fp32 draws other values: its noise is the bf16 one only with a seed.
    got, want = (v.decode(z, seed=3) for v in (vae, exact))
    mse = (got - want).square().mean().item()
    assert mse < 10**-2.5, mse  # 25 dB of a peak of 1; random weights


def test_interrupted(vae):
    """A decode that ends early, while noise and frames are on their way, leaves nothing that changes later ones, on
    whichever stream."""
    z = torch.randn(1, 128, 12, 4, 6, generator=torch.Generator().manual_seed(1))
    whole, seen = vae.decode(z), []
    for at in (1, 2, 4):
        with pytest.raises(Cancelled):
            vae.decode(z, cancel=lambda at=at: len(seen) >= at or seen.append(1))
        seen.clear()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            assert torch.equal(vae.decode(z), whole)
        assert torch.equal(vae.decode(z), whole)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_memory(vae, precision):
    """No more is reserved than the plan states; once frames wait in every block, a longer clip takes no more."""
    if precision != "bf16":
        vae = make("ltx-diffusion", precision)
    peaks = []
    for latents in (12, 18):
        z = torch.randn(1, 128, latents, 8, 12)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, plans = torch.cuda.memory_reserved(), []
        frames = vae.decode(z, on_plan=plans.append)
        for _ in range(2):  # in the blocks that the first one has left
            assert torch.equal(vae.decode(z, on_plan=plans.append), frames)
        assert plans[0] == plans[-1]
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_reserved() - before)
        assert plans[-1].peak_bytes >= peaks[-1]
    assert peaks[1] <= peaks[0] * 1.1
