import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from zerowaste_vae.engine.kernels import operators
from zerowaste_vae.engine.kernels.attention import schedules as attention
from zerowaste_vae.engine.kernels.conv3d import (
    Epilogue,
    Geometry,
    Partials,
    conv3d,
    pack_weight,
    schedules,
)
from zerowaste_vae.engine.kernels.conv3d.schedules import Layer, fit, pick
from zerowaste_vae.engine.kernels.conv3d.types import HALF_DEPTH
from zerowaste_vae.engine.kernels.targets import FP8, capabilities

sys.path.insert(0, str(Path(__file__).parent))
from helpers import CAST_STEP, TOLERANCE, always, bordered, error, group_sums, true_sums

HALF, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8

FORMS = [
    # dtype, C, K, (D, H, W), kernel, stride, origin
    (HALF, 32, 32, (2, 5, 7), (3, 3, 3), (1, 1, 1), (0, 0)),
    (BF16, 32, 24, (1, 5, 7), (3, 3, 3), (1, 1, 1), (0, 0)),
    (FP8, 32, 32, (2, 5, 7), (3, 3, 3), (1, 1, 1), (0, 0)),
    (INT8, 64, 32, (1, 5, 7), (3, 3, 3), (1, 1, 1), (0, 0)),
    (HALF, 3, 40, (2, 5, 7), (3, 3, 3), (1, 1, 1), (0, 0)),
    (HALF, 96, 96, (1, 3, 5), (1, 3, 3), (1, 1, 1), (0, 0)),
    (HALF, 32, 3, (3, 5, 7), (3, 1, 1), (1, 1, 1), (1, 1)),
    (HALF, 32, 64, (2, 5, 7), (1, 1, 1), (1, 1, 1), (1, 1)),
    (HALF, 16, 32, (2, 4, 3), (1, 3, 3), (1, 2, 2), (1, 1)),
    (FP8, 32, 32, (2, 4, 3), (3, 3, 3), (2, 2, 2), (1, 1)),
]


def setup(dtype, c, k, shape, kernel, stride, **epilogue):
    d, h, w = shape
    x = bordered(dtype, (d - 1) * stride[0] + kernel[0], h * stride[1], w * stride[2], c)
    weight = torch.randn(k, c, *kernel) * (c * kernel[0] * kernel[1] * kernel[2]) ** -0.5
    scale = 0.025 if dtype == INT8 else 1.0
    return x, weight, Epilogue(bias=torch.randn(k), scale=scale, **epilogue)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_reference_is_the_convolution(form):
    """Against torch's own conv on dequantised operands, in float64, none of the packing in between."""
    dtype, c, k, shape, kernel, stride, origin = form
    x, weight, epilogue = setup(dtype, c, k, shape, kernel, stride)
    out = torch.empty(*shape, k)
    conv3d(x, pack_weight(weight, dtype), out, geometry=Geometry(stride, origin), epilogue=epilogue)
    d, h, w = shape
    x64 = (x.double() * epilogue.scale).permute(3, 0, 1, 2)[None, :c, :, origin[0]:, origin[1]:]
    want = F.conv3d(x64, weight.double(), epilogue.bias.double(), stride=stride)[0].permute(1, 2, 3, 0)[:d, :h, :w]
    # The 8-bit weights' own rounding is in `want` as an error of the result.
    assert error(out, want) < {FP8: 3e-2, INT8: 1e-2, BF16: 4e-3}.get(dtype, 5e-4)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernel_equals_reference(interpreter, form):
    dtype, c, k, shape, kernel, stride, origin = form
    groups = 8 if k % 8 == 0 else 0
    residual = torch.randn(*shape, k).half()
    x, weight, epilogue = setup(dtype, c, k, shape, kernel, stride, groups=groups, residual=residual)
    packed, geometry = pack_weight(weight, dtype), Geometry(stride, origin)
    got, again, want = (torch.full((*shape, k), float("nan")) for _ in range(3))
    sums = conv3d(x, packed, got, geometry=geometry, epilogue=epilogue, backend="triton")
    conv3d(x, packed, again, geometry=geometry, epilogue=epilogue, backend="triton")
    expected = conv3d(x, packed, want, geometry=geometry, epilogue=epilogue, backend="reference")
    assert error(got, want) < 1e-5  # same operands, fp32 accumulation in both
    assert torch.equal(got, again)
    if groups:
        for partials, stored in ((sums, got), (expected, want)):
            assert error(group_sums(partials, groups), true_sums(stored, groups)) < 1e-5


