import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Geometry, Partials, conv3d, pack_weight
from zerowaste_vae.engine.kernels.targets import FP8
from zerowaste_vae.engine.kernels.upsample import compose, compose_nearest, pack, pack_nearest, upsample
from zerowaste_vae.engine.network.ops.up import Upsample
from zerowaste_vae.engine.network.packed import tensor_bytes

sys.path.insert(0, str(Path(__file__).parent))
from helpers import error, group_sums, true_sums


def plain_pair(x, expand, expand_bias, conv, conv_bias):
    """The layers that the composed kernels replace, on a clip from its start: expansion, shuffle and causal 3x3x3
    convolution, [T, H, W, C] -> [z * T - (z - 1), 2H, 2W, K]."""
    t, h, w, c = x.shape
    z = expand.shape[0] // (4 * c)
    u = F.linear(x, expand.flatten(1), expand_bias).view(t, h, w, 2, 2, z, c)
    u = u.permute(0, 5, 1, 3, 2, 4, 6).reshape(t * z, 2 * h, 2 * w, c)
    if z == 2:
        u = torch.cat((u[:1], u[2:]))
    u = torch.cat((u[:1], u[:1], u)).permute(3, 0, 1, 2)[None]
    return F.conv3d(u, conv, conv_bias, padding=(0, 1, 1))[0].permute(1, 2, 3, 0)


def weights(c, k, z, dtype=torch.float32):
    return (torch.randn(4 * z * c, c, 1, 1, 1, dtype=dtype) * c**-0.5, torch.randn(4 * z * c, dtype=dtype),
            torch.randn(k, c, 3, 3, 3, dtype=dtype) * (27 * c) ** -0.5, torch.randn(k, dtype=dtype))


def composed_in_float64(x, kernels, table, z):
    """The composed form spelled out for a whole clip from its start, per frame and phase, in the input's precision."""
    t, h, w, _ = x.shape
    before = 1 if z == 2 else 2
    padded = F.pad(torch.cat((*[x[:1]] * before, x)), (0, 0, 1, 1, 1, 1))
    out = torch.empty(t * z - (z - 1), 2 * h, 2 * w, kernels.shape[2], dtype=x.dtype)
    for f in range(t):
        fold = min(f, 2) if z == 2 else 0
        for phase in range(4 * z):
            iy, ix, it = phase // (2 * z), phase // z % 2, phase % z
            if z == 2 and f == 0 and it == 0:
                continue
            window = padded[f : f + before + 1, iy : iy + h + 1, ix : ix + w + 1].permute(3, 0, 1, 2)[None]
            y = F.conv3d(window, kernels[fold, phase].permute(0, 4, 1, 2, 3))[0, :, 0].permute(1, 2, 0)
            row, col = torch.zeros(h, 1, 1, dtype=x.dtype), torch.zeros(1, w, 1, dtype=x.dtype)
            row[-iy], col[:, -ix] = 1, 1
            b = table[fold, phase]
            out[f * z + it - (z - 1), iy::2, ix::2] = y + b[0] + row * b[1] + col * b[2] + row * col * b[3]
    return out


@pytest.mark.parametrize("z", [1, 2])
@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 1, 5), (4, 4, 1), (3, 5, 6)])
def test_composition_is_exact(z, shape):
    args = weights(6, 5, z, torch.float64)
    x = torch.randn(*shape, 6, dtype=torch.float64)
    got = composed_in_float64(x, *compose(*args), z)
    assert (got - plain_pair(x, *args)).abs().max() < 1e-12


@pytest.mark.parametrize("temporal", [True, False])
def test_plain_pair_is_the_networks_upsampler(temporal):
    layer = Upsample(6, temporal).double()
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    args = (layer.upscale_conv.weight, layer.upscale_conv.bias, layer.conv.weight, layer.conv.bias)
    want = layer(x.permute(3, 0, 1, 2)[None])[0].permute(1, 2, 3, 0)
    assert (plain_pair(x, *args) - want).abs().max() < 1e-12


@pytest.mark.parametrize("z, dtype", [(2, torch.float16), (1, torch.float16), (2, FP8)], ids=str)
def test_chunks_of_a_clip(backend, z, dtype):
    """Any chunking equals the plain pair on the whole clip, and in the kernel bit for bit the whole call."""
    c, t, h, w, before = 32, 4, 5, 6, 1 if z == 2 else 2
    args = weights(c, c, z)
    x = torch.randn(t, h, w, c).to(dtype)
    composed = pack(*args, dtype)
    buffer = F.pad(torch.cat((*[x[:1].float()] * before, x.float())), (0, 0, 1, 1, 1, 1)).to(dtype)
    whole = torch.empty(t * z - (z - 1), 2 * h, 2 * w, c, dtype=torch.float16)
    sums = upsample(buffer, composed, whole, first=0, groups=8, backend=backend)
    assert error(whole, plain_pair(x.double(), *[a.double() for a in args])) < (3e-2 if dtype == FP8 else 5e-4)
    assert error(group_sums(sums, 8), true_sums(whole, 8)) < 1e-5
    at = 0
    for lo, hi in ((0, 1), (1, 2), (2, 4)):
        part = torch.empty((hi - lo) * z - (z - 1) * (lo == 0), 2 * h, 2 * w, c, dtype=torch.float16)
        upsample(buffer[lo : hi + before].contiguous(), composed, part, first=lo, backend=backend)
        same = whole[at : at + len(part)]
        assert torch.equal(part, same) if backend == "triton" else error(part, same) < 1e-4  # of fp16
        at += len(part)
    assert at == len(whole)


