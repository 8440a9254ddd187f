"""Check every kernel and every shipped schedule on the GPU of this machine against the fp32 reference.

Run: python tools/check_kernels_gpu.py [PART ...], the package importable as zerowaste_vae. It prints a line a case and
exits with 1 where one is outside its tolerance, two runs differ, or a chunk or band differs from the whole frame.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from functools import partial

import torch
import winograd_checks
from winograd_checks import DEVICE, error
from zerowaste_vae.engine.kernels.attention import attention
from zerowaste_vae.engine.kernels.attention.reference import attention as reference_attention
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Geometry, Partials, conv3d, pack_weight, padded_channels
from zerowaste_vae.engine.kernels.conv3d.dispatch import launch
from zerowaste_vae.engine.kernels.conv3d.schedules import ROW_BLOCK, SCHEDULES, Schedule, fit, of_generation
from zerowaste_vae.engine.kernels.duplicate import duplicate
from zerowaste_vae.engine.kernels.norm_act import Norm, Store, coefficients, norm_act, statistics
from zerowaste_vae.engine.kernels.targets import FP8, Target, standing_in, target
from zerowaste_vae.engine.kernels.to_pixels import BYTES, RAW, to_pixels
from zerowaste_vae.engine.kernels.upsample import pack, pack_nearest, upsample

Triple = tuple[int, int, int]
# ||got - reference|| / ||reference||, reference in fp32 arithmetic on the same operands.
TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 4e-3, FP8: 4e-2, torch.int8: 2e-2, "statistics": 1e-5,
             "promoted": 2e-3}
SHAPES = ((2, 37, 53), (1, 64, 96), (3, 45, 130), (1, 20, 3840))
failures = 0


def report(name: str, error: float, limit: float, *same: bool) -> None:
    global failures
    good = error <= limit and all(same)
    failures += not good
    print(f"{'ok  ' if good else 'FAIL'} {name:78} {error:.2e} <= {limit:.0e} equal {list(same)}", flush=True)


def operand(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    x = torch.randn(shape, device=DEVICE)
    return (x * 40).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else x.to(dtype)


def group_sums(p: Partials, groups: int) -> torch.Tensor:
    return p.data.double().sum(1).reshape(p.data.shape[0], groups, -1, 2).sum(2)


def bordered(dtype: torch.dtype, slots: int, h: int, w: int, c: int) -> torch.Tensor:
    x = torch.zeros(slots, h + 2, w + 2, padded_channels(c, dtype), device=DEVICE).to(dtype)
    x[:, 1:-1, 1:-1, :c] = operand(dtype, slots, h, w, c)
    return x


def conv_case(dtype: torch.dtype, c: int, k: int, shape: Triple, schedule: Schedule | None = None,
              kernel: Triple = (3, 3, 3), stride: Triple = (1, 1, 1), origin: tuple[int, int] = (0, 0),
              groups: int = 32, stored: torch.dtype | None = None, fast: bool = False, label: str = "") -> None:
    d, h, w = shape
    x = bordered(dtype, (d - 1) * stride[0] + kernel[0], h * stride[1], w * stride[2], c)
    weight = pack_weight(torch.randn(k, c, *kernel, device=DEVICE) * (c * 27) ** -0.5, dtype)
    kind = stored or (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    scale = 0.025 if dtype == torch.int8 else 1.0
    residual = torch.randn(d, h, w, k, device=DEVICE).to(torch.float16)
    epilogue = Epilogue(torch.randn(k, device=DEVICE), residual, groups, scale, out_scale=0.05, half_accumulate=fast)
    geometry = Geometry(stride, origin)
    outs = [torch.zeros(d, h, w, k, device=DEVICE).fill_(float("nan")).to(kind) for _ in range(3)]
    want = conv3d(x, weight, outs[0], geometry=geometry, epilogue=epilogue, backend="reference")
    runs = [conv3d(x, weight, o, geometry=geometry, epilogue=epilogue, backend="triton", schedule=schedule)
            for o in outs[1:]]
    tile = dataclasses.astuple(schedule) if schedule else ""
    name = f"conv {str(dtype)[6:]} {c}->{k} {kernel} /{stride} {shape} {tile}{label}"
    limit = TOLERANCE[FP8] if kind == FP8 else TOLERANCE["promoted" if fast else dtype]
    report(name, error(outs[1].float(), outs[0].float()), limit, torch.equal(outs[1].float(), outs[2].float()))
    if groups:
        # Sums are compared with those of the very values stored, so that only the summation is judged.
        own = outs[1].float().double().reshape(d, -1, groups, k // groups)
        exact = torch.stack((own.sum((1, 3)), own.square().sum((1, 3))), -1)
        got = group_sums(runs[0], groups)
        report(name + " sums", error(got, exact), TOLERANCE["statistics"], torch.equal(runs[0].data, runs[1].data),
               want is not None)


def schedules(dtype: torch.dtype) -> None:
    sizes = {torch.float16: ("16 bit",), torch.bfloat16: ("16 bit",), FP8: ("8 bit", "fp8"),
             torch.int8: ("8 bit", "int8")}  # fmt: skip
    here = target(DEVICE)
    sums = (False, True) if dtype == torch.float16 and here.half_accumulate else (False,)
    for layer, schedule in of_generation(SCHEDULES, here.sm).items():
        # Upsamplers' phases are checked by their own cases.
        if layer.operands not in sizes[dtype] or "phases" in layer.kind or not here.supports(dtype):
            continue
        for c in (layer.outputs,) if layer.outputs else (128,) if layer.kind == "narrow" else (256, 512):
            for shape, fast in itertools.product(SHAPES, sums):
                # Wan's norms need no sums, and its tiles are for layers without.
                groups = 32 if layer.sums and not layer.outputs else 0
                conv_case(dtype, c, c, shape, fit(schedule, c, c, 3), groups=groups, fast=fast)


def forms(dtype: torch.dtype) -> None:
    if not target(DEVICE).supports(dtype):
        return
    if dtype == torch.float16:
        widths = ((3, 128), (16, 512), (96, 96), (128, 3), (192, 96), (384, 384))
        for (c, k), fast in itertools.product(widths, {False, target(DEVICE).half_accumulate}):
            conv_case(dtype, c, k, (2, 37, 53), groups=0 if k == 3 else 32, fast=fast, label=" odd widths")
        conv_case(dtype, 256, 128, (2, 37, 53), kernel=(1, 1, 1), origin=(1, 1))
        conv_case(dtype, 128, 128, (2, 37, 53), kernel=(1, 3, 3))
        conv_case(dtype, 128, 128, (4, 37, 53), kernel=(3, 1, 1), origin=(1, 1))
    else:
        # Taps of a row that are one run: whole steps, a rest, and windows of one and three taps.
        for c, k in ((96, 96), (160, 160), (320, 320), (192, 384), (96, 192)):
            for shape in ((1, 1, 5), (2, 37, 53), (1, 9, 1920)):
                conv_case(dtype, c, k, shape, groups=0, label=" run of taps")
        conv_case(dtype, 96, 96, (2, 37, 53))
        conv_case(dtype, 96, 96, (2, 37, 53), stride=(1, 2, 2), origin=(1, 1), groups=0)
        conv_case(dtype, 96, 192, (2, 37, 53), kernel=(3, 1, 1), origin=(1, 1), groups=0)
    conv_case(dtype, 128, 128, (2, 37, 53), kernel=(1, 3, 3), stride=(1, 2, 2), origin=(1, 1))
    conv_case(dtype, 256, 256, (2, 37, 53), stride=(2, 2, 2), origin=(1, 1))
    outputs = {torch.float16: (torch.float32, FP8), FP8: (torch.float32, FP8), torch.int8: (torch.int8,)}
    for stored in outputs.get(dtype, ()):
        conv_case(dtype, 128, 128, (2, 37, 53), stored=stored, label=f" -> {stored}")


def invariance() -> None:
    """Check that chunks through the ring and bands of rows give the bits of the whole."""
    here, cases = target(DEVICE), ((torch.float16, False), (torch.float16, True), (FP8, False))
    for (dtype, fast), (c, h, w) in itertools.product(cases, ((128, 150, 333), (512, 150, 70))):
        if fast and not here.half_accumulate:
            continue
        epilogue = partial(Epilogue, half_accumulate=fast)
        d = 3
        x = bordered(dtype, d + 2, h, w, c)
        weight = pack_weight(torch.randn(c, c, 3, 3, 3, device=DEVICE) * (c * 27) ** -0.5, dtype)
        residual = torch.randn(d, h, w, c, device=DEVICE).half()
        bias = torch.randn(c, device=DEVICE)
        whole = torch.empty(d, h, w, c, device=DEVICE, dtype=torch.float16)
        sums = conv3d(x, weight, whole, epilogue=epilogue(bias, residual, 32), backend="triton")
        plain = torch.empty_like(whole)
        conv3d(x, weight, plain, epilogue=epilogue(bias, residual), backend="triton")
        ring = torch.cat((x[-2:], x[:-2]))
        same = []
        for f in range(d):
            one = torch.empty_like(whole[:1])
            p = conv3d(ring, weight, one, epilogue=epilogue(bias, residual[f : f + 1], 32), start=(f + 2) % (d + 2),
                       backend="triton")
            same.append(torch.equal(one, whole[f : f + 1]) and torch.equal(p.data, sums.data[f : f + 1]))
        parts = []
        for top in range(0, h, ROW_BLOCK):
            n = min(ROW_BLOCK, h - top)
            band = torch.empty(d, n, w, c, device=DEVICE, dtype=torch.float16)
            parts.append(conv3d(x[:, top : top + n + 2].contiguous(), weight, band,
                                geometry=Geometry(first_row=top, frame_rows=h),
                                epilogue=epilogue(bias, residual[:, top : top + n], 32), backend="triton"))
            same.append(torch.equal(band, whole[:, top : top + n]))
        joined = Partials.concat(parts)
        same += [torch.equal(joined.data, sums.data), torch.equal(plain, whole)]
        report(f"chunks and bands {str(dtype)[6:]} {'fp16 sums ' if fast else ''}{c} {h}x{w}", 0.0, 0.0, *same)


def clip_starts() -> None:
    """Check the weights of a clip's first two frames: against the reference, and frame by frame against the whole."""
    for dtype in (torch.float16, torch.bfloat16, FP8, torch.int8):
        for c in (128, 256):
            x = bordered(dtype, 6, 37, 53, c)
            x[:2] = x[2]
            weight = pack_weight(torch.randn(c, c, 3, 3, 3, device=DEVICE) * (c * 27) ** -0.5, dtype, early=True)
            residual = torch.randn(4, 37, 53, c, device=DEVICE).half()
            scale = 0.025 if dtype == torch.int8 else 1.0
            stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16

            def run(first: int, frames: int, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
                out = torch.full((frames, 37, 53, c), float("nan"), device=DEVICE, dtype=stored)  # noqa: B023
                parts = []
                for piece, a, b, later in weight.pieces(first, frames):  # noqa: B023
                    epilogue = Epilogue(None, residual[first + a : first + b], 32, scale)  # noqa: B023
                    parts.append(conv3d(x, piece, out[a:b], epilogue=epilogue, start=first + a + later,  # noqa: B023
                                        backend=backend))  # fmt: skip
                return out, torch.cat([p.data for p in parts]) if backend == "triton" else parts[0].data

            (want, _), (whole, sums) = run(0, 4, "reference"), run(0, 4, "triton")
            same = []
            for f in range(4):
                out, part = run(f, 1, "triton")
                same.append(torch.equal(out[0], whole[f]) and torch.equal(part[0], sums[f]))
            report(f"clip start {str(dtype)[6:]} {c}", error(whole, want), TOLERANCE[dtype], *same)


def ends() -> None:
    for c, dtype in ((128, torch.float16), (96, torch.float16), (128, torch.bfloat16), (256, torch.float16)):
        x = bordered(dtype, 5, 37, 530, c)
        weight = pack_weight(torch.randn(3, c, 3, 3, 3, device=DEVICE) * 0.02, dtype)
        bias = torch.randn(3, device=DEVICE)
        for stored, fmt in ((torch.float32, RAW), (torch.float16, RAW), (torch.uint8, BYTES)):
            outs = [torch.zeros(3, 37, 530, 3, dtype=stored, device=DEVICE) for _ in range(4)]
            for o, backend in zip(outs, ("reference", "triton", "triton"), strict=False):
                to_pixels(x, weight, bias, o, pixels=fmt, start=4, backend=backend)
            for f in range(3):
                to_pixels(x, weight, bias, outs[3][f : f + 1], pixels=fmt, start=(4 + f) % 5, backend="triton")
            report(f"to_pixels {c} {dtype} {stored}", error(outs[1].float(), outs[0].float()),
                   2e-3 if stored == torch.uint8 else 5e-4, torch.equal(outs[1], outs[2]),
                   torch.equal(outs[1], outs[3]))


def norms() -> None:
    for c, groups in ((128, 32), (512, 32), (96, 32), (256, 1)):
        for stored in (torch.float16, torch.float32, FP8, torch.int8):
            for per_chunk, border in ((False, "zero"), (True, "replicate")):
                x = (torch.randn(2, 67, 131, c, device=DEVICE) * 2 + 1).half()
                norm = Norm("group", torch.randn(c, device=DEVICE), torch.randn(c, device=DEVICE), groups,
                            per_chunk=per_chunk)
                buffers = [torch.full((5, 69, 133, padded_channels(c, stored)), 9.0, device=DEVICE).to(stored)
                           for _ in range(3)]
                for b, backend in zip(buffers, ("reference", "triton", "triton"), strict=True):
                    norm_act(x, norm, b, slot=4, store=Store(True, border, 0.05 if stored.itemsize == 1 else 1.0),
                             backend=backend)
                limit = TOLERANCE.get(stored, 1e-5) if stored.itemsize == 1 else 5e-4
                report(f"norm_act {c} groups {groups} {stored} {border}",
                       error(buffers[1].float(), buffers[0].float()), limit,
                       torch.equal(buffers[1].float(), buffers[2].float()))
    for kind in ("l2", "rms", "none"):
        x = torch.randn(2, 96, 67, 131, device=DEVICE).half().permute(0, 2, 3, 1)
        norm = Norm(kind, torch.randn(96, device=DEVICE), None, eps=1e-12)
        buffers = [torch.empty(2, 69, 133, 96, device=DEVICE, dtype=torch.float16) for _ in range(2)]
        for b, backend in zip(buffers, ("reference", "triton"), strict=True):
            norm_act(x, norm, b, store=Store(kind != "none"), backend=backend)
        report(f"norm_act {kind}, channels first", error(buffers[1], buffers[0]), 5e-4)
    x = torch.randn(2, 150, 131, 128, device=DEVICE).half()
    whole = statistics(x, 32, "triton")
    joined = Partials.concat([statistics(x[:, t : t + 64], 32, "triton") for t in range(0, 150, 64)])
    norm = Norm(weight=torch.randn(128, device=DEVICE), bias=torch.randn(128, device=DEVICE))
    a, b = (coefficients(whole, norm, 150 * 131, backend) for backend in ("triton", "reference"))
    report("coefficients", error(a, b), 1e-6, torch.equal(whole.data, joined.data))


def ups() -> None:
    for temporal in (True, False):
        for dtype, c in ((torch.float16, 256), (torch.bfloat16, 512), (FP8, 256), (torch.int8, 256)):
            for shape in ((3, 150, 45), (1, 37, 53), (2, 64, 96), (2, 9, 1920)):
                up_case(temporal, dtype, c, *shape)
    for frames, drop, first in ((1, 0, True), (2, 1, True), (2, 0, False), (2, 1, False)):
        x = torch.randn(3, 37, 53, 320, device=DEVICE).half()
        outs = [torch.empty(3 * frames - drop, 74, 106, 160, device=DEVICE).half() for _ in range(2)]
        for out, backend in zip(outs, ("reference", "triton"), strict=True):
            duplicate(x, out, frames=frames, drop=drop, samples_first=first, backend=backend)
        report(f"duplicate into {frames} frames, less {drop}", 0.0, 0.0, torch.equal(*outs))


def nearest() -> None:
    """Check Wan's upsampling of rows and columns, with runs of two taps (96, 160) and without."""
    for dtype in (torch.float16, torch.bfloat16, FP8, torch.int8):
        for c, k in ((96, 96), (160, 96), (384, 192), (256, 1024)):
            for shape in ((2, 37, 53), (1, 9, 1920)):
                d, h, w = shape
                weight, bias = pack_nearest(torch.randn(k, c, 1, 3, 3, device=DEVICE) * (c * 9) ** -0.5,
                                            torch.randn(k, device=DEVICE), dtype)
                x = bordered(dtype, d, h, w, c)
                residual = torch.randn(d, 2 * h, 2 * w, k, device=DEVICE).bfloat16()
                epilogue = Epilogue(bias, residual, scale=0.025 if dtype == torch.int8 else 1.0)
                outs = [torch.full((d, 2 * h, 2 * w, k), float("nan"), device=DEVICE).bfloat16() for _ in range(3)]
                for out, backend in zip(outs, ("reference", "triton", "triton"), strict=True):
                    conv3d(x, weight, out, epilogue=epilogue, backend=backend)
                last = torch.empty_like(outs[0][:1])
                conv3d(x[-1:].contiguous(), weight, last, backend="triton",
                       epilogue=dataclasses.replace(epilogue, residual=residual[-1:]))
                report(f"nearest {str(dtype)[6:]} {c}->{k} {shape}", error(outs[1].float(), outs[0].float()),
                       max(TOLERANCE[dtype], TOLERANCE[torch.bfloat16]), torch.equal(outs[1], outs[2]),
                       torch.equal(last, outs[1][-1:]))


def up_case(temporal: bool, dtype: torch.dtype, c: int, d: int, h: int, w: int) -> None:
    """Check one upsampling against the reference; then single frames and bands against the whole, bit for bit."""
    z, before = (2, 1) if temporal else (1, 2)
    args = (torch.randn(4 * z * c, c, 1, 1, 1, device=DEVICE) * c**-0.5, torch.randn(4 * z * c, device=DEVICE),
            torch.randn(c, c, 3, 3, 3, device=DEVICE) * (27 * c) ** -0.5, torch.randn(c, device=DEVICE))
    composed = pack(*args, dtype)
    scale = 0.025 if dtype == torch.int8 else 1.0
    x = bordered(dtype, d + before, h, w, c)
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    outs = [torch.full((d * z - (z - 1), 2 * h, 2 * w, c), float("nan"), device=DEVICE, dtype=kind) for _ in range(3)]
    upsample(x, composed, outs[0], first=0, scale=scale, backend="reference")
    sums = upsample(x, composed, outs[1], first=0, groups=32, scale=scale, backend="triton")
    same, at = [], 0
    for f in range(d):
        n = z - (z - 1) * (f == 0)
        p = upsample(x[f : f + before + 1].contiguous(), composed, outs[2][at : at + n], first=f, groups=32,
                     scale=scale, backend="triton")
        same.append(torch.equal(p.data, sums.data[at : at + n]))
        at += n
    bands = []
    for top in range(0, h, ROW_BLOCK):
        n = min(ROW_BLOCK, h - top)
        band = torch.empty(outs[1].shape[0], 2 * n, 2 * w, c, device=DEVICE, dtype=kind)
        bands.append(upsample(x[:, top : top + n + 2].contiguous(), composed, band, first=0, groups=32, scale=scale,
                              geometry=Geometry(first_row=top, frame_rows=h), backend="triton"))
        same.append(torch.equal(band, outs[1][:, 2 * top : 2 * top + 2 * n]))
    report(f"upsample {'time' if temporal else 'space'} {str(dtype)[6:]} {c} {d}x{h}x{w}", error(outs[1], outs[0]),
           TOLERANCE[dtype], torch.equal(outs[1], outs[2]), torch.equal(Partials.concat(bands).data, sums.data), *same)


def consumer() -> Target:
    """Return this GPU as one whose convolutions are the loop that RTX cards run; it is compiled for this GPU."""
    return dataclasses.replace(target(DEVICE), sm=89, tma=False, half_accumulate=True)


def consumers(check: Callable[[], None]) -> None:
    """Run a check with that loop."""
    with standing_in(consumer()):
        check()


def other_generations() -> None:
    """Check the pointer form, that of RTX cards, and promoted fp16 accumulation in both, on this GPU."""
    older = dataclasses.replace(target(DEVICE), tma=False, half_accumulate=True)
    cases = ((torch.float16, False), (torch.float16, True), (torch.int8, False), (FP8, False), (FP8, True))
    for name, here in (("pointer", older), ("mma", consumer())):
        for dtype, fast in cases:
            x = bordered(dtype, 4, 37, 130, 128)
            weight = pack_weight(torch.randn(128, 128, 3, 3, 3, device=DEVICE) * (128 * 27) ** -0.5, dtype)
            outs = [torch.full((2, 37, 130, 128), float("nan"), device=DEVICE, dtype=torch.float16) for _ in range(3)]
            epilogue = Epilogue(torch.randn(128, device=DEVICE), scale=0.025, half_accumulate=fast)
            conv3d(x, weight, outs[0], epilogue=epilogue, backend="reference")
            for out in outs[1:]:
                launch(x, weight, out, Geometry(), epilogue, 0, 2, here)
            report(f"conv {name} form {str(dtype)[6:]} {'promoted fp16' if fast else ''}", error(outs[1], outs[0]),
                   TOLERANCE["promoted" if fast and dtype == torch.float16 else dtype], torch.equal(outs[1], outs[2]))


def beyond_32_bits() -> None:
    """Check outputs of more than 2^31 elements: the last frame of a large call equals that frame alone."""
    for here in (target(DEVICE), dataclasses.replace(target(DEVICE), tma=False), consumer()):
        x = torch.randn(7, 2162, 3842, 64, device=DEVICE, dtype=torch.float16)
        weight = pack_weight(torch.randn(64, 64, 3, 3, 3, device=DEVICE) * (64 * 27) ** -0.5, torch.float16)
        whole = torch.empty(5, 2160, 3840, 64, device=DEVICE, dtype=torch.float16)
        sums = launch(x, weight, whole, Geometry(), Epilogue(groups=32), 0, 2, here)
        alone = torch.empty_like(whole[:1])
        one = launch(x[4:], weight, alone, Geometry(), Epilogue(groups=32), 0, 2, here)
        form = "bulk" if here.tma else f"sm_{here.sm}'s pointer"
        report(f"conv of {whole.numel():.2e} elements, {form} form", 0.0, 0.0,
               torch.equal(alone[0], whole[4]), torch.equal(one.data[0], sums.data[4]))
        del x, whole, alone
        x = torch.randn(5, 2160, 3840, 64, device=DEVICE, dtype=torch.float16)
        norm, buffer = Norm("rms", torch.randn(64, device=DEVICE)), torch.empty(5, 2162, 3842, 64, device=DEVICE)
        norm_act(x, norm, buffer, backend="triton")
        single = torch.empty_like(buffer[:1])
        norm_act(x[4:], norm, single, backend="triton")
        report("norm_act of as many", 0.0, 0.0, torch.equal(single[0], buffer[4]))
        del x, buffer, single
        torch.cuda.empty_cache()


def attentions() -> None:
    q, k, v = (torch.randn(1, 129600, 512, device=DEVICE).half() for _ in range(3))
    rows = attention(q, k, v, backend="triton")[:, -300:]
    report("attention 512 at 129600 tokens", error(rows, reference_attention(q[:, -300:], k, v)), 1e-3)
    for head in (384, 512, 1024):
        for dtype in (torch.float16, torch.bfloat16):
            for tokens in (77, 1000, 3601):
                q, k, v = (torch.randn(2, tokens, head, device=DEVICE).to(dtype) for _ in range(3))
                a, b, c = (attention(q, k, v, backend=n) for n in ("reference", "triton", "triton"))
                single = attention(q[1:], k[1:], v[1:], backend="triton")
                report(f"attention {head} {str(dtype)[6:]} {tokens}", error(b, a), 2 * TOLERANCE[dtype],
                       torch.equal(b, c), torch.equal(single, b[1:]))


def winograd(dtype: torch.dtype | None = None) -> None:
    for case in winograd_checks.cases(dtype):
        report(*case)


_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8}
# The parts that compile most are split by type: one core runs one part.
PARTS = {f"{part.__name__}_{word}": partial(part, dtype) for part in (forms, schedules, winograd)
         for word, dtype in _TYPES.items()}  # fmt: skip
PARTS |= {one.__name__: one for one in (clip_starts, ends, norms, ups, nearest, attentions, other_generations,
                                        beyond_32_bits, invariance)}  # fmt: skip
PARTS["winograd_others"] = winograd
#: Those that are run once more with the loop of RTX cards, under a name of their own.
CONSUMERS = ("forms_fp16", "forms_bf16", "forms_fp8", "forms_int8", "schedules_fp16", "schedules_fp8",
             "schedules_int8", "clip_starts", "ups", "nearest", "invariance")  # fmt: skip
PARTS |= {f"mma_{name}": partial(consumers, PARTS[name]) for name in CONSUMERS}


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every kernel and shipped schedule on this machine's GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parts = parser.parse_args().parts
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU: pytest tests/engine/kernels runs the kernels in Triton's interpreter")
    print(torch.cuda.get_device_name(), target(DEVICE))
    for part in parts or PARTS:
        torch.manual_seed(0)
        PARTS[part]()
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
