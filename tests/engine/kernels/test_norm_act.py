import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from zerowaste_vae.engine.kernels.conv3d import Partials, padded_channels
from zerowaste_vae.engine.kernels.norm_act import Condition, Norm, Store, coefficients, norm_act, statistics
from zerowaste_vae.engine.kernels.targets import FP8

sys.path.insert(0, str(Path(__file__).parent))
from helpers import CAST_STEP, TOLERANCE, error, group_sums, true_sums

CASES = [
    # C, groups, kind, stored, border, per chunk
    (64, 32, "group", torch.float16, "zero", False),
    (64, 32, "group", torch.float16, "zero", True),
    (96, 32, "group", torch.float32, "replicate", False),
    (64, 1, "group", torch.float32, "replicate", True),
    (64, 8, "group", torch.int8, "zero", False),
    (64, 8, "group", FP8, "zero", False),
    (96, 1, "l2", torch.float16, "zero", False),
    (48, 1, "rms", torch.bfloat16, "replicate", False),
    (20, 1, "none", torch.float16, "zero", False),
    (20, 1, "none", torch.float16, "reflect", False),
    (64, 8, "group", torch.int8, "reflect", True),
]
PADDING = {"zero": "constant", "replicate": "replicate", "reflect": "reflect"}


def plain(x, norm):
    """torch's own operators on [D, H, W, C]."""
    if norm.kind == "group":
        y = x.permute(3, 0, 1, 2)[None] if norm.per_chunk else x.permute(0, 3, 1, 2)
        y = F.group_norm(y, norm.groups, norm.weight, norm.bias, norm.eps)
        return y[0].permute(1, 2, 3, 0) if norm.per_chunk else y.permute(0, 2, 3, 1)
    if norm.kind == "l2":
        return F.normalize(x, dim=-1, eps=norm.eps) * x.shape[-1] ** 0.5 * norm.weight + norm.bias
    if norm.kind == "rms":
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps) + norm.bias
    return x


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norm_silu_quantise_border(backend, case):
    c, groups, kind, stored, border, per_chunk = case
    x = (torch.randn(2, 19, 7, c) * 2 + 1).half()
    norm = Norm(kind, torch.randn(c), torch.randn(c), groups, per_chunk=per_chunk)
    silu, scale = kind != "none", 0.1 if stored.itemsize == 1 else 1.0
    buffer = torch.full((5, 21, 9, padded_channels(c, stored)), 9.0).to(stored)
    norm_act(x, norm, buffer, slot=4, store=Store(silu, border, scale), backend=backend)
    want = plain(x.float(), norm)
    want = (F.silu(want) if silu else want).permute(0, 3, 1, 2)
    want = F.pad(want, (1,) * 4, mode=PADDING[border]).permute(0, 2, 3, 1)
    got = torch.stack((buffer[4], buffer[0])).float() * scale  # the ring wraps
    limit = {torch.int8: 4e-2, FP8: CAST_STEP[FP8]}.get(stored, TOLERANCE[stored])
    assert error(got[..., :c], want) < limit
    assert not got[..., c:].any()  # padding channels are written, as zeros
    assert (buffer[1:4].float() == torch.tensor(9.0).to(stored).float()).all()  # other slots are left alone
    if border == "zero":
        assert not got[:, 0].any() and not got[:, -1].any() and not got[:, :, 0].any() and not got[:, :, -1].any()


