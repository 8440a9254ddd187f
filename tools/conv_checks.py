"""Cases of check_kernels_gpu.py for convolutions, direct and in Winograd form: name, error, limit, equal bits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from zerowaste_vae.engine.kernels.conv3d import (
    Epilogue,
    Geometry,
    Partials,
    Weight,
    conv3d,
    pack_tiles,
    pack_weight,
    padded_channels,
)
from zerowaste_vae.engine.kernels.conv3d.schedules import ROW_BLOCK, SCHEDULES, Schedule, fit, of_generation
from zerowaste_vae.engine.kernels.targets import FP8, Target, target

DEVICE = torch.device("cuda")
HALF, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8
Triple = tuple[int, int, int]
#: Largest ||got - reference|| / ||reference||, reference in fp32 arithmetic on the same operands.
TOLERANCE = {HALF: 5e-4, BF16: 4e-3, FP8: 4e-2, INT8: 2e-2, "statistics": 1e-5, "promoted": 2e-3}
SHAPES = ((2, 37, 53), (1, 64, 96), (3, 45, 130), (1, 20, 3840))
Row = tuple[object, ...]


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# -- both forms --------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """A way to compute convolutions. scale: of operands by type. rows: part of an operand, those that n rows of output
    from `top` on take. launch: with (x, weight, out, epilogue, target)."""

    name: str
    operand: Callable[..., Tensor]
    pack: Callable[..., Weight]
    scale: Callable[[torch.dtype], float]
    rows: Callable[[Tensor, int, int], Tensor]
    launch: Callable[[Tensor, Weight, Tensor, Epilogue, Target], Partials | None]


def operand(dtype: torch.dtype, *shape: int) -> Tensor:
    x = torch.randn(shape, device=DEVICE)
    return (x * 40).round().clamp(-127, 127).to(dtype) if dtype == INT8 else x.to(dtype)


def bordered(dtype: torch.dtype, slots: int, h: int, w: int, c: int) -> Tensor:
    x = torch.zeros(slots, h + 2, w + 2, padded_channels(c, dtype), device=DEVICE).to(dtype)
    x[:, 1:-1, 1:-1, :c] = operand(dtype, slots, h, w, c)
    return x


DIRECT = Form("conv", bordered, pack_weight, lambda dtype: 0.025 if dtype == INT8 else 1.0,
              lambda x, top, n: x[:, top : top + n + 2],
              lambda x, weight, out, told, on: conv3d.launch(on, x, weight, out, epilogue=told))  # fmt: skip
WINOGRAD = DIRECT._replace(name="winograd", pack=pack_tiles, scale=lambda dtype: 1.0)


def weights(c: int, k: int, kernel: Triple = (3, 3, 3)) -> Tensor:
    return torch.randn(k, c, *kernel, device=DEVICE) * (c * math.prod(kernel)) ** -0.5


def stored_as(dtype: torch.dtype) -> torch.dtype:
    return BF16 if dtype == BF16 else HALF


def conv(form: Form, dtype: torch.dtype, c: int, k: int, shape: Triple, schedule: Schedule | None = None,
         kernel: Triple = (3, 3, 3), stride: Triple = (1, 1, 1), origin: tuple[int, int] = (0, 0), groups: int = 32,
         stored: torch.dtype | None = None, fast: bool = False, label: str = "") -> Iterator[Row]:
    """Check a convolution twice against the reference, and its sums against the very values stored, so that only the
    summation is judged."""
    d, h, w = shape
    x = form.operand(dtype, (d - 1) * stride[0] + kernel[0], h * stride[1], w * stride[2], c)
    weight, kind = form.pack(weights(c, k, kernel), dtype), stored or stored_as(dtype)
    residual = torch.randn(d, h, w, k, device=DEVICE).to(stored_as(dtype))
    epilogue = Epilogue(torch.randn(k, device=DEVICE), residual, groups, form.scale(dtype), out_scale=0.05,
                        half_accumulate=fast)
    geometry = Geometry(stride, origin)
    outs = [torch.zeros(d, h, w, k, device=DEVICE).fill_(float("nan")).to(kind) for _ in range(3)]
    conv3d(x, weight, outs[0], geometry=geometry, epilogue=epilogue, backend="reference")
    sums = [conv3d(x, weight, o, geometry=geometry, epilogue=epilogue, backend="triton", schedule=schedule)
            for o in outs[1:]]
    want, got, again = (o.float() for o in outs)
    tile = dataclasses.astuple(schedule) if schedule else ""
    name = f"{form.name} {str(dtype)[6:]} {c}->{k} {kernel} /{stride} {shape} {tile}{label}"
    limit = TOLERANCE[FP8] if kind == FP8 else TOLERANCE["promoted" if fast else dtype]
    yield name, error(got, want), limit, torch.equal(got, again)
    if groups:
        own = got.double().reshape(d, -1, groups, k // groups)
        exact = torch.stack((own.sum((1, 3)), own.square().sum((1, 3))), -1)
        made = sums[0].data.double().sum(1).reshape(d, groups, -1, 2).sum(2)
        yield name + " sums", error(made, exact), TOLERANCE["statistics"], torch.equal(sums[0].data, sums[1].data)


def invariance(form: Form, dtype: torch.dtype, c: int, h: int, w: int, fast: bool = False) -> Iterator[Row]:
    """Check that chunks through the ring and bands of rows give the bits of the whole."""
    d, kind = 3, stored_as(dtype)
    x, weight = form.operand(dtype, d + 2, h, w, c), form.pack(weights(c, c), dtype)
    residual, bias = torch.randn(d, h, w, c, device=DEVICE).to(kind), torch.randn(c, device=DEVICE)

    def run(x: Tensor, part: Tensor, groups: int = 32, **more: object) -> tuple[Tensor, Partials | None]:
        out = torch.empty_like(part)
        epilogue = Epilogue(bias, part, groups, form.scale(dtype), half_accumulate=fast)
        return out, conv3d(x, weight, out, epilogue=epilogue, backend="triton", **more)

    (whole, sums), (plain, _) = run(x, residual), run(x, residual, 0)
    ring, same, parts = torch.cat((x[-2:], x[:-2])), [torch.equal(plain, whole)], []
    for f in range(d):
        one, part = run(ring, residual[f : f + 1], start=(f + 2) % (d + 2))
        same.append(torch.equal(one, whole[f : f + 1]) and torch.equal(part.data, sums.data[f : f + 1]))
    for top in range(0, h, ROW_BLOCK):
        n = min(ROW_BLOCK, h - top)
        band, part = run(form.rows(x, top, n).contiguous(), residual[:, top : top + n],
                         geometry=Geometry(first_row=top, frame_rows=h))  # fmt: skip
        parts.append(part)
        same.append(torch.equal(band, whole[:, top : top + n]))
    same.append(torch.equal(Partials.concat(parts).data, sums.data))
    yield f"{form.name} chunks and bands {str(dtype)[6:]} {'fp16 sums ' if fast else ''}{c} {h}x{w}", 0.0, 0.0, *same


def clip_start(form: Form, dtype: torch.dtype, c: int) -> Iterator[Row]:
    """Check the weights of a clip's first two frames: against the reference, and frame by frame against the whole."""
    x = form.operand(dtype, 6, 37, 53, c)
    x[:2] = x[2]
    weight, kind = form.pack(weights(c, c), dtype, early=True), stored_as(dtype)
    residual = torch.randn(4, 37, 53, c, device=DEVICE).to(kind)

    def run(first: int, frames: int, backend: str) -> tuple[Tensor, list[Partials]]:
        out, parts = torch.full((frames, 37, 53, c), float("nan"), device=DEVICE, dtype=kind), []
        for piece, a, b, later in weight.pieces(first, frames):
            epilogue = Epilogue(None, residual[first + a : first + b], 32, form.scale(dtype))
            parts.append(conv3d(x, piece, out[a:b], epilogue=epilogue, start=first + a + later, backend=backend))
        return out, parts

    (want, _), (whole, parts) = run(0, 4, "reference"), run(0, 4, "triton")
    sums, same = torch.cat([part.data for part in parts]), []
    for f in range(4):
        out, (part,) = run(f, 1, "triton")
        same.append(torch.equal(out[0], whole[f]) and torch.equal(part.data[0], sums[f]))
    yield f"{form.name} clip start {str(dtype)[6:]} {c}", error(whole, want), TOLERANCE[dtype], *same


