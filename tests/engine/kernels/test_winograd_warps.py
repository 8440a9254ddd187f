"""Warps and slices of the Winograd form's tiles on each generation."""

import pytest
import torch
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Weight, buffer_shape, conv3d, pack_planes
from zerowaste_vae.engine.kernels.conv3d.schedules import Schedule
from zerowaste_vae.engine.kernels.conv3d.winograd.schedules import SCHEDULES
from zerowaste_vae.engine.kernels.launching import recording
from zerowaste_vae.engine.kernels.targets import capabilities

HALF, FP8, INT8 = torch.float16, torch.float8_e4m3fn, torch.int8


def call(here, channels, dtype=HALF, k=128, depth=3, size=200, **epilogue):
    """The constants of a launch of `depth` taps in time."""
    meta = {"device": "meta"}
    scale = torch.empty(k, **meta) if dtype.itemsize == 1 else None
    mix = torch.empty(2, k, **meta) if dtype == INT8 else None
    values = torch.empty(4 * k, 3 * depth * channels, dtype=dtype, **meta)
    weight = Weight(values, channels, k, (depth, 3, 3), scale, winograd=True, mix=mix)
    out = torch.empty(1, size, size, k, dtype=HALF, **meta)
    x = torch.empty(depth, *buffer_shape(size, size, channels), dtype=dtype, **meta)
    if epilogue.pop("residual", False):
        epilogue["residual"] = torch.empty_like(out)
    with recording(here) as calls:
        conv3d(x, weight, out, epilogue=Epilogue(**epilogue))
    return calls[0].constants


def test_eight_warps_against_spills():
    """Tiles of four warps have eight on RTX 50 with fp16 sums or a residual that is not as wide as the input."""

    def warps(sm, channels=1024, fast=False, residual=False):
        made = call(capabilities("card", sm, (3, 6)), channels, half_accumulate=fast, residual=residual)
        return made["num_warps"]

    assert [warps(120), warps(120, fast=True), warps(120, residual=True)] == [4, 8, 8]
    assert warps(120, channels=128, residual=True) == 4
    assert {warps(sm, fast=True, residual=True) for sm in (80, 89, 90)} == {8}
    assert warps(90) == SCHEDULES[90]["16 bit", "plane"].warps


@pytest.mark.parametrize(
    ("sm", "dtype", "channels", "depth", "size", "asked", "slices"),
    [
        (86, INT8, 192, 3, 30, dict(), 4),
        (86, INT8, 256, 3, 30, dict(), 2),  # steps a tap are a power of two
        (86, INT8, 192, 1, 30, dict(), 2),
        (86, INT8, 192, 3, 30, dict(residual=True), 2),
        (86, INT8, 192, 3, 30, dict(groups=32), 2),
        (86, INT8, 192, 3, 200, dict(), 2),
        (86, INT8, 256, 1, 200, dict(), 4),
        (86, INT8, 256, 3, 200, dict(), 2),
        (120, INT8, 192, 3, 30, dict(), 2),
        (89, FP8, 128, 1, 30, dict(residual=True, half_accumulate=True), 4),
        (89, FP8, 128, 1, 30, dict(half_accumulate=True), 2),
        (89, FP8, 128, 1, 30, dict(residual=True), 2),
        (89, FP8, 128, 3, 30, dict(residual=True, half_accumulate=True), 2),
        (120, FP8, 128, 1, 30, dict(residual=True, half_accumulate=True), 2),
    ],
)
def test_quarters_against_spills(sm, dtype, channels, depth, size, asked, slices):
    """As `tools/build_kernels.py --check` finds them."""
    made = call(capabilities("card", sm, (3, 6)), channels, dtype, channels, depth, size, **asked)
    assert made["SLICES"] == slices


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
@pytest.mark.parametrize("asked", [dict(), dict(residual=True), dict(residual=True, groups=8)], ids=str)
def test_slices_change_no_bit(interpreter, dtype, asked):
    """Neither of an output nor of a sum, at a width and height that fill no tile."""
    d, h, w, c = 1, 5, 9, 64
    codes = torch.randint(-9, 10, (d + 2, *buffer_shape(h, w, c))).to(dtype)
    packed = pack_planes(torch.randn(c, c, 3, 3, 3) * 0.03, dtype)
    added = torch.randn(d, h, w, c).half() if asked.get("residual") else None
    told = Epilogue(torch.randn(c), added, asked.get("groups", 0), 0.02)
    found = []
    for slices in (1, 2, 4):
        schedule, out = Schedule(32, 64, 32, 4, 2, slices=slices), torch.empty(d, h, w, c, dtype=HALF)
        sums = conv3d(codes, packed, out, epilogue=told, backend="triton", schedule=schedule)
        found.append((out, sums.data if sums else out))
    assert found[0][0].std() > 0.01
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))
