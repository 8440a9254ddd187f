"""The Winograd form of the composed upsamplers against the direct one, and its kernel against the reference."""

import sys
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.kernels.conv3d import (
    Epilogue,
    Geometry,
    Partials,
    buffer_shape,
    conv3d,
    dispatch,
    padded_channels,
)
from zerowaste_vae.engine.kernels.norm_act import Norm, Store, norm_act
from zerowaste_vae.engine.kernels.targets import FP8, capabilities
from zerowaste_vae.engine.kernels.upsample import pack, upsample

sys.path.insert(0, str(Path(__file__).parent))
from helpers import error, group_sums, true_sums

HALF, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8
TYPES = [HALF, BF16, FP8, INT8]
#: Of one upsampling against exact, both forms.
ROUNDING = {HALF: 1e-3, BF16: 8e-3, FP8: 8e-2, INT8: 5e-2}


def scale_of(dtype):
    return {INT8: 0.035, FP8: 0.02}.get(dtype, 1.0)


def pair(c, temporal):
    z = 2 if temporal else 1
    return (torch.randn(4 * z * c, c, 1, 1, 1) * c**-0.5, torch.randn(4 * z * c), torch.randn(c, c, 3, 3, 3) * 0.05,
            torch.randn(c))  # fmt: skip


def stored(x, dtype, taps=2, backend="reference"):
    """[D, H, W, C] -> planes of two taps (taps 0: the plain buffer)."""
    d, h, w, c = x.shape
    c = padded_channels(c, dtype)
    shape = buffer_shape(h, w, c, taps) if taps else (h + 2, w + 2, c)
    buffer = torch.empty(d, *shape, dtype=dtype)
    norm_act(x, Norm("none"), buffer, store=Store(silu=False, scale=scale_of(dtype)), backend=backend)
    return buffer


@pytest.mark.parametrize("temporal", [True, False])
@pytest.mark.parametrize("size", [(5, 7), (4, 8), (1, 2), (3, 1)], ids=str)
def test_reference_is_the_direct_form(temporal, size):
    args, x = pair(8, temporal), torch.randn(4, *size, 8)
    frames = 2 * 3 - 1 if temporal else 2
    outs = [torch.empty(frames, 2 * size[0], 2 * size[1], 8) for _ in range(2)]
    for out, winograd in zip(outs, (False, True), strict=True):
        buffer = stored(x, torch.float32, 2 * winograd)
        upsample(buffer, pack(*args, torch.float32, winograd=winograd), out, first=0)
    assert error(*outs) < 1e-6


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [(3, 5), (1, 2)], ids=str)
@pytest.mark.parametrize("temporal", [True, False])
def test_kernel_equals_reference(interpreter, dtype, size, temporal):
    c, halo = 32, 1 if temporal else 2
    h, w = size
    args, x = pair(c, temporal), torch.randn(1 + halo, h, w, c)
    composed, buffer = pack(*args, dtype, winograd=True), stored(x, dtype)
    frames = 2 if temporal else 1
    got, again, want = (torch.full((frames, 2 * h, 2 * w, c), float("nan")) for _ in range(3))
    told = {"first": 2, "groups": 8, "scale": scale_of(dtype)}
    sums = upsample(buffer, composed, got, backend="triton", **told)
    upsample(buffer, composed, again, backend="triton", **told)
    upsample(buffer, composed, want, backend="reference", **told)
    assert error(got, want) < (1e-4 if dtype == INT8 else 1e-5)
    assert torch.equal(got, again)
    assert error(group_sums(sums, 8), true_sums(got, 8)) < 1e-5
    exact = torch.empty_like(got)
    upsample(stored(x, torch.float32, 0), pack(*args, torch.float32), exact, first=2)
    assert error(got, exact) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [HALF, INT8], ids=str)
