"""The Winograd form in registers: its algebra against the convolution itself, its packing, its texts."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Geometry, conv3d, pack_tiles, pack_weight, sums_bytes
from zerowaste_vae.engine.kernels.conv3d.winograd2d import launch, takes
from zerowaste_vae.engine.kernels.conv3d.winograd2d.algebra import SLOTS, SWEEPS, tasks
from zerowaste_vae.engine.kernels.conv3d.winograd2d.form import Form
from zerowaste_vae.engine.kernels.conv3d.winograd2d.pack import unpacked
from zerowaste_vae.engine.kernels.conv3d.winograd2d.ptx import text

HALF, BF16 = torch.float16, torch.bfloat16
FORMS = {
    "128 channels": Form("f16", residual=True, span=4),
    "bf16": Form("bf16", residual=True, bias=False, span=16),
    "96 channels": Form("f16", per_warp=48, residual=True, span=1),
    "96 channels, tall": Form("bf16", rows=6, per_warp=48, residual=True),
    "64 channels": Form("f16", rows=8, wide=1, span=2),
    "spans of several threads": Form("f16", span=64),
}


def weights(k, c, kt=3):
    return torch.randn(k, c, kt, 3, 3) * (2 / (9 * kt * c)) ** 0.5


def true(x, weight, bias, size):
    """In float64: frames [T, Hp, Wp, C] in order -> [D, H, W, K]."""
    d, h, w = size
    x = x[: d + weight.shape[2] - 1, : h + 2, : w + 2].permute(3, 0, 1, 2)[None].double()
    return F.conv3d(x, weight.double(), bias.double())[0].permute(1, 2, 3, 0)


def error(out, exact):
    return ((out.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("size", [(2, 5, 7), (1, 1, 2), (2, 1, 9), (1, 6, 8), (1, 3, 1)], ids=str)
@pytest.mark.parametrize(("kt", "k"), [(1, 64), (2, 96), (3, 128)])
def test_reference_is_the_convolution(size, kt, k):
    """In float32, where roundings of sums are small; any slot of a ring may come first, and the window may begin
    inside."""
    (d, h, w), (top, left) = size, (2, 1)
    x, weight, bias = torch.randn(d + kt, h + 2 + top, w + 2 + left, 32), weights(k, 32, kt), torch.randn(k)
    out, residual = torch.full((*size, k), torch.nan), torch.randn(*size, k)
    conv3d(x, pack_tiles(weight, torch.float32), out, geometry=Geometry(origin=(top, left)), start=2 % (d + kt),
           epilogue=Epilogue(bias=bias, residual=residual))  # fmt: skip
    inside = torch.roll(x, -(2 % (d + kt)), 0)[:, top:, left:]
    assert error(out, true(inside, weight, bias, size) + residual) < 2e-6


@pytest.mark.parametrize(("dtype", "least"), [(HALF, 62), (BF16, 44)], ids=str)
def test_error_of_one_convolution(dtype, least):
    """Sums of inputs are rounded to their type: a few dB more than the direct form's."""
    size, weight, bias = (2, 12, 20), weights(64, 64), torch.zeros(64)
    x, out = F.silu(torch.randn(4, 14, 22, 64)).to(dtype), torch.empty(2, 12, 20, 64, dtype=dtype)
    conv3d(x, pack_tiles(weight, dtype), out, epilogue=Epilogue(bias=bias))
    found = error(out, true(x, weight, bias, size))
    conv3d(x, pack_weight(weight, dtype), out, epilogue=Epilogue(bias=bias))
    direct = error(out, true(x, weight, bias, size))
    assert direct < found < 10 ** (-least / 20)


def test_first_frames_have_weights_of_their_own():
    weight, x = weights(64, 64), torch.randn(1, 6, 6, 64).expand(3, -1, -1, -1).contiguous()
    packed, (whole, out) = pack_tiles(weight, torch.float32, early=True), torch.empty(2, 1, 4, 4, 64)
    conv3d(x, packed, whole)
    for count, early in enumerate(packed.early, 1):
        assert early.tiles and early.kernel[0] == count
        conv3d(x[:count].contiguous(), early, out)
        assert error(out, whole.double()) < 2e-6


def test_phases_are_shuffled_by_the_store():
    """Each lands between the others, with its own bias and residual, as in the direct form."""
    weight, x, phases = weights(4 * 64, 64), torch.randn(3, 7, 9, 64), (1, 2, 2)
    how = {"epilogue": Epilogue(bias=torch.randn(4 * 64), residual=torch.randn(1, 10, 14, 64))}
    out, direct = torch.empty(2, 1, 10, 14, 64)
    conv3d(x, pack_tiles(weight, torch.float32, phases), out, **how)
    conv3d(x, pack_weight(weight, torch.float32, phases), direct, **how)
    assert error(out, direct.double()) < 2e-6
    with pytest.raises(ValueError, match="no sums of outputs that lie between"):
        conv3d(x, pack_tiles(weight, torch.float32, phases), out, epilogue=Epilogue(groups=8))