@pytest.mark.parametrize("stored", [HALF, BF16, torch.float32, FP8, INT8], ids=str)
def test_output_types(interpreter, stored):
    x, weight, epilogue = setup(HALF, 32, 32, (1, 5, 7), (3, 3, 3), (1, 1, 1), out_scale=0.01)
    got, want = (torch.zeros(1, 5, 7, 32).to(stored) for _ in range(2))
    for out, backend in ((got, "triton"), (want, "reference")):
        conv3d(x, pack_weight(weight, HALF), out, epilogue=epilogue, backend=backend)
    assert error(got, want) < CAST_STEP.get(stored, TOLERANCE[stored])
    if stored == INT8:
        assert torch.equal(got, want) and got.max() == 127 and got.min() == -127  # saturated, never wrapped


@pytest.mark.parametrize("stored", [FP8, INT8], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_8_bit_hides_shows_in_health(backend, stored, value):
    """Sums of 8-bit products that are none any more, stored in 8 bit again."""
    health = torch.zeros(())
    x, weight, epilogue = setup(INT8, 64, 40, (1, 5, 7), (3, 3, 3), (1, 1, 1), out_scale=0.01, health=health)
    packed, plain, out = pack_weight(weight, INT8), *(torch.zeros(1, 5, 7, 40).to(stored) for _ in range(2))
    conv3d(x, packed, plain, epilogue=replace(epilogue, health=None), backend=backend)
    conv3d(x, packed, out, epilogue=epilogue, backend=backend)
    assert torch.equal(out.float(), plain.float()) and health == 0
    packed.scale[33] = value
    conv3d(x, packed, torch.zeros(1, 5, 7, 40), epilogue=epilogue, backend=backend)
    assert health == 0  # it is in the result
    conv3d(x, packed, out, epilogue=epilogue, backend=backend)
    assert health.isnan()


@pytest.mark.parametrize("dtype", [HALF, FP8], ids=str)
def test_chunks_bands_and_rings_keep_every_bit(interpreter, dtype):
    d, h, w, c = 2, 70, 5, 32
    x, weight, epilogue = setup(dtype, c, c, (d, h, w), (3, 3, 3), (1, 1, 1), groups=8)
    packed = pack_weight(weight, dtype)
    whole = torch.empty(d, h, w, c, dtype=HALF)
    sums = conv3d(x, packed, whole, epilogue=epilogue, backend="triton")
    for f in range(d):
        ring, one = torch.roll(x.float(), 1, 0).to(dtype), torch.empty(1, h, w, c, dtype=HALF)
        part = conv3d(ring, packed, one, epilogue=epilogue, start=(f + 1) % 4, backend="triton")
        assert torch.equal(one[0], whole[f]) and torch.equal(part.data[0], sums.data[f])
    parts = []
    for top, n in ((0, 64), (64, 6)):
        band = torch.empty(d, n, w, c, dtype=HALF)
        geometry = Geometry(first_row=top, frame_rows=h)
        rows = x[:, top : top + n + 2].contiguous()
        parts.append(conv3d(rows, packed, band, geometry=geometry, epilogue=epilogue, backend="triton"))
        assert torch.equal(band, whole[:, top : top + n])
    assert torch.equal(Partials.concat(parts).data, sums.data)


def test_store(interpreter):
    """Strided outputs: the inside of a bordered buffer, and the pixel shuffle of a 1x1x1 expansion."""
    z, c = 2, 32
    x = torch.randn(2, 3, 5, c).half()
    weight, bias = torch.randn(4 * z * c, c, 1, 1, 1) * c**-0.5, torch.randn(4 * z * c)
    packed = pack_weight(weight, HALF, (z, 2, 2))
    want = F.linear(x.float(), packed.data.float(), bias).view(2, 3, 5, 2, 2, z, c)
    want = want.permute(0, 5, 1, 3, 2, 4, 6).reshape(2 * z, 6, 10, c)
    for backend in ("triton", "reference"):
        buffer = torch.full((2 * z + 2, 8, 12, c), 3.0, dtype=HALF)
        conv3d(x, packed, buffer[2:, 1:-1, 1:-1], epilogue=Epilogue(bias=bias), backend=backend)
        assert error(buffer[2:, 1:-1, 1:-1], want) < 5e-4
        assert (buffer[:2] == 3).all() and (buffer[:, 0] == 3).all() and (buffer[:, :, -1] == 3).all()


@pytest.mark.parametrize("dtype, sm, fast, limit", [
    (HALF, 80, False, 1e-5), (INT8, 86, False, 1e-5), (FP8, 89, False, 1e-5),
    (HALF, 89, True, 2e-3), (HALF, 120, True, 2e-3), (FP8, 120, False, 1e-5),
], ids=str)  # fmt: skip
def test_forms_of_other_generations(interpreter, monkeypatch, dtype, sm, fast, limit):
    """Pointers instead of bulk copies, promoted fp16 sums, block scales (where the interpreter can)."""
    monkeypatch.setattr(operators, "kernels_for", always(capabilities("other", sm, (3, 6))))
    small = schedules.Schedule(positions=32, columns=32, depth=32, warps=4, stages=2)
    tiles = dict.fromkeys(schedules.SCHEDULES[90], small)
    monkeypatch.setattr(schedules, "SCHEDULES", {sm: tiles})
    x, weight, epilogue = setup(dtype, 64, 32, (2, 5, 7), (3, 3, 3), (1, 1, 1), groups=8, half_accumulate=fast)
    got, want = (torch.full((2, 5, 7, 32), float("nan")) for _ in range(2))
    sums = conv3d(x, pack_weight(weight, dtype), got, epilogue=epilogue, backend="triton")
    conv3d(x, pack_weight(weight, dtype), want, epilogue=epilogue, backend="reference")
    assert error(got, want) < limit
    assert error(group_sums(sums, 8), true_sums(got, 8)) < 1e-5


@pytest.mark.parametrize("tables", [schedules, attention], ids=["direct", "attention"])
def test_one_table(monkeypatch, tables):
    """The other forms take theirs from the generation before it, and older GPUs keep their own."""

    def chosen(sm):
        layer = capabilities("any", sm, (3, 6)), HALF, 512, 512, (90, 160)
        return [pick(*layer), attention.pick(sm)]

    before = {sm: chosen(sm) for sm in (80, 86, 89, 90)}
    place = [schedules, attention].index(tables)
    monkeypatch.setitem(tables.SCHEDULES, 89, tables.SCHEDULES[90])
    own = [*before[80][:place], before[90][place], *before[80][place + 1 :]]
    assert {sm: chosen(sm) for sm in before} == before | {89: own}


@pytest.mark.parametrize(
    ("channels", "tiles"), [(96, (64, 32)), (192, (128, 64)), (384, (256, 128)), (640, (256, 64)), (512, (256, 0))]
)
def test_odd_widths_are_filled_by_two_tiles(channels, tiles):
    for frame in ((360, 640), (45, 80)):
        chosen = pick(capabilities("any", 90, (3, 6)), HALF, channels, channels, frame)
        assert (chosen.columns, chosen.tail) == tiles
        assert channels % (chosen.columns + chosen.tail) == 0


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("channels", [96, 160, 192, 320, 384, 640, 1024])
def test_odd_widths(dtype, channels):
    """Widths with tiles of their own waste nothing."""
    for frame in ((360, 640), (45, 80)):
        chosen = pick(capabilities("any", 90, (3, 6)), dtype, channels, channels, frame, 1, 3)
        assert channels % (chosen.columns + chosen.tail) == 0
        run = channels if channels % chosen.depth == 0 else 3 * channels
        assert run % chosen.depth == 0 if chosen.rest == 0 else run % chosen.depth % chosen.rest == 0


@pytest.mark.parametrize("sm", [80, 120])
@pytest.mark.parametrize("dtype", [HALF, INT8, FP8])
def test_tiles_for_99_kib_fit_layers_of_any_width(sm, dtype):
    """And 8-bit products stay within fp16, and a narrow layer's one tile may overwrite what it reads."""
    here = capabilities("any", sm, (3, 6))
    for outputs in (3, 12, *range(16, 1040, 16)):
        for phases, frame in itertools.product((1, 4, 8), ((360, 640), (46, 80))):
            s = pick(here, dtype, 96, outputs, frame, phases, 3)
            held = (s.stages - 1) * (s.positions + s.columns + s.tail) * s.depth * dtype.itemsize
            assert held + 64 <= 99 << 10, (outputs, phases, s)
            assert dtype != FP8 or s.depth <= HALF_DEPTH
            if outputs in (16, 32, 64, 128) and phases == 1:
                assert s.columns == outputs


def test_what_else_picks_a_tile():
    """The type, sums, upsampling; a first convolution takes no run of taps."""
    here, full = capabilities("any", 90, (3, 6)), (360, 640)
    table = schedules.SCHEDULES[90]
    for dtype, sums in ((FP8, True), (INT8, True), (INT8, False)):
        assert pick(here, dtype, 512, 512, full, sums=sums) == table[Layer("8 bit", "wide")]
    assert pick(here, FP8, 512, 512, full) == table[Layer("fp8", "wide", sums=False)]
    assert pick(here, INT8, 1024, 1024, full, 4) == table[Layer("8 bit", "space phases")]
    assert pick(here, HALF, 1024, 1024, full, 4) == table[Layer("16 bit", "wide")]
    assert pick(here, FP8, 384, 192, full, 4) == table[Layer("8 bit", "space phases", 192)]
    first = pick(here, HALF, 16, 128, full, 1, 3)
    assert (first.depth, first.rest) == (16, 0)


def test_no_pair_of_tiles():
    chosen = fit(schedules.Schedule(positions=128, columns=128, depth=64, warps=4, stages=3), 64, 176)
    assert (chosen.columns, chosen.tail) == (64, 0)  # 192 columns, not 256


@pytest.mark.parametrize("change, word", [
    (dict(out=torch.empty(2, 5, 8, 32)), "cannot fill"),
    (dict(out=torch.empty(2, 5, 7, 16)), "output must be"),
    (dict(epilogue=Epilogue(groups=5)), "groups"),
    (dict(epilogue=Epilogue(residual=torch.empty(1, 5, 7, 32))), "residual"),
    (dict(start=4), "cannot fill"),
    (dict(geometry=Geometry(first_row=3, frame_rows=9), epilogue=Epilogue(groups=8)), "multiple of 32"),
])  # fmt: skip
def test_wrong_arguments_are_named(change, word):
    x, weight, _ = setup(HALF, 32, 32, (2, 5, 7), (3, 3, 3), (1, 1, 1))
    arguments = dict(out=torch.empty(2, 5, 7, 32, dtype=HALF)) | change
    with pytest.raises(ValueError, match=word):
        conv3d(x, pack_weight(weight, HALF), arguments.pop("out"), **arguments)


@pytest.mark.parametrize(("dtype", "phases", "k"), [
    (HALF, (1, 1, 1), 96), (BF16, (1, 2, 2), 96), (INT8, (1, 1, 1), 96), (HALF, (1, 1, 1), 384),
])  # fmt: skip
@pytest.mark.parametrize("groups", [0, 3, 12])
def test_two_tiles_of_one_program_make_odd_widths(interpreter, dtype, phases, k, groups):
    """The second tile of 384 is finished in halves, if a group lies within one."""
    tiles = (32, 16) if k == 96 else (256, 128)
    x, weight, epilogue = setup(dtype, 32, k * phases[1] * phases[2], (2, 5, 7), (3, 3, 3), (1, 1, 1), groups=groups)
    packed = pack_weight(weight, dtype, phases)
    schedule = schedules.Schedule(positions=32, columns=tiles[0], depth=32, warps=4, stages=2, tail=tiles[1])
    outs = [torch.zeros(2, 5 * phases[1], 7 * phases[2], k) for _ in range(2)]
    sums = [
        conv3d(x, packed, out, epilogue=epilogue, backend=backend, schedule=schedule)
        for out, backend in zip(outs, ("reference", "triton"), strict=True)
    ]
    assert error(outs[1], outs[0]) < TOLERANCE[dtype]
    if groups:
        assert error(group_sums(sums[1], groups), group_sums(sums[0], groups)) < 1e-4


@pytest.mark.parametrize("sm", [89, 90])
@pytest.mark.parametrize(
    ("dtype", "phases", "stride"), [(FP8, (1, 1, 1), 1), (INT8, (1, 2, 2), 1), (HALF, (1, 1, 1), 2)]
)
def test_taps_of_a_row_are_one_run(interpreter, monkeypatch, sm, dtype, phases, stride):
    """96 channels in steps of 64: three taps are four steps and 32 more, two taps are three. What lies behind the
    buffer is never part of a result."""
    monkeypatch.setattr(operators, "kernels_for", always(capabilities("any", sm, (3, 6))))
    width = 2 if phases[1] == 2 else 3
    weight = torch.randn(32 * phases[1] * phases[2], 96, 2, width, width) * 0.03
    packed = pack_weight(weight, dtype, phases)
    packed = replace(packed, shifted=phases[1] == 2)
    schedule = fit(schedules.Schedule(positions=32, columns=32, depth=64, warps=4, stages=2), 96, 32, width)
    assert (schedule.depth, schedule.rest) == (64, 0 if width == 2 else 32)
    behind = torch.full((2000,), 127 if dtype == INT8 else float("nan")).to(dtype)
    x = bordered(dtype, 3, 4, 6, 96)
    x = torch.cat((x.float().flatten().to(dtype).view(torch.uint8), behind.view(torch.uint8))).view(dtype)
    x = x[: 3 * 6 * 8 * 96].view(3, 6, 8, 96)
    outs = [torch.zeros(2, 4 // stride * phases[1], 6 // stride * phases[2], 32) for _ in range(2)]
    geometry = Geometry((1, stride, stride), (stride - 1, stride - 1))
    for out, backend in zip(outs, ("triton", "reference"), strict=True):
        conv3d(x, packed, out, geometry=geometry, epilogue=Epilogue(scale=0.025), schedule=schedule, backend=backend)
    assert error(*outs) < 1e-5


def test_fp8_sums():
    """Fp8 sums of steps that straddle taps fit fp16."""
    weight = torch.zeros(1, 96, 1, 1, 3)
    weight[0, 64:, 0, 0, 0] = weight[0, :32, 0, 0, 1] = 1.0
    packed = pack_weight(weight, FP8)
    assert 30_000 < packed.data.float().sum() * 448 <= torch.finfo(HALF).max


@pytest.mark.parametrize(
    ("phases", "kernel"),
    [((2, 2, 2), (3, 3, 3)), ((2, 1, 1), (3, 3, 3)), ((1, 2, 2), (3, 3, 3)), ((3, 2, 2), (1, 1, 1))],
)
def test_samples(interpreter, phases, kernel):
    """A whole convolution whose store shuffles, with a residual of the result's size."""
    count = phases[0] * phases[1] * phases[2]
    x, weight, _ = setup(HALF, 16, 16 * count, (2, 4, 5), kernel, (1, 1, 1))
    packed = pack_weight(weight, HALF, phases)
    size = 2 * phases[0], 4 * phases[1], 5 * phases[2], 16
    residual = torch.randn(size).to(HALF) if kernel[1] > 1 else None
    epilogue = Epilogue(torch.randn(16 * count), residual)
    outs = [torch.zeros(size, dtype=HALF) for _ in range(2)]
    for out, backend in zip(outs, ("triton", "reference"), strict=True):
        conv3d(x, packed, out, epilogue=epilogue, backend=backend)
    assert error(*outs) < 2e-3
    whole = F.conv3d(x.float().permute(3, 0, 1, 2)[None, :16], weight.to(HALF).float(), epilogue.bias)[0]
    samples = whole.view(phases[1], phases[2], phases[0], 16, 2, *whole.shape[2:])[..., :4, :5]
    want = samples.permute(4, 2, 5, 0, 6, 1, 3).reshape(size) + (0 if residual is None else residual.float())
    assert error(outs[1], want) < 2e-3
