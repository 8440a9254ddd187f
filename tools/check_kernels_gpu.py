"""Check every kernel and every shipped schedule on the GPU of this machine against the fp32 reference.

Run: python tools/check_kernels_gpu.py [PART ...], the package importable as zerowaste_vae. It prints a line a case and
exits with 1 where one is outside its tolerance, two runs differ, or a chunk or band differs from the whole frame.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial

import conv_checks
import token_checks
import torch
from conv_checks import DEVICE, TOLERANCE, bordered, error
from zerowaste_vae.engine.kernels.attention import attention
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Geometry, Partials, conv3d, pack_weight, padded_channels
from zerowaste_vae.engine.kernels.conv3d.schedules import ROW_BLOCK
from zerowaste_vae.engine.kernels.duplicate import duplicate
from zerowaste_vae.engine.kernels.norm_act import Norm, Store, coefficients, norm_act, statistics
from zerowaste_vae.engine.kernels.targets import FP8, standing_in, target
from zerowaste_vae.engine.kernels.to_pixels import BYTES, RAW, to_pixels
from zerowaste_vae.engine.kernels.upsample import pack, pack_nearest, upsample

failures = 0


def report(name: str, error: float, limit: float, *same: bool) -> None:
    global failures
    good = error <= limit and all(same)
    failures += not good
    print(f"{'ok  ' if good else 'FAIL'} {name:78} {error:.2e} <= {limit:.0e} equal {list(same)}", flush=True)


def tell(cases: Callable[..., Iterator[conv_checks.Row]], *arguments: object) -> None:
    for case in cases(*arguments):
        report(*case)


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
    whole = statistics(x, 32, backend="triton")
    joined = Partials.concat([statistics(x[:, t : t + 64], 32, backend="triton") for t in range(0, 150, 64)])
    norm = Norm(weight=torch.randn(128, device=DEVICE), bias=torch.randn(128, device=DEVICE))
    a, b = (coefficients(whole, norm, 150 * 131, backend=backend) for backend in ("triton", "reference"))
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


def consumers(check: Callable[[], None]) -> None:
    """Run a check with that loop."""
    with standing_in(conv_checks.consumer()):
        check()


def beyond_32_bits() -> None:
    """Check outputs of more than 2^31 elements: the last frame of a large call equals that frame alone."""
    for here in (target(DEVICE), dataclasses.replace(target(DEVICE), tma=False), conv_checks.consumer()):
        x = torch.randn(7, 2162, 3842, 64, device=DEVICE, dtype=torch.float16)
        weight = pack_weight(torch.randn(64, 64, 3, 3, 3, device=DEVICE) * (64 * 27) ** -0.5, torch.float16)
        whole = torch.empty(5, 2160, 3840, 64, device=DEVICE, dtype=torch.float16)
        sums = conv3d.launch(here, x, weight, whole, epilogue=Epilogue(groups=32))
        alone = torch.empty_like(whole[:1])
        one = conv3d.launch(here, x[4:], weight, alone, epilogue=Epilogue(groups=32))
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
    report("attention 512 at 129600 tokens", error(rows, attention.reference(q[:, -300:], k, v)), 1e-3)
    for head in (384, 512, 1024):
        for dtype in (torch.float16, torch.bfloat16):
            for tokens in (77, 1000, 3601):
                q, k, v = (torch.randn(2, tokens, head, device=DEVICE).to(dtype) for _ in range(3))
                a, b, c = (attention(q, k, v, backend=n) for n in ("reference", "triton", "triton"))
                single = attention(q[1:], k[1:], v[1:], backend="triton")
                report(f"attention {head} {str(dtype)[6:]} {tokens}", error(b, a), 2 * TOLERANCE[dtype],
                       torch.equal(b, c), torch.equal(single, b[1:]))


_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8}
# The parts that compile most are split by type: one core runs one part.
PARTS = {f"{part.__name__}_{word}": partial(tell, part, dtype)
         for part in (conv_checks.forms, conv_checks.schedules) for word, dtype in _TYPES.items()}
PARTS |= {one.__name__: one for one in (ends, norms, ups, nearest, attentions, beyond_32_bits)}
PARTS |= {one.__name__: partial(tell, one)
          for one in (conv_checks.clip_starts, conv_checks.other_generations, token_checks.tokens)}
PARTS |= {f"winograd_{word}": partial(tell, conv_checks.winograd, _TYPES[word]) for word in ("fp16", "bf16")}
PARTS |= {"invariance": partial(tell, conv_checks.invariances), "winograd_large": partial(tell, conv_checks.large)}
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
