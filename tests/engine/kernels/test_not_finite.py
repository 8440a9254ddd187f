"""NaN and infinity in the middle of what a maximum, minimum or clamp of a kernel sees: none makes a number of them that
nobody notices. A GPU's maximum passes over NaN where torch's and the interpreter's keep it, so all of it runs there."""

import sys
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.kernels.attention import attention
from zerowaste_vae.engine.kernels.conv3d import Epilogue, conv3d, pack_tiles, pack_weight
from zerowaste_vae.engine.kernels.norm_act import Norm, Store, coefficients, norm_act, statistics
from zerowaste_vae.engine.kernels.targets import FP8
from zerowaste_vae.engine.kernels.to_pixels import BYTES, to_pixels
from zerowaste_vae.engine.kernels.tokens import LIMITS, gated, normalised, rounded

sys.path.insert(0, str(Path(__file__).parent))
from helpers import bordered

HALF, INT8 = torch.float16, torch.int8
NAN, INF = torch.nan, torch.inf
ROWS, WIDTH, BAD = 5, 192, (2, 70)


@pytest.fixture(params=["reference", "triton", pytest.param("gpu", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")])])
def where(request):
    """(device, backend): the references, the kernels in the interpreter, or on a GPU."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return ("cuda" if request.param == "gpu" else "cpu"), ("reference" if request.param == "reference" else "triton")


def tokens(where, call, dtype, x):
    """Return the results of a pass over tokens of x: its rows, and their scales (None: not in 8 bit)."""
    device, backend = where
    out = torch.empty(ROWS, WIDTH, dtype=dtype, device=device)
    scales = torch.empty(ROWS, device=device) if dtype in LIMITS else None
    call(x.to(device), out, scales, backend)
    return (out.float() if scales is None else out.float() * scales[:, None]), scales


def norm_of(x, out, scales, backend):
    normalised(x, torch.ones_like(x[0]), 1e-5, out, scales, backend=backend)


def gate_of(x, out, scales, backend):
    gated(x, out, scales, backend=backend)


def round_of(x, out, scales, backend):
    rounded(x, out, scales, backend=backend)


def zero_of(x, out, scales, backend):
    rounded(x, out, scales, zeroed=True, backend=backend)


PASSES = {"normalised": (norm_of, 1), "gated": (gate_of, 2), "rounded": (round_of, 1), "zeroed": (zero_of, 1)}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [HALF, FP8, INT8], ids=str)
@pytest.mark.parametrize("name", PASSES)
def test_tokens(where, name, dtype, value):
    """In 8 bit the row's scale is NaN, and with it all that a product makes of the row; other rows are as they were.
    A gate of -inf is closed, and `rounded` has 0 for NaN if that is asked for."""
    call, halves = PASSES[name]
    x = torch.randn(ROWS, halves * WIDTH).half()
    plain, _ = tokens(where, call, dtype, x.clone())
    struck = x.clone()
    struck[BAD] = value
    made, scales = tokens(where, call, dtype, struck)
    others = [row for row in range(ROWS) if row != BAD[0]]
    assert torch.equal(made[others], plain[others])
    closed = (name, value) == ("gated", -INF) or (name == "zeroed" and value != value)
    if closed:
        x[BAD] = -1e4 if name == "gated" else 0.0  # a gate that is as good as closed
        assert torch.equal(made, tokens(where, call, dtype, x)[0]) and made[BAD] == 0
    elif scales is None:
        assert not made[BAD].isfinite()
    else:
        assert scales[BAD[0]].isnan() and made[BAD[0]].isnan().all()


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
def test_closed_gate(where, dtype):
    """0 times infinity."""
    x = torch.randn(ROWS, 2 * WIDTH).half()
    x[BAD], x[BAD[0], WIDTH + BAD[1]] = -INF, INF
    assert tokens(where, gate_of, dtype, x)[1][BAD[0]].isnan()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_attention(where, which, value):
    """Over several tiles of keys, whose peaks are merged. Of a query its row, of a key all of them, of a value its
    channel; but a score of -inf is no weight."""
    device, backend = where
    q, k, v = (torch.randn(1, 300, 264).half() for _ in range(3))
    tokens = (q, k, v)
    tokens[which][0, 150, 7] = value
    made = attention(*(t.to(device) for t in tokens), backend=backend)[0].isfinite()
    if which == 2:
        assert not made[:, 7].any()
    elif which == 0:
        assert not made[150].any() and made[:150].all() and made[151:].all()
    else:
        reached = q[0, :, 7] * value
        assert not made[reached.isnan() | (reached == INF).to(reached.device)].any()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", ["group", "l2", "rms", "none"])
@pytest.mark.parametrize("stored", [HALF, FP8, INT8], ids=str)
def test_norm_act(where, kind, stored, value):
    """In 16 bit it is in the result, in 8 bit in health."""
    device, backend = where
    norm = Norm(kind, groups=4) if kind == "group" else Norm(kind)
    x, health = torch.randn(1, 5, 6, 32).half(), torch.zeros((), device=device)
    x[0, 2, 3, 17] = value
    x = x.to(device)
    coefs = None
    if kind == "group":
        coefs = coefficients(statistics(x, 4, backend=backend), norm, 30, backend=backend, health=None if stored == HALF else health)
    buffer = torch.zeros(1, 7, 8, 32, device=device).to(stored)
    store = Store(silu=kind != "none", scale=0.05)
    norm_act(x, norm, buffer, store=store, coefs=coefs, backend=backend, health=None if stored == HALF else health)
    if stored == HALF:
        assert not buffer[0, 3, 4, 17].isfinite()
    else:
        assert health.isnan()


@pytest.mark.parametrize("value", [NAN, INF])
def test_coefficients(where, value):
    device, backend = where
    partials = statistics(torch.randn(1, 5, 6, 32).half().to(device), 4, backend=backend)
    partials.data[0, -1, 1, 1] = value
    health = torch.zeros((), device=device)
    coefficients(partials, Norm("group", groups=4), 30, backend=backend, health=health)
    assert health.isnan()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("stored", [HALF, FP8, INT8], ids=str)
def test_conv3d(where, stored, value):
    """The residual may be not finite; it is added before the clamp."""
    device, backend = where
    weight, health = torch.randn(40, 32, 3, 3, 3) / 30, torch.zeros((), device=device)
    residual = torch.randn(1, 5, 6, 40).half()
    residual[0, 2, 3, 33] = value
    x, packed = bordered(HALF, 3, 5, 6, 32), pack_weight(weight.to(device), HALF)
    out = torch.zeros(1, 5, 6, 40, device=device).to(stored)
    epilogue = Epilogue(residual=residual.to(device), out_scale=0.05, health=health)
    conv3d(x.to(device), packed, out, epilogue=epilogue, backend=backend)
    if stored == HALF:
        assert not out[0, 2, 3, 33].isfinite() and out.isfinite().sum() == out.numel() - 1
    else:
        assert health.isnan()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_to_pixels(where, value):
    device, backend = where
    x, health = bordered(HALF, 4, 5, 6, 32), torch.zeros((), device=device)
    x[2, 3, 3, 11] = value
    weight = pack_weight((torch.randn(3, 32, 3, 3, 3) / 30).to(device), HALF)
    out = torch.empty(2, 5, 6, 3, dtype=torch.uint8, device=device)
    to_pixels(x.to(device), weight, torch.zeros(3, device=device), out, pixels=BYTES, backend=backend, health=health)
    assert health.isnan()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
def test_weights(where, dtype, value):
    """The largest of a row is its scale."""
    weight = torch.randn(40, 32, 3, 3, 3) / 30
    weight[7, 5, 1, 1, 1] = value
    assert not pack_weight(weight.to(where[0]), dtype).scale.isfinite().all()


def test_sums_that_only_the_winograd_form_makes():
    """What overflows there makes outputs of its tile NaN or Inf, which the next norm finds; the direct form's are
    finite."""
    x, weight = torch.zeros(1, 10, 10, 64, dtype=HALF), torch.randn(64, 64, 1, 3, 3) / 1000
    x[0, 5:7, 5:7, 3] = 0.4 * torch.finfo(HALF).max
    made = []
    for packed in (pack_weight(weight, HALF), pack_tiles(weight, HALF)):
        out = torch.empty(1, 8, 8, 64, dtype=HALF)
        conv3d(x, packed, out)
        made.append(out[0].isfinite().all(2))
    assert made[0].all() and not made[1][4:6, 4:6].any() and made[1][:2, :2].all()