def test_bands_know_the_frames_edges(interpreter):
    c, h, w = 32, 70, 3
    composed = pack(*weights(c, c, 1), torch.float16)
    buffer = F.pad(torch.randn(3, h, w, c), (0, 0, 1, 1, 1, 1)).half()
    whole = torch.empty(1, 2 * h, 2 * w, c, dtype=torch.float16)
    sums = upsample(buffer, composed, whole, first=2, groups=8, backend="triton")
    parts = []
    for top, n in ((0, 64), (64, 6)):
        band = torch.empty(1, 2 * n, 2 * w, c, dtype=torch.float16)
        rows, place = buffer[:, top : top + n + 2].contiguous(), Geometry(first_row=top, frame_rows=h)
        parts.append(upsample(rows, composed, band, first=2, groups=8, geometry=place, backend="triton"))
        assert torch.equal(band, whole[:, 2 * top : 2 * (top + n)])
        plain = torch.empty_like(band)
        upsample(rows, composed, plain, first=2, geometry=place, backend="reference")
        assert error(band, plain) < 1e-4
    assert torch.equal(Partials.concat(parts).data, sums.data)


def test_nearest_doubling_is_composed_exactly():
    g = torch.Generator().manual_seed(0)
    x, conv = torch.randn(1, 3, 5, 4, generator=g).double(), torch.randn(6, 3, 3, 3, generator=g).double()
    doubled = F.interpolate(x, scale_factor=2)
    expected = F.conv2d(doubled, conv, padding=1)
    kernels = compose_nearest(conv.unsqueeze(2)).view(2, 2, 6, 3, 2, 2)
    for row in range(2):
        for column in range(2):
            window = F.pad(x, (1 - column, column, 1 - row, row))
            torch.testing.assert_close(F.conv2d(window, kernels[row, column]), expected[..., row::2, column::2])


def repeated(x, conv, bias):
    """A clip's [T, H, W, C] from its start -> [2T - 1, 2H, 2W, K]: every value twice, frames but the first one too,
    then a causal 3x3x3 convolution; edges and the first frame are repeated around it."""
    t = x.shape[0]
    u = x.repeat_interleave(torch.tensor([1, *[2] * (t - 1)]), 0).repeat_interleave(2, 1).repeat_interleave(2, 2)
    u = F.pad(u.permute(3, 0, 1, 2)[None], (1, 1, 1, 1, 2, 0), mode="replicate")
    return F.conv3d(u, conv, bias)[0].permute(1, 2, 3, 0)


@pytest.mark.parametrize("dtype", [torch.float16, FP8], ids=str)
def test_repeats_in_time_and_space_are_composed(backend, dtype):
    """One set of weights for all frames: the first one makes its last sub-frame only. Chunks give equal bits."""
    c, k, t, h, w = 32, 16, 4, 5, 6
    conv, bias = torch.randn(k, c, 3, 3, 3) * (27 * c) ** -0.5, torch.randn(k)
    x = torch.randn(t, h, w, c).to(dtype)
    weight, biases = pack_nearest(conv, bias, dtype, temporal=True)
    assert (weight.folded, weight.kernel, weight.phases) == (1, (2, 2, 2), (2, 2, 2))
    buffer = torch.cat((x[:1].float(), x.float())).permute(0, 3, 1, 2)
    buffer = F.pad(buffer, (1, 1, 1, 1), mode="replicate").permute(0, 2, 3, 1).contiguous().to(dtype)
    whole = torch.empty(2 * t - 1, 2 * h, 2 * w, k, dtype=torch.float16)
    epilogue = Epilogue(biases, groups=8)
    sums = conv3d(buffer, weight, whole, epilogue=epilogue, first=0, backend=backend)
    assert error(whole, repeated(x.double(), conv.double(), bias.double())) < (3e-2 if dtype == FP8 else 5e-4)
    assert error(group_sums(sums, 8), true_sums(whole, 8)) < 1e-5
    at = 0
    for lo, hi in ((0, 1), (1, 2), (2, 4)):
        part = torch.empty(2 * (hi - lo) - (lo == 0), 2 * h, 2 * w, k, dtype=torch.float16)
        conv3d(buffer[lo : hi + 1].contiguous(), weight, part, epilogue=Epilogue(biases), first=lo, backend=backend)
        same = whole[at : at + len(part)]
        assert torch.equal(part, same) if backend == "triton" else error(part, same) < 1e-4  # of fp16
        at += len(part)
    assert at == len(whole)


@pytest.mark.parametrize("dtype", [torch.float16, FP8, torch.int8])
def test_meta_weights(dtype):
    """Plans count them and prepared weights are read into them."""
    expand, expand_bias, conv, bias = weights(8, 16, 2)

    def packed(device):
        given = (x.to(device) for x in (expand, expand_bias, conv, bias))
        composed = pack(*given, dtype)
        made = [composed.weight, pack_weight(conv.to(device), dtype, early=True)]
        parts = [w for one in made for w in (one, *one.early)]
        tensors = [t for w in parts for t in (w.data, w.scale)] + [composed.bias]
        return tensor_bytes([composed, made]), [t if t is None else (t.dtype, t.shape, t.stride()) for t in tensors]

    assert packed("meta") == packed("cpu")
