"""Cases of check_kernels_gpu.py for the Winograd form: (name, error, limit, equal bits or not)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from zerowaste_vae.engine.kernels.conv3d import (
    Epilogue,
    Geometry,
    Partials,
    buffer_shape,
    conv3d,
    pack_planes,
    padded_channels,
)
from zerowaste_vae.engine.kernels.conv3d.schedules import Schedule
from zerowaste_vae.engine.kernels.conv3d.tuned import Kind
from zerowaste_vae.engine.kernels.conv3d.winograd.launch import launch
from zerowaste_vae.engine.kernels.norm_act import Norm, Store, norm_act
from zerowaste_vae.engine.kernels.targets import FP8, target
from zerowaste_vae.engine.tuning.candidates import candidates

DEVICE = torch.device("cuda")
HALF, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8
LIMIT = {HALF: 5e-4, BF16: 4e-3, FP8: 4e-2, INT8: 2e-2}
SHAPES = ((2, 37, 53), (1, 64, 96), (1, 1, 2), (1, 20, 3840))
#: Neighbouring pairs that a program of norm_act goes through, and elements of one column of its pairs.
WALKS = ((1, 1024), (2, 1024), (4, 1024), (8, 1024), (4, 2048))
Row = tuple[object, ...]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def scale_of(dtype: torch.dtype) -> float:
    return 0.02 if dtype.itemsize == 1 else 1.0


def planes(dtype: torch.dtype, d: int, h: int, w: int, c: int) -> torch.Tensor:
    x = torch.nn.functional.silu(torch.randn(d, h, w, c, device=DEVICE))
    buffer = torch.empty(d, *buffer_shape(h, w, padded_channels(c, dtype)), dtype=dtype, device=DEVICE)
    norm_act(x, Norm("none"), buffer, store=Store(silu=False, scale=scale_of(dtype)), backend="reference")
    return buffer


def weights(c: int, k: int, kt: int = 3) -> torch.Tensor:
    return torch.randn(k, c, kt, 3, 3, device=DEVICE) * (c * 9 * kt) ** -0.5


def conv(dtype: torch.dtype, c: int, k: int, shape: tuple[int, int, int], schedule: Schedule | None = None, kt: int = 3,
         groups: int = 32, label: str = "") -> Iterator[Row]:
    d, h, w = shape
    x, weight = planes(dtype, d + kt - 1, h, w, c), pack_planes(weights(c, k, kt), dtype)
    stored = BF16 if dtype == BF16 else HALF
    told = Epilogue(torch.randn(k, device=DEVICE), torch.randn(d, h, w, k, device=DEVICE).to(stored), groups,
                    scale_of(dtype))
    outs = [torch.full((d, h, w, k), float("nan"), device=DEVICE, dtype=stored) for _ in range(3)]
    conv3d(x, weight, outs[0], epilogue=told, backend="reference")
    sums = [conv3d(x, weight, o, epilogue=told, backend="triton", schedule=schedule) for o in outs[1:]]
    tile = dataclasses.astuple(schedule) if schedule else ""
    name = f"winograd {str(dtype)[6:]} {c}->{k} t{kt} {shape} {tile}{label}"
    yield name, error(outs[1].float(), outs[0].float()), LIMIT[dtype], torch.equal(outs[1], outs[2])
    if groups:
        own = outs[1].double().reshape(d, -1, groups, k // groups)
        exact = torch.stack((own.sum((1, 3)), own.square().sum((1, 3))), -1)
        got = sums[0].data.double().sum(1).reshape(d, groups, -1, 2).sum(2)
        yield name + " sums", error(got, exact), 1e-5, torch.equal(sums[0].data, sums[1].data)


def invariance(dtype: torch.dtype, c: int, h: int, w: int) -> Iterator[Row]:
    """Check chunks through the ring, bands, and a clip's first frames: they have the bits of the whole."""
    d = 3
    x, kernel = planes(dtype, d + 2, h, w, c), weights(c, c)
    residual, bias = torch.randn(d, h, w, c, device=DEVICE).half(), torch.randn(c, device=DEVICE)
    weight = pack_planes(kernel, dtype, early=True)

    def told(part: torch.Tensor, groups: int = 32) -> Epilogue:
        return Epilogue(bias, part, groups, scale_of(dtype))

    whole, plain = torch.empty_like(residual), torch.empty_like(residual)
    sums = conv3d(x, weight, whole, epilogue=told(residual), backend="triton")
    conv3d(x, weight, plain, epilogue=told(residual, 0), backend="triton")
    ring, same = torch.cat((x[-2:], x[:-2])), [torch.equal(plain, whole)]
    for f in range(d):
        one = torch.empty_like(whole[:1])
        part = conv3d(ring, weight, one, epilogue=told(residual[f : f + 1]), start=(f + 2) % (d + 2), backend="triton")
        same.append(torch.equal(one, whole[f : f + 1]) and torch.equal(part.data, sums.data[f : f + 1]))
    parts = []
    for top in range(0, h, 64):
        n = min(64, h - top)
        band, own = torch.empty_like(whole[:, :n]), told(residual[:, top : top + n])
        parts.append(conv3d(x[:, :, top : top + n + 2].contiguous(), weight, band, epilogue=own, backend="triton",
                            geometry=Geometry(first_row=top, frame_rows=h)))  # fmt: skip
        same.append(torch.equal(band, whole[:, top : top + n]))
    same.append(torch.equal(Partials.concat(parts).data, sums.data))
    yield f"winograd chunks and bands {str(dtype)[6:]} {c} {h}x{w}", 0.0, 0.0, *same
    x[:2] = x[2]
    start, want = torch.empty_like(whole), torch.empty_like(whole)
    for out, backend in ((start, "triton"), (want, "reference")):
        for piece, a, b, later in weight.pieces(0, d):
            conv3d(x, piece, out[a:b], epilogue=told(residual[a:b]), start=a + later, backend=backend)
    yield f"winograd clip start {str(dtype)[6:]} {c} {h}x{w}", error(start, want), LIMIT[dtype]