@pytest.mark.parametrize("stored", [torch.float16, torch.int8, FP8], ids=str)
@pytest.mark.parametrize("first", [0, 3])
def test_latents_scale_and_shift_positions(backend, stored, first):
    """Frames 0 to 4, and 3 to 7, of a clip of three latents, which has two frames for each but the first."""
    c, scale = 40, 0.1 if stored.itemsize == 1 else 1.0
    x, z = (torch.randn(5, 18, 6, c) * 2 + 1).half(), torch.randn(5, 9, 3, 7)
    norm = Norm("group", torch.randn(c), torch.randn(c), 8, per_chunk=True)
    condition = Condition(torch.randn(7, 2 * c), torch.randn(2 * c), 2, z, first, torch.empty(27, 2 * c))
    assert condition.runs(5) == ([(0, 1, 0), (1, 3, 1), (3, 5, 2)] if not first else [(0, 2, 2), (2, 4, 3), (4, 5, 4)])
    taken = [(first + i + 1) // 2 for i in range(5)]
    wide = z[taken].repeat_interleave(2, 1).repeat_interleave(2, 2) @ condition.weight + condition.bias
    want = F.silu(plain(x.float(), norm) * wide[..., :c] + wide[..., c:])
    buffer = torch.full((6, 20, 8, padded_channels(c, stored)), 9.0).to(stored)
    norm, store = replace(norm, condition=condition), Store(scale=scale)
    norm_act(x, norm, buffer, slot=3, store=store, backend=backend)
    got = buffer[[3, 4, 5, 0, 1]].float() * scale
    limit = {torch.int8: 4e-2, FP8: CAST_STEP[FP8]}.get(stored, TOLERANCE[stored])
    assert error(got[:, 1:-1, 1:-1, :c].clamp(-12, 12), want.clamp(-12, 12)) < limit
    assert not got[..., c:].any() and not got[:, 0].any() and not got[:, :, -1].any()
    band = torch.empty(5, 7, 8, buffer.shape[3], dtype=stored)
    coefs = coefficients(statistics(x, 8, backend=backend), norm, 18 * 6, backend=backend)
    norm_act(x, norm, band, store=store, coefs=coefs, first=9, backend=backend)
    assert torch.equal(band, buffer[[3, 4, 5, 0, 1], 9:16])


def test_conditioned_norms_refuse_what_they_cannot_write():
    x, z = torch.randn(1, 6, 4, 8), torch.randn(1, 3, 2, 4)
    condition = Condition(torch.randn(4, 16), torch.randn(16), 1, z, 0, torch.empty(6, 16))
    norm = Norm("group", torch.ones(8), torch.ones(8), 4, condition=condition)
    with pytest.raises(ValueError, match="beside zeros"):
        norm_act(x, norm, torch.empty(1, 8, 6, 8), store=Store(border="replicate"))
    with pytest.raises(ValueError, match="no multiple"):
        norm_act(x[:, :5], norm, torch.empty(1, 7, 6, 8))


def test_statistics_of_bands_join_to_the_frames(backend):
    x = (torch.randn(2, 70, 9, 48) * 3 - 2).half()
    whole = statistics(x, 16, backend=backend)
    bands = Partials.concat([statistics(x[:, :64], 16, backend=backend), statistics(x[:, 64:], 16, backend=backend)])
    assert torch.equal(whole.data, bands.data)
    assert error(group_sums(whole, 16), true_sums(x, 16)) < 1e-5
    norm = Norm(weight=torch.randn(48), bias=torch.randn(48), groups=16)
    got, want = (coefficients(whole, norm, 70 * 9, backend=name) for name in (backend, "reference"))
    assert error(got, want) < 1e-6


def test_channels_first_input_is_read_in_place(interpreter):
    x = torch.randn(2, 20, 5, 6).permute(0, 2, 3, 1)
    buffers = [torch.empty(2, 7, 8, 32, dtype=torch.float16) for _ in range(2)]
    for buffer, backend in zip(buffers, ("reference", "triton"), strict=True):
        norm_act(x, Norm("none"), buffer, store=Store(silu=False), backend=backend)
    assert torch.equal(*buffers)
    assert torch.equal(buffers[0][:, 1:-1, 1:-1, :20], x.half())


@pytest.mark.parametrize("change, word", [
    (dict(norm=Norm("batch")), "unknown norm"),
    (dict(buffer=torch.empty(2, 5, 5, 32)), "does not hold"),
    (dict(slot=7), "do not fit"),
    (dict(store=Store(border="wrap")), "unknown norm"),
    (dict(norm=Norm("group", torch.ones(32), None, 8)), "both weight and bias"),
])  # fmt: skip
def test_wrong_arguments_are_named(change, word):
    arguments = dict(norm=Norm("none"), buffer=torch.empty(2, 7, 8, 32)) | change
    with pytest.raises(ValueError, match=word):
        norm_act(torch.randn(2, 5, 6, 32), arguments.pop("norm"), arguments.pop("buffer"), **arguments)


@pytest.mark.parametrize("border", PADDING)
def test_bands_hold_the_frames_own_rows(backend, border):
    x = torch.randn(2, 13, 9, 20).half()
    whole = torch.full((3, 15, 11, 32), -1.0).half()
    norm_act(x, Norm("none"), whole, slot=1, store=Store(silu=False, border=border), backend=backend)
    inside = F.pad(x.permute(0, 3, 1, 2), (1,) * 4, mode=PADDING[border]).permute(0, 2, 3, 1)
    assert torch.equal(whole[1:, ..., :20], inside)
    for first, rows in ((0, 6), (4, 7), (10, 5), (0, 15), (0, 3), (12, 3)):
        band = torch.full((3, rows, 11, 32), -1.0).half()
        norm_act(x, Norm("none"), band, slot=1, store=Store(silu=False, border=border), first=first, backend=backend)
        assert torch.equal(band, whole[:, first : first + rows])
    with pytest.raises(ValueError, match="does not hold"):
        norm_act(x, Norm("none"), torch.empty(3, 6, 11, 32).half(), first=10, backend=backend)


@pytest.mark.parametrize(("border", "size"), [("replicate", (1, 1)), ("reflect", (2, 3)), ("reflect", (3, 2))])
def test_borders_of_the_smallest_frames(backend, border, size):
    h, w = size
    x, buffer = torch.randn(1, h, w, 16).half(), torch.empty(1, h + 2, w + 2, 16).half()
    norm_act(x, Norm("none"), buffer, store=Store(silu=False, border=border), backend=backend)
    assert torch.equal(buffer.permute(0, 3, 1, 2), F.pad(x.permute(0, 3, 1, 2), (1,) * 4, mode=border))
    with pytest.raises(ValueError, match="too small to reflect"):
        norm_act(x[:, :1], Norm("none"), buffer[:, :3], store=Store(border="reflect"), backend=backend)


@pytest.mark.parametrize("kind", ["group", "none"])
def test_a_gain_per_channel_comes_before_rounding(backend, kind):
    x, gain = (torch.randn(1, 9, 7, 48) * 2).half(), torch.logspace(0, 2, 48)
    norm = Norm(kind, torch.randn(48), torch.randn(48), 8)
    buffer = torch.empty(2, 11, 9, 64, dtype=torch.int8)
    norm_act(x, norm, buffer, slot=1, store=Store(silu=kind == "group", gain=gain), backend=backend)
    want = plain(x.float(), norm)
    want = (F.silu(want) if kind == "group" else want) * gain
    got = buffer[1].float()
    # The kernel's own SiLU may tip a value over the edge between two integers.
    assert ((got[1:-1, 1:-1, :48] - want[0].round().clamp(-127, 127)).abs() <= 1).all()
    assert error(got[1:-1, 1:-1, :48], want[0].clamp(-127, 127)) < 0.02
    assert not got[..., 48:].any() and not got[0].any() and not got[:, -1].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stored", [torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("kind", ["group", "l2", "rms", "none"])
def test_what_is_not_finite_shows_in_health(backend, kind, stored, value):
    """8 bit makes numbers of it. Nothing else shows there, and once it does it stays."""
    torch.manual_seed(5)
    x, norm = torch.randn(2, 5, 6, 32).half(), Norm(kind, groups=4) if kind == "group" else Norm(kind)
    health = torch.zeros(())

    def pass_(frames, health):
        buffer = torch.empty(2, 7, 8, 32).to(stored)
        coefs = None
        if kind == "group":
            coefs = coefficients(statistics(frames, 4, backend=backend), norm, 30, backend=backend, health=health)
        norm_act(frames, norm, buffer, store=Store(scale=0.05), coefs=coefs, backend=backend, health=health)
        return buffer

    plain = pass_(x, None)
    assert torch.equal(pass_(x, health).float(), plain.float())
    assert health == 0
    x[0, 0, 0, 0] = 60000.0
    pass_(x, health)
    assert health == 0
    x[1, 4, 5, 31] = value
    pass_(x, health)
    assert health.isnan()
    pass_(torch.zeros_like(x), health)
    assert health.isnan()


@pytest.mark.parametrize("kind", ["group", "l2", "rms"])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_not_finite(backend, kind, which):
    """Parameters that are not finite show in health."""
    x, health = torch.randn(2, 5, 6, 32).half(), torch.zeros(())
    norm = Norm(kind, torch.ones(32), torch.zeros(32), groups=4)
    buffer = torch.empty(2, 7, 8, 32).to(torch.int8)
    norm_act(x, norm, buffer, store=Store(scale=0.05), backend=backend, health=health)
    assert health == 0
    getattr(norm, which)[31] = torch.nan
    norm_act(x, norm, buffer, store=Store(scale=0.05), backend=backend, health=health)
    assert health.isnan()