def generation(form: Form, label: str, here: Target, dtype: torch.dtype, fast: bool) -> Iterator[Row]:
    """Check the code of another generation on this GPU. fast: promoted fp16 sums."""
    x, weight = form.operand(dtype, 4, 37, 131, 128), form.pack(weights(128, 128), dtype)
    outs = [torch.full((2, 37, 131, 128), float("nan"), device=DEVICE, dtype=HALF) for _ in range(3)]
    epilogue = Epilogue(torch.randn(128, device=DEVICE), scale=form.scale(dtype), half_accumulate=fast)
    conv3d(x, weight, outs[0], epilogue=epilogue, backend="reference")
    for out in outs[1:]:
        form.launch(x, weight, out, epilogue, here)
    yield (f"{form.name} {label} form {str(dtype)[6:]} {'promoted fp16' if fast else ''}", error(outs[1], outs[0]),
           TOLERANCE["promoted" if fast and dtype == HALF else dtype], torch.equal(outs[1], outs[2]))


# -- direct ------------------------------------------------------------------------------------------------------------


def schedules(dtype: torch.dtype) -> Iterator[Row]:
    sizes = {HALF: ("16 bit",), BF16: ("16 bit",), FP8: ("8 bit", "fp8"),
             INT8: ("8 bit", "int8")}  # fmt: skip
    here = target(DEVICE)
    sums = (False, True) if dtype == HALF and here.half_accumulate else (False,)
    for layer, schedule in of_generation(SCHEDULES, here.sm).items():
        # Upsamplers' phases are checked by their own cases.
        if layer.operands not in sizes[dtype] or "phases" in layer.kind or not here.supports(dtype):
            continue
        for c in (layer.outputs,) if layer.outputs else (128,) if layer.kind == "narrow" else (256, 512):
            for shape, fast in itertools.product(SHAPES, sums):
                # Wan's norms need no sums, and its tiles are for layers without.
                groups = 32 if layer.sums and not layer.outputs else 0
                yield from conv(DIRECT, dtype, c, c, shape, fit(schedule, c, c, 3), groups=groups, fast=fast)


