"""Neighbourhood attention against fp64 arithmetic, one query at a time."""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.families.ltx_diffusion.kernels.neighbourhood import Window, neighbourhood, schedules
from zerowaste_vae.engine.families.ltx_diffusion.kernels.neighbourhood.schedules import pick
from zerowaste_vae.engine.families.ltx_diffusion.kernels.neighbourhood.windows import TERMS, order, whole

sys.path.insert(0, str(Path(__file__).parent))
from helpers import error

pytestmark = pytest.mark.usefixtures("interpreter")
BF16, HALF = torch.bfloat16, torch.float16
#: Frames, rows and columns; window. Frames smaller than windows, than tiles, and of several tiles.
CASES = [((5, 9, 19), (3, 7, 7)), ((2, 6, 5), (3, 7, 7)), ((3, 16, 8), (11, 11, 11)), ((4, 5, 9), (3, 5, 5)),
         ((2, 15, 20), (3, 11, 11))]


def operands(shape, heads=2, head=16, dtype=torch.float32):
    """Queries, keys and values as strided parts of one tensor."""
    q, k, v = torch.randn(*shape, 3, heads, head).to(dtype).unbind(3)
    return q / head**0.5, k, v


def window_of(position, kernel, length):
    kernel = min(kernel, length)
    begin = min(max(position - kernel // 2, 0), length - kernel)
    return slice(begin, begin + kernel)


def exact(q, k, v, kernel):
    out = torch.empty_like(q, dtype=torch.float64)
    for place in itertools.product(*map(range, q.shape[:3])):
        where = tuple(map(window_of, place, kernel, q.shape[:3]))
        keys, values = (t[where].double().flatten(0, 2) for t in (k, v))
        weights = torch.einsum("hd,nhd->hn", q[place].double(), keys).softmax(1)
        out[place] = torch.einsum("hn,nhd->hd", weights, values)
    return out


@pytest.mark.parametrize("shape, kernel", CASES)
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, math.inf), (BF16, 20.0), (BF16, math.inf), (HALF, 20.0)])
def test_windows(shape, kernel, backend, dtype, bound):
    if dtype == torch.float32 and backend == "triton":
        pytest.skip("the kernel takes 16-bit types")
    q, k, v = operands(shape, dtype=dtype)
    want = exact(q, k, v, kernel)
    made = neighbourhood(q, k, v, Window(kernel, 0, shape[0]), bound=bound, backend=backend)
    assert error(made.double(), want) < {torch.float32: 1e-6, BF16: 1e-2, HALF: 2e-3}[dtype]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_ring(backend):
    """Queries of some frames find keys in a ring that has gone around, with the clip's end not yet known."""
    shape, kernel = (11, 6, 9), (5, 5, 5)
    q, k, v = operands(shape, dtype=BF16)
    whole = neighbourhood(q, k, v, Window(kernel, 0, shape[0]), bound=20.0, backend=backend)
    ring = 3
    slots = [(f + ring) % 7 for f in range(1, 8)]
    keys, values = torch.full_like(torch.stack((k, v), 3)[:7], torch.nan).unbind(3)
    for f, slot in zip(range(1, 8), slots, strict=True):
        keys[slot], values[slot] = k[f], v[f]
    made = neighbourhood(q[3:5], keys, values, Window(kernel, 3, 1 << 30), ring=ring, bound=20.0, backend=backend)
    assert torch.equal(made, whole[3:5])


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_group(backend):
    """A frame's bits do not depend on the frames that are computed with it."""
    q, k, v = operands((6, 5, 9), dtype=BF16)
    kernel = (3, 5, 5)
    whole = neighbourhood(q, k, v, Window(kernel, 0, 6), bound=20.0, backend=backend)
    for f in range(6):
        alone = neighbourhood(q[f : f + 1], k, v, Window(kernel, f, 6), bound=20.0, backend=backend)
        assert torch.equal(alone[0], whole[f])


def test_not_finite():
    """A key that is NaN makes every query NaN whose window holds it."""
    q, k, v = operands((3, 6, 9), dtype=BF16)
    k[1, 2, 3] = torch.nan
    made = neighbourhood(q, k, v, Window((3, 3, 3), 0, 3), bound=20.0, backend="triton")
    assert made[:, 1:4, 2:5].isnan().all()


def test_refused():
    q, k, v = operands((2, 4, 4))
    with pytest.raises(ValueError, match="queries and keys of one size"):
        neighbourhood(q, k[:, :3], v[:, :3], Window((3, 3, 3), 0, 2))


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (7, 7), (11, 11), (5, 28), (28, 17)])
def test_tiles(kernel):
    """Steps have all keys of a region once, and whole rows of them but for a frame's last step."""
    schedule = pick(90)
    tile, (high, wide) = schedule.tile((11, *kernel))
    assert high >= tile[0] + kernel[0] - 1 and wide >= tile[1] + kernel[1] - 1 and sum(tile) <= TERMS
    keys = order(high, wide)
    assert torch.equal(keys.sort().values, torch.arange(high * wide))
    rows = torch.arange(high * whole(wide)) // whole(wide) * wide + torch.arange(high * whole(wide)) % whole(wide)
    early = (-(-len(keys) // schedule.keys) - 1) * schedule.keys
    assert torch.equal(keys[:early], rows[:early])


def test_tiles_are_found_once(monkeypatch):
    """A launch takes less than looking for tiles among all."""
    pick(90).tile((11, 9, 13))
    monkeypatch.setattr(schedules.itertools, "product", lambda *of, **more: pytest.fail("looked for again"))
    assert pick(90).tile((11, 9, 13))
    with pytest.raises(pytest.fail.Exception):
        pick(90).tile((11, 9, 12))