def test_bands_have_the_bits_of_the_frame():
    """Pairs of rows are the frame's own."""
    x, packed = torch.randn(3, 39, 12, 64).to(HALF), pack_tiles(weights(64, 64), HALF)
    whole, band = torch.empty(1, 37, 10, 64, dtype=HALF), torch.empty(1, 5, 10, 64, dtype=HALF)
    conv3d(x, packed, whole)
    conv3d(x[:, 32:].contiguous(), packed, band, geometry=Geometry(first_row=32, frame_rows=37))
    assert torch.equal(band, whole[:, 32:])
    with pytest.raises(ValueError, match="from an even row on"):
        conv3d(x, packed, band, geometry=Geometry(first_row=31, frame_rows=37))


@pytest.mark.parametrize("geometry", [Geometry((1, 2, 2)), Geometry((2, 1, 1))], ids=str)
def test_strides_are_refused(geometry):
    with pytest.raises(ValueError, match="stride 1"):
        conv3d(torch.zeros(3, 8, 8, 64, dtype=HALF), pack_tiles(weights(64, 64), HALF),
               torch.empty(1, 3, 3, 64, dtype=HALF), geometry=geometry)  # fmt: skip


def test_every_product_is_made_once():
    made = [(slot.q, slot.p) for sweep in SWEEPS for slot in sweep]
    assert sorted(made) == [(q, p) for q in range(4) for p in range(4)]
    for number in range(len(SWEEPS)):
        assert [slot for task in tasks(number) for slot in task.slots] == list(range(SLOTS))


def test_packing_keeps_every_weight():
    """In the place that the reference finds it; the corners are taps themselves."""
    weight = weights(192, 64)
    u = unpacked(pack_tiles(weight, torch.float32))
    assert u.numel() == 16 * 3 * 192 * 64
    for number, sweep in enumerate(SWEEPS):
        for slot, (q, p, _) in enumerate(sweep):
            if q in (0, 3) and p in (0, 3):
                assert torch.equal(u[number, slot], weight[..., 2 * (q == 3), 2 * (p == 3)].permute(2, 0, 1))


def test_widths_that_take_it():
    for dtype in (HALF, BF16):
        found = [k for k in (32, 64, 96, 100, 128, 192, 256, 384, 512, 1024) if takes(dtype, 128, k)]
        assert found == [64, 96, 128, 192, 256, 384, 512, 1024]
        assert not takes(dtype, 32, 128) and not takes(dtype, 100, 128)
    assert not takes(torch.int8, 128, 128) and not takes(torch.float32, 128, 128)


@pytest.mark.parametrize("size", [(90, 160), (720, 1280), (37, 5), (1, 1)], ids=str)
@pytest.mark.parametrize(("k", "groups"), [(128, 32), (192, 32), (384, 32), (768, 32), (1024, 32), (64, 16)])
def test_sums_are_stated(size, k, groups):
    """As the launch lays them out: never more than plans say."""
    with torch.device("meta"):
        packed = pack_tiles(torch.empty(k, 64, 1, 3, 3), HALF)
        x, out = torch.empty(2, size[0] + 2, size[1] + 2, 64, dtype=HALF), torch.empty(2, *size, k, dtype=HALF)
    partials = launch.launch(x, packed, out, Geometry(), Epilogue(groups=groups), 0)
    stated = sums_bytes((2, *size, k), groups, tiles=True)
    assert (k // groups) % partials.span == 0 and partials.data.nbytes <= stated <= 4.5 * partials.data.nbytes


def test_blocks_of_sums_do_not_straddle_bands():
    """Blocks are as high as divides a band's rows wherever sums are made, and the same for any part of a frame."""
    for k in (64, 96, 128):
        packed = pack_tiles(torch.empty(k, 64, 1, 3, 3, device="meta"), HALF)
        form = launch.form_of(packed, (720, 1280), Epilogue(groups=8))
        assert 32 % (2 * form.rows) == 0 and form.span


@pytest.mark.parametrize("name", FORMS)
def test_texts(name, tmp_path):
    """Each is taken for every consumer card without spills, in its registers and shared memory; no product is lost."""
    triton = pytest.importorskip("triton", reason="its ptxas is Triton's")
    form = FORMS[name]
    made = text(form)
    assert made.count("mma.sync") == len(SWEEPS) * SLOTS * form.per_warp // 8
    assert form.shared <= 99 << 10 and form.threads <= 512
    (tmp_path / "one.ptx").write_text(made, encoding="utf-8")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for sm in (86, 120):
        tool = tools / ("ptxas-blackwell" if sm >= 100 else "ptxas")
        done = subprocess.run([tool, "-v", f"-arch=sm_{sm}", "one.ptx", "-o", "one.cubin"], cwd=tmp_path,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert set(map(int, re.findall(r"(\d+) bytes spill", done.stderr))) == {0}
        (registers,) = map(int, re.findall(r"Used (\d+) registers", done.stderr))
        assert registers * form.threads <= 1 << 16
