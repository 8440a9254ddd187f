"""The Winograd form against the convolution itself, its kernels against the references."""

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from zerowaste_vae.engine.kernels.conv3d import (
    Epilogue,
    Geometry,
    Partials,
    Pixels,
    buffer_shape,
    conv3d,
    dispatch,
    pack_planes,
    pack_weight,
    padded_channels,
    schedules,
)
from zerowaste_vae.engine.kernels.conv3d.winograd.schedules import SCHEDULES
from zerowaste_vae.engine.kernels.norm_act import Norm, Store, norm_act
from zerowaste_vae.engine.kernels.targets import FP8, capabilities

sys.path.insert(0, str(Path(__file__).parent))
from helpers import CAST_STEP, TOLERANCE, always, error, group_sums, true_sums

HALF, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8
COPY = Norm("none")
SCALES = {INT8: 0.03, FP8: 0.02}


def frames(d, h, w, c):
    return F.silu(torch.randn(d, h, w, c))


def planes(x, dtype, **store):
    """[D, H, W, C] -> the buffer of their planes, by the reference."""
    d, h, w, c = x.shape
    buffer = torch.empty(d, *buffer_shape(h, w, padded_channels(c, dtype)), dtype=dtype)
    norm_act(x, COPY, buffer, store=Store(silu=False, scale=SCALES.get(dtype, 1.0), **store))
    return buffer


def true(x, weight, bias=None, border="constant"):
    """In float64, [D, H, W, C] with its history -> [D', H, W, K]."""
    x = F.pad(x.double().permute(3, 0, 1, 2), (1, 1, 1, 1), border)[None]
    return F.conv3d(x, weight.double(), None if bias is None else bias.double())[0].permute(1, 2, 3, 0)