def written(dtype: torch.dtype, c: int, kind: str, border: str) -> Iterator[Row]:
    """Check norm_act's planes: against the reference, with every walk, in bands, and made from a plain buffer."""
    x, scale = (torch.randn(2, 67, 131, c, device=DEVICE) * 2 + 1).half(), scale_of(dtype)
    norm = Norm(kind, torch.rand(c, device=DEVICE) + 0.5, torch.randn(c, device=DEVICE), 32)
    wide = padded_channels(c, dtype)
    shape = (3, *buffer_shape(67, 131, wide))
    want, whole = (torch.full(shape, 9.0, device=DEVICE).to(dtype) for _ in range(2))
    for buffer, backend in ((want, "reference"), (whole, "triton")):
        norm_act(x, norm, buffer, slot=2, store=Store(True, border, scale), backend=backend)
    same = []
    for walk in WALKS if kind == "group" else ():  # a sum over channels follows the layout
        again = torch.full_like(want.float(), 9.0).to(dtype)
        norm_act(x, norm, again, slot=2, store=Store(True, border, scale), backend="triton", walk=walk)
        same.append(torch.equal(again.float(), whole.float()))
    for first, rows in ((0, 20), (18, 51)):
        band = torch.full((3, 4, rows, *shape[3:]), 9.0, device=DEVICE).to(dtype)
        norm_act(x, norm, band, slot=2, store=Store(True, border, scale), first=first, backend="triton")
        same.append(torch.equal(band.float(), whole[:, :, first : first + rows].float()))
    name = f"winograd planes {str(dtype)[6:]} {c} {kind} {border}"
    yield name, error(whole.float(), want.float()), LIMIT[dtype], *same
    plain = torch.empty(2, 69, 133, wide, device=DEVICE, dtype=dtype)
    direct, later = (torch.empty(2, *shape[1:], device=DEVICE, dtype=dtype) for _ in range(2))
    norm_act(x, norm, plain, store=Store(True, border, scale, rounded=True), backend="triton")
    norm_act(x, norm, direct, store=Store(True, border, scale, rounded=True), backend="triton")
    norm_act(plain[:, 1:-1, 1:-1], Norm("none"), later, store=Store(False, border), backend="triton")
    yield name + " from a plain buffer", 0.0, 0.0, torch.equal(later.float(), direct.float())