def forms(dtype: torch.dtype) -> Iterator[Row]:
    if not target(DEVICE).supports(dtype):
        return
    if dtype == HALF:
        widths = ((3, 128), (16, 512), (96, 96), (128, 3), (192, 96), (384, 384))
        for (c, k), fast in itertools.product(widths, {False, target(DEVICE).half_accumulate}):
            groups = 0 if k == 3 else 32
            yield from conv(DIRECT, dtype, c, k, (2, 37, 53), groups=groups, fast=fast, label=" odd widths")
        yield from conv(DIRECT, dtype, 256, 128, (2, 37, 53), kernel=(1, 1, 1), origin=(1, 1))
        yield from conv(DIRECT, dtype, 128, 128, (2, 37, 53), kernel=(1, 3, 3))
        yield from conv(DIRECT, dtype, 128, 128, (4, 37, 53), kernel=(3, 1, 1), origin=(1, 1))
    else:
        # Taps of a row that are one run: whole steps, a rest, and windows of one and three taps.
        for c, k in ((96, 96), (160, 160), (320, 320), (192, 384), (96, 192)):
            for shape in ((1, 1, 5), (2, 37, 53), (1, 9, 1920)):
                yield from conv(DIRECT, dtype, c, k, shape, groups=0, label=" run of taps")
        yield from conv(DIRECT, dtype, 96, 96, (2, 37, 53))
        yield from conv(DIRECT, dtype, 96, 96, (2, 37, 53), stride=(1, 2, 2), origin=(1, 1), groups=0)
        yield from conv(DIRECT, dtype, 96, 192, (2, 37, 53), kernel=(3, 1, 1), origin=(1, 1), groups=0)
    yield from conv(DIRECT, dtype, 128, 128, (2, 37, 53), kernel=(1, 3, 3), stride=(1, 2, 2), origin=(1, 1))
    yield from conv(DIRECT, dtype, 256, 256, (2, 37, 53), stride=(2, 2, 2), origin=(1, 1))
    outputs = {HALF: (torch.float32, FP8), FP8: (torch.float32, FP8), INT8: (INT8,)}
    for stored in outputs.get(dtype, ()):
        yield from conv(DIRECT, dtype, 128, 128, (2, 37, 53), stored=stored, label=f" -> {stored}")