SIZES = [(2, 5, 7), (1, 1, 2), (2, 1, 9), (1, 6, 8), (1, 3, 1)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kt", [1, 3])
def test_reference_is_the_convolution(size, kt):
    d, h, w = size
    x, weight, bias = frames(d + kt - 1, h, w, 6), torch.randn(10, 6, kt, 3, 3), torch.randn(10)
    out = torch.empty(*size, 10)
    conv3d(planes(x, torch.float32), pack_planes(weight, torch.float32), out, epilogue=Epilogue(bias=bias))
    assert error(out, true(x, weight, bias)) < 2e-6


@pytest.mark.parametrize(("border", "size"), [
    *(("replicate", size) for size in (*SIZES, (1, 1, 1))), *(("reflect", size) for size in ((2, 5, 7), (1, 2, 2))),
], ids=str)  # fmt: skip
def test_reference_borders(border, size):
    """Reference is the convolution beside other borders."""
    x, weight, out = frames(size[0] + 2, *size[1:], 6), torch.randn(10, 6, 3, 3, 3), torch.empty(*size, 10)
    conv3d(planes(x, torch.float32, border=border), pack_planes(weight, torch.float32), out)
    assert error(out, true(x, weight, border=border)) < 2e-6


@pytest.mark.parametrize("dtype", [HALF, BF16, FP8, INT8], ids=str)
def test_error_of_one_convolution(dtype):
    """About 2 dB more than the direct form's on operands of the same type."""
    x, weight = frames(3, 8, 32, 64), torch.randn(32, 64, 3, 3, 3) * (64 * 27) ** -0.5
    want, got, direct = true(x, weight), torch.empty(1, 8, 32, 32), torch.empty(1, 8, 32, 32)
    told = Epilogue(scale=SCALES.get(dtype, 1.0))
    conv3d(planes(x, dtype), pack_planes(weight, dtype), got, epilogue=told)
    plain = torch.empty(3, 10, 34, 64, dtype=dtype)
    norm_act(x, COPY, plain, store=Store(silu=False, scale=SCALES.get(dtype, 1.0)))
    conv3d(plain, pack_weight(weight, dtype), direct, epilogue=told)
    assert error(got, want) < 1.36 * error(direct, want)  # 2.7 dB


FORMS = [(HALF, 32, 32, 3), (BF16, 48, 40, 1), (FP8, 32, 32, 3), (INT8, 96, 32, 1), (FP8, 64, 96, 2),
         (BF16, 96, 192, 1), (INT8, 32, 96, 1)]
FORMS = [(form, size) for form in FORMS for size in (SIZES if form == FORMS[0] else SIZES[1:3])]


@pytest.mark.parametrize(("form", "size"), FORMS, ids=str)
def test_kernel_equals_reference(interpreter, form, size):
    dtype, c, k, kt = form
    d, h, w = size
    x, weight = frames(d + kt - 1, h, w, c), torch.randn(k, c, kt, 3, 3) * (9 * kt * c) ** -0.5
    buffer, packed = planes(x, dtype), pack_planes(weight, dtype)
    told = Epilogue(torch.randn(k), torch.randn(*size, k).half(), 8, SCALES.get(dtype, 1.0))
    got, again, want = (torch.full((*size, k), float("nan")) for _ in range(3))
    sums = conv3d(buffer, packed, got, epilogue=told, backend="triton")
    conv3d(buffer, packed, again, epilogue=told, backend="triton")
    expected = conv3d(buffer, packed, want, epilogue=told, backend="reference")
    # int8 sums are rounded once to whole units of the outer planes.
    assert error(got, want) < (1e-4 if dtype == INT8 else 1e-5)
    assert torch.equal(got, again)
    for partials, stored in ((sums, got), (expected, want)):
        assert error(group_sums(partials, 8), true_sums(stored, 8)) < 1e-5


@pytest.mark.parametrize("dtype", [HALF, FP8, INT8], ids=str)
def test_chunks_bands_and_rings_keep_every_bit(interpreter, dtype):
    d, h, w, c = 2, 70, 3, 32
    x, weight = frames(d + 2, h, w, c), torch.randn(c, c, 3, 3, 3) * 0.03
    buffer, packed = planes(x, dtype), pack_planes(weight, dtype)
    told = Epilogue(torch.randn(c), groups=8, scale=SCALES.get(dtype, 1.0))
    whole = torch.empty(d, h, w, c, dtype=HALF)
    sums = conv3d(buffer, packed, whole, epilogue=told, backend="triton")
    ring = torch.cat((buffer[-1:].float(), buffer[:-1].float())).to(dtype)
    for f in range(d):
        one = torch.empty(1, h, w, c, dtype=HALF)
        part = conv3d(ring, packed, one, epilogue=told, start=(f + 1) % 4, backend="triton")
        assert torch.equal(one[0], whole[f]) and torch.equal(part.data[0], sums.data[f])
    parts = []
    for top, n in ((0, 64), (64, 6)):
        band = torch.empty(d, n, w, c, dtype=HALF)
        geometry = Geometry(first_row=top, frame_rows=h)
        rows = buffer[:, :, top : top + n + 2].contiguous()
        parts.append(conv3d(rows, packed, band, geometry=geometry, epilogue=told, backend="triton"))
        assert torch.equal(band, whole[:, top : top + n])
    assert torch.equal(Partials.concat(parts).data, sums.data)


@pytest.mark.parametrize("dtype", [HALF, FP8, INT8], ids=str)
@pytest.mark.parametrize("phases", [(2, 2, 2), (1, 2, 2)])
def test_phases_are_shuffled_into_the_output(backend, dtype, phases):
    """Each as the rows of its own weight would be; the residual lies where the result goes."""
    (pt, py, px), (d, h, w), c, k = phases, (2, 5, 7), 32, 32
    count = pt * py * px
    x, weight, bias = frames(d + 2, h, w, c), torch.randn(count * k, c, 3, 3, 3) * 0.03, torch.randn(count * k)
    buffer, packed = planes(x, dtype), pack_planes(weight, dtype, phases)
    around = torch.randn(d * pt, h * py, w * px, k).half()
    got = around.clone()
    told = Epilogue(bias, got, scale=SCALES.get(dtype, 1.0))
    conv3d(buffer, packed, got, epilogue=told, backend=backend)
    for number in range(count):
        place = slice(number % pt, None, pt), slice(number // (pt * px), None, py), slice(number // pt % px, None, px)
        rows = slice(number * k, number * k + k)
        alone, want = pack_planes(weight[rows], dtype), torch.empty(d, h, w, k, dtype=HALF)
        told = Epilogue(bias[rows], around[place], scale=SCALES.get(dtype, 1.0))
        conv3d(buffer, alone, want, epilogue=told, backend=backend)
        assert torch.equal(got[place], want)
    with pytest.raises(ValueError, match="makes no sums"):
        conv3d(buffer, packed, got, epilogue=Epilogue(groups=8), backend=backend)


@pytest.mark.parametrize("dtype", [HALF, INT8], ids=str)
def test_a_clips_first_frames(backend, dtype):
    """Summed temporal taps: against all taps on the copies, and frame by frame against the whole."""
    x, weight = frames(4, 5, 7, 32), torch.randn(32, 32, 3, 3, 3) * 0.03
    buffer = planes(torch.cat((x[:1], x[:1], x)), dtype)
    early, told = pack_planes(weight, dtype, early=True), Epilogue(scale=SCALES.get(dtype, 1.0))
    assert [piece.kernel for piece in early.early] == [(1, 3, 3), (2, 3, 3)]

    def run(first, count):
        out = torch.empty(count, 5, 7, 32)
        for piece, a, b, later in early.pieces(first, count):
            conv3d(buffer, piece, out[a:b], epilogue=told, start=first + a + later, backend=backend)
        return out

    whole = run(0, 4)
    assert error(whole, true(torch.cat((x[:1], x[:1], x)), weight)) < {HALF: 1e-3, INT8: 3e-2}[dtype]
    assert torch.equal(torch.cat([run(f, 1) for f in range(4)]), whole)


@pytest.mark.parametrize("stored", [HALF, BF16, torch.float32, FP8, INT8, torch.uint8], ids=str)
def test_output_types_into_the_next_buffer(interpreter, stored):
    """Strided outputs: the inside of a bordered buffer; pixels for bytes."""
    x, weight = frames(3, 5, 7, 32), torch.randn(32, 32, 3, 3, 3) * 0.03
    packed, buffer = pack_planes(weight, HALF), planes(x, HALF)
    pixels = Pixels(127.5, 127.5, 0.0, 255.0) if stored == torch.uint8 else None
    told = Epilogue(torch.randn(32), out_scale=0.01, pixels=pixels)
    both = [torch.full((2, 7, 9, 32), 3.0).to(stored) for _ in range(2)]
    for out, backend in zip(both, ("triton", "reference"), strict=True):
        conv3d(buffer, packed, out[1:, 1:-1, 1:-1], epilogue=told, backend=backend)
        assert (out[0].float() == 3).all() and (out[:, 0].float() == 3).all() and (out[:, :, -1].float() == 3).all()
    got, want = (out[1:, 1:-1, 1:-1].float() for out in both)
    assert error(got, want) < CAST_STEP.get(stored, TOLERANCE.get(stored, 1e-2))
    if not stored.is_floating_point:
        # The interpreter's sums differ in their order: a value may stand on the edge between two integers.
        assert ((got - want).abs() <= 1).all()


@pytest.mark.parametrize("dtype, sm, fast, limit", [
    (HALF, 80, False, 1e-5), (INT8, 86, False, 1e-4), (FP8, 89, False, 1e-5),
    (HALF, 89, True, 2e-3), (HALF, 120, True, 2e-3), (FP8, 120, False, 1e-5), (BF16, 100, False, 1e-5),
], ids=str)  # fmt: skip
def test_forms_of_other_generations(interpreter, monkeypatch, dtype, sm, fast, limit):
    monkeypatch.setattr(dispatch, "kernels_for", always(capabilities("other", sm, (3, 6))))
    x, weight = frames(4, 5, 7, 64), torch.randn(32, 64, 3, 3, 3) * 0.03
    got, want = (torch.full((2, 5, 7, 32), float("nan")) for _ in range(2))
    told = Epilogue(groups=8, scale=SCALES.get(dtype, 1.0), half_accumulate=fast)
    packed, buffer = pack_planes(weight, dtype), planes(x, dtype)
    sums = conv3d(buffer, packed, got, epilogue=told, backend="triton")
    conv3d(buffer, packed, want, epilogue=told, backend="reference")
    assert error(got, want) < limit
    assert error(group_sums(sums, 8), true_sums(got, 8)) < 1e-5


@pytest.mark.parametrize("dtype", [HALF, INT8], ids=str)
def test_a_rest_makes_odd_widths(interpreter, dtype):
    """96 channels in steps of 64 and one of 32; of 48 outputs the last tile has 16."""
    x, weight = frames(3, 5, 7, 96), torch.randn(48, 96, 3, 3, 3) * 0.03
    packed, buffer = pack_planes(weight, dtype), planes(x, dtype)
    schedule = schedules.Schedule(positions=32, columns=32, depth=64, warps=4, stages=2, rest=32)
    outs = [torch.zeros(1, 5, 7, 48) for _ in range(2)]
    told = Epilogue(torch.randn(48), groups=3, scale=SCALES.get(dtype, 1.0))
    sums = [
        conv3d(buffer, packed, out, epilogue=told, backend=backend, schedule=schedule)
        for out, backend in zip(outs, ("reference", "triton"), strict=True)
    ]
    assert error(outs[1], outs[0]) < 1e-4
    assert error(group_sums(sums[1], 3), group_sums(sums[0], 3)) < 1e-4


@pytest.mark.parametrize("groups", [0, 8])
@pytest.mark.parametrize("kind", ["wider", "wider with sums"])
def test_one_and_a_half_tiles_equal_the_reference(interpreter, kind, groups):
    x, weight = frames(2, 5, 7, 32), torch.randn(192, 32, 1, 3, 3) * 0.05
    schedule = dataclasses.replace(SCHEDULES[90]["16 bit", kind], depth=32)
    told = Epilogue(torch.randn(192), torch.randn(2, 5, 7, 192).half(), groups)
    outs = [torch.full((2, 5, 7, 192), float("nan")) for _ in range(2)]
    sums = [
        conv3d(planes(x, HALF), pack_planes(weight, HALF), out, epilogue=told, backend=backend, schedule=schedule)
        for out, backend in zip(outs, ("reference", "triton"), strict=True)
    ]
    assert error(outs[1], outs[0]) < 1e-5
    if groups:
        assert error(group_sums(sums[1], 8), group_sums(sums[0], 8)) < 1e-5


def test_int8_planes(interpreter):
    """Kernels whose outer taps are zero: the outer planes' scale does not follow them down."""
    weight = torch.zeros(32, 32, 1, 3, 3)
    weight[..., 1] = torch.randn(32, 32, 1, 3) * 0.1
    x, outs = frames(1, 5, 8, 32), [torch.empty(1, 5, 8, 32) for _ in range(2)]
    packed = pack_planes(weight, INT8)
    assert packed.mix.max() <= 4
    for out, backend in zip(outs, ("triton", "reference"), strict=True):
        conv3d(planes(x, INT8), packed, out, epilogue=Epilogue(scale=SCALES.get(INT8, 1.0)), backend=backend)
        assert error(out, true(x, weight)) < 3e-2


def test_channels_of_int8_are_balanced():
    """Folded into the weights, of the first frames too."""
    gains = torch.logspace(-1, 1, 32)
    x, weight = frames(3, 5, 8, 32) * gains, torch.randn(16, 32, 3, 3, 3)
    x[:2] = x[2]
    seen = []

    def balance(rows):
        seen.append(rows.shape)
        return gains * 0.04

    packed = pack_planes(weight, INT8, early=True, balance=balance)
    assert seen == [(16, 27, 32)]
    buffer = torch.empty(3, *buffer_shape(5, 8, 32), dtype=INT8)
    norm_act(x, COPY, buffer, store=Store(silu=False, gain=1 / (gains * 0.04)))
    for piece, start in ((packed, 0), (packed.early[0], 2), (packed.early[1], 1)):
        out = torch.empty(1, 5, 8, 16)
        conv3d(buffer, piece, out, start=start)
        assert error(out, true(x, weight)) < 4e-2


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("case", [
    ("group", HALF, "zero", 48, (5, 9)), ("group", FP8, "zero", 32, (5, 8)), ("rms", HALF, "zero", 16, (5, 1)),
    ("l2", BF16, "replicate", 20, (5, 13)), ("none", torch.float32, "replicate", 8, (5, 3)),
    ("group", INT8, "replicate", 64, (3, 2)), ("group", HALF, "replicate", 32, (1, 1)),
    ("group", FP8, "replicate", 32, (1, 5)), ("group", HALF, "reflect", 32, (2, 2)),
    ("rms", INT8, "reflect", 32, (3, 3)), ("l2", FP8, "reflect", 40, (5, 11)), ("none", BF16, "reflect", 16, (2, 8)),
], ids=str)  # fmt: skip
def test_planes_are_those_of_the_plain_buffer(backend, rounded, case):
    kind, dtype, border, c, (h, w) = case
    x = (torch.randn(2, h, w, c) * 2 + 1).half()
    norm = Norm(kind, torch.rand(c) + 0.5, torch.randn(c), 8)
    scale, wide = 0.05 if dtype.itemsize == 1 else 1.0, padded_channels(c, dtype)
    store = Store(kind != "none", border, scale, rounded=rounded)
    got = torch.full((4, *buffer_shape(h, w, wide)), 9.0).to(dtype)
    norm_act(x, norm, got, slot=3, store=store, backend=backend)
    assert (got[1:3].float() == torch.tensor(9.0).to(dtype).float()).all()  # other slots are left alone
    got = torch.stack((got[3], got[0])).float()
    plain = torch.empty(2, h + 2, w + 2, wide, dtype=dtype if rounded else torch.float32)
    norm_act(x, norm, plain, store=store, backend=backend)
    y = plain.float() / (scale if dtype.itemsize == 1 and not rounded else 1.0)
    # Behind the border of an odd width, which no output reads: zeros, the last column, or the third from the end.
    tail = {"zero": torch.zeros_like(y[:, :, :1]), "replicate": y[:, :, -1:], "reflect": y[:, :, -4:][:, :, :1]}
    y = torch.cat((y, tail[border]), 2)
    d0, d1, d2, d3 = (y[:, :, i : i + 2 * got.shape[3] : 2] for i in range(4))
    want = torch.stack((d0 - d2, (d1 + d2) / 2, d2 - d1, d3 - d1), 1)
    if dtype in (FP8, INT8):
        want = want.clamp(*((-448, 448) if dtype == FP8 else (-127, 127)))
    assert error(got, want) < {INT8: 6e-2, FP8: CAST_STEP[FP8]}.get(dtype, TOLERANCE[dtype])
    assert not got[..., c:].any()


@pytest.mark.parametrize(("kind", "border", "size"), [
    *itertools.product(["group", "l2"], ["zero", "replicate", "reflect"], [(9, 11)]), ("rms", "zero", (9, 16)),
    ("l2", "zero", (1, 1)), ("l2", "replicate", (3, 2)), ("rms", "reflect", (2, 2)), ("l2", "zero", (2, 8)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [HALF, BF16, FP8, INT8], ids=str)
def test_a_plain_history_becomes_the_same_planes(backend, dtype, kind, border, size):
    """A history parked plain comes back as planes: bit for bit what they would have been, frame by frame."""
    (h, w), scale = size, 0.05 if dtype.itemsize == 1 else 1.0
    x, bias = torch.randn(2, h, w, 40).half(), None if kind == "l2" else torch.rand(40)
    norm, wide = Norm(kind, torch.rand(40) + 0.5, bias, 8), padded_channels(40, dtype)
    shapes = (h + 2, w + 2, wide), buffer_shape(h, w, wide)
    plain, whole = (torch.full((3, *shape), 9.0).to(dtype) for shape in shapes)
    for buffer in (plain, whole):
        norm_act(x, norm, buffer, slot=2, store=Store(True, border, scale, rounded=True), backend=backend)
    bands = (0, h + 2), (0, (h + 3) // 2), (h // 3, h // 3 + 3), (h // 2, h + 2)
    for slot, frame in ((2, x[:1]), (0, x[1:])):
        for first, last in bands:  # with the rows of the border that they have, of the frame alone
            later = torch.empty_like(whole[:1, :, first:last])
            rows = plain[slot : slot + 1, first:last, 1:-1, :40]
            norm_act(rows, COPY, later, store=Store(False, border), first=1, backend=backend)
            assert torch.equal(later[0], whole[slot, :, first:last])
            again = torch.empty_like(plain[:1, first:last])
            norm_act(frame, norm, again, store=Store(True, border, scale, rounded=True), first=first, backend=backend)
            assert torch.equal(again[0], plain[slot, first:last])
    assert not plain[[0, 2]][..., 40:].any() and (plain[1] == torch.tensor(9.0).to(dtype)).all()
    unrounded = torch.empty_like(plain[1:])
    norm_act(x, norm, unrounded, store=Store(True, border, scale), backend=backend)
    assert error(plain[[2, 0]].float(), unrounded.float()) < {FP8: 1e-2, INT8: 1e-2}.get(dtype, 1e-4)


@pytest.mark.parametrize("border", ["zero", "replicate", "reflect"])
def test_bands_hold_the_frames_own_rows(backend, border):
    x = torch.randn(2, 13, 9, 20).half()
    whole = torch.full((3, *buffer_shape(13, 9, 32)), -1.0).half()
    norm_act(x, COPY, whole, slot=1, store=Store(border=border), backend=backend)
    for first, rows in ((0, 6), (4, 7), (10, 5), (0, 15)):
        band = torch.full((3, 4, rows, 5, 32), -1.0).half()
        norm_act(x, COPY, band, slot=1, store=Store(border=border), first=first, backend=backend)
        assert torch.equal(band, whole[:, :, first : first + rows])


@pytest.mark.parametrize("kind", ["l2", "none"])
def test_what_is_not_finite_shows_in_health(backend, kind):
    """8 bit makes numbers of it. In any column of the last pair, too."""
    buffer = torch.empty(1, *buffer_shape(3, 11, 32), dtype=INT8)
    for column in (None, 0, 5, 10):
        x, health = torch.randn(1, 3, 11, 32).half(), torch.zeros(())
        if column is not None:
            x[0, 1, column, 7] = float("inf")
        norm_act(x, Norm(kind), buffer, store=Store(scale=0.05), backend=backend, health=health)
        assert health.isnan() == (column is not None)


def test_channels_first_input_is_read_in_place(interpreter):
    x = torch.randn(2, 20, 5, 6).permute(0, 2, 3, 1)
    both = [torch.empty(2, *buffer_shape(5, 6, 32), dtype=HALF) for _ in range(2)]
    for buffer, backend in zip(both, ("reference", "triton"), strict=True):
        norm_act(x, COPY, buffer, store=Store(silu=False), backend=backend)
    assert torch.equal(*both)


@pytest.mark.parametrize("change, word", [
    (dict(x=torch.empty(4, 7, 9, 32, dtype=HALF)), "pairs"),
    (dict(x=torch.empty(4, 4, 7, 5, 32, dtype=HALF)), "cannot make"),
    (dict(x=torch.empty(4, 4, 6, 4, 32, dtype=HALF)), "cannot fill"),
    (dict(geometry=Geometry(stride=(1, 2, 2))), "cannot make"),
    (dict(geometry=Geometry(origin=(1, 1))), "cannot make"),
    (dict(start=4), "cannot fill"),
])  # fmt: skip
def test_wrong_arguments_are_named(change, word):
    arguments = dict(x=torch.empty(4, *buffer_shape(5, 7, 32), dtype=HALF)) | change
    packed, out = pack_planes(torch.randn(32, 32, 3, 3, 3), HALF), torch.empty(2, 5, 7, 32, dtype=HALF)
    with pytest.raises(ValueError, match=word):
        conv3d(arguments.pop("x"), packed, out, **arguments)


@pytest.mark.parametrize("change, word", [
    (dict(border=0), "border of 1"),
    (dict(buffer=torch.empty(2, 3, 7, 3, 32)), "planes are 4"),
    (dict(buffer=torch.empty(2, 4, 7, 5, 32)), "does not hold"),
])  # fmt: skip
def test_wrong_planes_are_named(change, word):
    arguments = dict(buffer=torch.empty(2, *buffer_shape(5, 6, 32))) | change
    with pytest.raises(ValueError, match=word):
        norm_act(torch.randn(2, 5, 6, 32), COPY, arguments.pop("buffer"), **arguments)


def test_only_three_columns_have_this_form():
    with pytest.raises(ValueError, match="takes 3"):
        pack_planes(torch.randn(8, 8, 1, 1, 1), HALF)