def large() -> Iterator[Row]:
    """Check outputs of more than 2^31 elements: the last frame of a large call equals that frame alone."""
    weight = pack_planes(weights(64, 64), HALF)
    for here in (target(DEVICE), dataclasses.replace(target(DEVICE), tma=False)):
        x = torch.randn(7, *buffer_shape(2160, 3840, 64), device=DEVICE, dtype=HALF)
        whole = torch.empty(5, 2160, 3840, 64, device=DEVICE, dtype=HALF)
        told, alone = Epilogue(groups=32), torch.empty_like(whole[:1])
        sums = launch(x, weight, whole, Geometry(), told, 0, here)
        one = launch(x[4:], weight, alone, Geometry(), told, 0, here)
        yield (f"winograd of {whole.numel():.2e} elements, {'bulk' if here.tma else 'pointer'} form", 0.0, 0.0,
               torch.equal(alone[0], whole[4]), torch.equal(one.data[0], sums.data[4]))
        norm, buffer = Norm("rms", torch.randn(64, device=DEVICE)), torch.empty_like(x[:5])
        norm_act(whole, norm, buffer, backend="triton")
        norm_act(whole[4:], norm, x[:1], backend="triton")
        yield "planes of as many", 0.0, 0.0, torch.equal(x[0], buffer[4])
        del x, whole, alone, buffer
        torch.cuda.empty_cache()


def pointers() -> Iterator[Row]:
    """Check the pointer form and promoted fp16 sums, which other GPUs take."""
    older = dataclasses.replace(target(DEVICE), sm=89, tma=False, half_accumulate=True)
    for dtype, fast in ((HALF, False), (HALF, True), (INT8, False), (FP8, False)):
        x, weight = planes(dtype, 4, 37, 131, 128), pack_planes(weights(128, 128), dtype)
        outs = [torch.full((2, 37, 131, 128), float("nan"), device=DEVICE, dtype=HALF) for _ in range(3)]
        told = Epilogue(torch.randn(128, device=DEVICE), scale=scale_of(dtype), half_accumulate=fast)
        conv3d(x, weight, outs[0], epilogue=told, backend="reference")
        for out in outs[1:]:
            launch(x, weight, out, Geometry(), told, 0, older)
        yield (f"winograd pointer form {str(dtype)[6:]} {'promoted fp16' if fast else ''}", error(outs[1], outs[0]),
               2e-3 if fast else LIMIT[dtype], torch.equal(outs[1], outs[2]))


def others(dtype: torch.dtype, channels: int, small: bool) -> list[Schedule]:
    """Return the schedules that tuning would try for a layer with as many outputs as inputs, without the table's own.

    small: of few positions, as at the lowest resolution."""
    here = target(DEVICE)
    sums = here.accumulate(dtype, False)
    kind = Kind("winograd", str(dtype)[6:], sums, padded_channels(channels, dtype), channels, small, 1, 3, False, True)
    return candidates(here, kind)[1:]


def cases(dtype: torch.dtype | None) -> Iterator[Row]:
    """Yield the cases of one type, where this GPU takes it; without a type, those that need no repeating for each."""
    if dtype is None:
        yield from invariance(HALF, 512, 150, 70)
        yield from pointers()
        yield from large()
    elif target(DEVICE).supports(dtype):
        yield from own(dtype)


def own(dtype: torch.dtype) -> Iterator[Row]:
    """Yield all cases of one type."""
    for c in (128, 512):
        for shape in SHAPES:
            yield from conv(dtype, c, c, shape)
    for c, k in ((192, 384), (320, 640)):
        yield from conv(dtype, c, k, (2, 37, 53), groups=0)
    for groups in (32, 0) if dtype.itemsize == 2 else ():
        yield from conv(dtype, 192, 192, (2, 37, 53), groups=groups, label=" in one and a half tiles")
    yield from conv(dtype, 128, 256, (2, 37, 53), kt=1, label=" another width")
    for c, small in ((128, False), (256, True)):
        for schedule in others(dtype, c, small) if dtype in (HALF, FP8) else ():
            yield from conv(dtype, c, c, (2, 37, 53), schedule)
    for c, kind, border in ((128, "group", "zero"), (512, "group", "replicate"), (192, "l2", "reflect"),
                            (128, "group", "reflect")):
        yield from written(dtype, c, kind, border)
    yield from invariance(dtype, 128, 150, 333)