def clip_starts() -> Iterator[Row]:
    for dtype, c in itertools.product((HALF, BF16, FP8, INT8), (128, 256)):
        yield from clip_start(DIRECT, dtype, c)


def invariances() -> Iterator[Row]:
    types = ((HALF, False), *([(HALF, True)] if target(DEVICE).half_accumulate else []), (FP8, False), (INT8, False))
    for (dtype, fast), size in itertools.product(types, ((128, 150, 333), (512, 150, 70), (256, 150, 97))):
        yield from invariance(DIRECT, dtype, *size, fast)


def consumer() -> Target:
    """Return this GPU as one whose convolutions are the loop that RTX cards run; it is compiled for this GPU."""
    return dataclasses.replace(target(DEVICE), sm=89, tma=False, half_accumulate=True)


def other_generations() -> Iterator[Row]:
    """Check the pointer form and that of RTX cards."""
    older = dataclasses.replace(target(DEVICE), tma=False, half_accumulate=True)
    for label, here in (("pointer", older), ("mma", consumer())):
        for dtype, fast in ((HALF, False), (HALF, True), (INT8, False), (FP8, False), (FP8, True)):
            yield from generation(DIRECT, label, here, dtype, fast)


# -- Winograd ----------------------------------------------------------------------------------------------------------


def large() -> Iterator[Row]:
    """Check outputs of more than 2^31 elements: the last frame of a large call equals that frame alone."""
    weight = pack_tiles(weights(64, 64), HALF)
    x = torch.randn(7, 2162, 3842, 64, device=DEVICE, dtype=HALF)
    whole = torch.empty(5, 2160, 3840, 64, device=DEVICE, dtype=HALF)
    told, alone = Epilogue(groups=32), torch.empty_like(whole[:1])
    sums = conv3d(x, weight, whole, epilogue=told, backend="triton")
    one = conv3d(x[4:], weight, alone, epilogue=told, backend="triton")
    yield (f"winograd of {whole.numel():.2e} elements", 0.0, 0.0, torch.equal(alone[0], whole[4]),
           torch.equal(one.data[0], sums.data[4]))


def winograd(dtype: torch.dtype) -> Iterator[Row]:
    """Yield the cases of a 16-bit type."""
    for c in (128, 512):
        for shape in (*SHAPES, (1, 1, 2)):
            yield from conv(WINOGRAD, dtype, c, c, shape)
    for c, k in ((192, 384), (320, 640)):
        yield from conv(WINOGRAD, dtype, c, k, (2, 37, 53), groups=0)
    for groups in (32, 0):
        yield from conv(WINOGRAD, dtype, 192, 192, (2, 37, 53), groups=groups, label=" in blocks of 96")
    yield from conv(WINOGRAD, dtype, 128, 256, (2, 37, 53), kernel=(1, 3, 3), label=" another width")
    for size in ((128, 150, 333), (512, 150, 70)):
        yield from invariance(WINOGRAD, dtype, *size)
    for c in (128, 512):
        yield from clip_start(WINOGRAD, dtype, c)
