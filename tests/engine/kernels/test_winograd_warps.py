"""Warps of the Winograd form's tiles on each generation."""

import torch
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Weight, buffer_shape, conv3d
from zerowaste_vae.engine.kernels.conv3d.winograd.schedules import SCHEDULES
from zerowaste_vae.engine.kernels.launching import recording
from zerowaste_vae.engine.kernels.targets import capabilities

HALF = torch.float16


def test_eight_warps_against_spills():
    """Tiles of four warps have eight on RTX 50 with fp16 sums or a residual that is not as wide as the input."""

    def warps(sm, channels=1024, fast=False, residual=False):
        meta, k = {"device": "meta"}, 128
        weight = Weight(torch.empty(4 * k, 9 * channels, dtype=HALF, **meta), channels, k, (3, 3, 3), winograd=True)
        out = torch.empty(1, 200, 200, k, dtype=HALF, **meta)
        x = torch.empty(3, *buffer_shape(200, 200, channels), dtype=HALF, **meta)
        epilogue = Epilogue(residual=torch.empty_like(out) if residual else None, half_accumulate=fast)
        with recording(capabilities("card", sm, (3, 6))) as calls:
            conv3d(x, weight, out, epilogue=epilogue)
        return calls[0].constants["num_warps"]

    assert [warps(120), warps(120, fast=True), warps(120, residual=True)] == [4, 8, 8]
    assert warps(120, channels=128, residual=True) == 4
    assert {warps(sm, fast=True, residual=True) for sm in (80, 89, 90)} == {8}
    assert warps(90) == SCHEDULES[90]["16 bit", "plane"].warps