def test_chunks_and_bands_keep_every_bit(interpreter, dtype):
    """From the clip's first frame on, whose folds differ; the border's bias of a band is the frame's."""
    c, d, h, w = 32, 2, 66, 3
    composed, buffer = pack(*pair(c, True), dtype, winograd=True), stored(torch.randn(d + 1, h, w, c), dtype)
    told = {"groups": 8, "scale": scale_of(dtype), "backend": "triton"}
    whole = torch.empty(2 * d - 1, 2 * h, 2 * w, c, dtype=HALF)
    sums = upsample(buffer, composed, whole, first=0, **told)
    ring = torch.cat((buffer[-1:].float(), buffer[:-1].float())).to(dtype)
    at = 0
    for f in range(d):
        out = torch.empty(1 + (f > 0), 2 * h, 2 * w, c, dtype=HALF)
        part = upsample(ring, composed, out, first=f, start=(f + 1) % (d + 1), **told)
        assert torch.equal(out, whole[at : at + len(out)]) and torch.equal(part.data, sums.data[at : at + len(out)])
        at += len(out)
    parts = []
    for top, n in ((0, 64), (64, 2)):
        band = torch.empty(2 * d - 1, 2 * n, 2 * w, c, dtype=HALF)
        rows = buffer[:, :, top : top + n + 2].contiguous()
        parts.append(upsample(rows, composed, band, first=0, geometry=Geometry(first_row=top, frame_rows=h), **told))
        assert torch.equal(band, whole[:, 2 * top : 2 * (top + n)])
    assert torch.equal(Partials.concat(parts).data, sums.data)


@pytest.mark.parametrize(("sm", "dtype", "fast", "limit"), [
    (80, HALF, False, 1e-5), (89, INT8, False, 1e-4), (89, HALF, True, 2e-3), (120, FP8, False, 1e-5),
])  # fmt: skip
def test_forms_of_other_generations(interpreter, monkeypatch, sm, dtype, fast, limit):
    monkeypatch.setattr(dispatch, "capabilities", lambda *_: capabilities("other", sm, (3, 6)))
    composed, buffer = pack(*pair(64, False), dtype, winograd=True), stored(torch.randn(3, 3, 5, 64), dtype)
    outs = [torch.full((1, 6, 10, 64), float("nan")) for _ in range(2)]
    for out, backend in zip(outs, ("triton", "reference"), strict=True):
        upsample(buffer, composed, out, first=2, scale=scale_of(dtype), half_accumulate=fast, backend=backend)
    assert error(*outs) < limit


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [HALF, INT8], ids=str)
def test_onto_what_is_there(request, backend, dtype):
    """96 channels are three steps of 32, outputs and residual in other strides, scales of channels."""
    if backend == "triton":
        request.getfixturevalue("interpreter")
    args, x = pair(96, False), torch.randn(3, 3, 5, 96)
    scales, unit = torch.logspace(-0.3, 0.3, 96), scale_of(dtype)
    composed = pack(*args, dtype, lambda rows: scales, winograd=True)
    buffer = torch.empty(3, *buffer_shape(3, 5, 96, 2), dtype=dtype)
    norm_act(x, Norm("none"), buffer, store=Store(silu=False, gain=1 / (scales * unit)))
    out, residual = torch.full((1, 8, 12, 96), 3.0), torch.randn(1, 6, 10, 96)
    told = Epilogue(composed.bias, residual, scale=unit)
    conv3d(buffer, composed.weight, out[:, 1:-1, 1:-1], epilogue=told, first=2, backend=backend)
    want = torch.empty(1, 6, 10, 96)
    upsample(stored(x, torch.float32, 0), pack(*args, torch.float32), want, first=2)
    assert error(out[:, 1:-1, 1:-1], want + residual) < ROUNDING[dtype]
    assert (out[:, 0] == 3).all() and (out[:, :, -1] == 3).all()


@pytest.mark.parametrize("dtype", [HALF, INT8, FP8], ids=str)
@pytest.mark.parametrize("width", [1, 2, 9])
def test_planes_of_two_taps(interpreter, dtype, width):
    x = torch.randn(2, 3, width, 40)
    both = [stored(x, dtype, backend=backend).float() for backend in ("reference", "triton")]
    assert error(both[1], both[0]) < {HALF: 5e-4, INT8: 1e-2, FP8: 0.13}[dtype]
    exact = stored(x, dtype, 0).float()[:, :, 1:]  # columns 2j are d1
    pairs = -(-width // 2)
    assert torch.equal(both[0][:, 1, :, :pairs], exact[:, :, 0 : 2 * pairs : 2])
    assert not both[0][:, 1, :, pairs].any()
    assert not both[1][..., 40:].any()
