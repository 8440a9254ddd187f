"""Every kernel x schedule the dispatchers can launch on a generation, at full decoder sizes, as meta tensors.

Run as a script in a process without TRITON_INTERPRET: `python compile_cases.py 0 90 120` prints one JSON line for each
of the even cases, 1 for each of the odd ones.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import cross_compile
from compile_transformers import meta, transformer_cases
from zerowaste_vae.engine.extras.tuning.candidates import candidates
from zerowaste_vae.engine.extras.tuning.layers import Layer, layers
from zerowaste_vae.engine.extras.tuning.problem import problem
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.kernels.attention import attention
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Geometry, Weight, conv3d, padded_channels
from zerowaste_vae.engine.kernels.duplicate import duplicate
from zerowaste_vae.engine.kernels.norm_act import Condition, Norm, Store, norm_act
from zerowaste_vae.engine.kernels.targets import FP8, Target, capabilities, triton_version
from zerowaste_vae.engine.kernels.to_pixels import BYTES, to_pixels
from zerowaste_vae.engine.options import Options
from zerowaste_vae.engine.planning.fused_walk import FusedWalk

HALF, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8
# (H, W, C) at 720p, one per schedule: narrow, wide, small plane.
NARROW, WIDE, SMALL = (720, 1280, 128), (360, 640, 512), (60, 107, 512)
CONV = ("conv3d.conv_kernel", "conv3d.mma_kernel", "conv3d.taps_kernel")
ATTENTION = ("scores_kernel", "merge_kernel", "values_kernel", "gather_kernel")


def conv_calls(here: Target, dtype: torch.dtype, stage: tuple[int, int, int], *, plain: bool = False,
               fast: bool = False, stride: tuple[int, int, int] = (1, 1, 1), phases: tuple[int, int, int] = (1, 1, 1),
               residual: bool = True):
    h, w, c = stage
    folded, temporal = (3, 2) if phases[0] == 2 else (0, 3)
    kernel = (3, 3, 3) if phases == (1, 1, 1) else (temporal, 2, 2)
    rows = c * phases[0] * phases[1] * phases[2] * (folded or 1)
    scale = meta(rows) if dtype.itemsize == 1 else None
    weight = Weight(meta(rows, kernel[0] * kernel[1] * kernel[2] * c, dtype=dtype), c, c, kernel, scale, phases,
                    phases[1] == 2, folded)
    x = meta(6, h + 2, w + 2, c, dtype=dtype)
    out = meta(4 * phases[0] // stride[0], h * phases[1] // stride[1], w * phases[2] // stride[2], c,
               dtype=BF16 if dtype == BF16 else HALF)
    bias = meta(rows // c, 4, c) if phases != (1, 1, 1) else meta(c)
    shared = phases == (1, 1, 1) and not plain
    epilogue = Epilogue(bias, out if shared and residual else None, 0 if plain else 32, half_accumulate=fast)
    with cross_compile.recorded(*CONV) as calls:
        place = Geometry(stride, (1, 1) if stride[1] == 2 else (0, 0))
        conv3d.launch(here, x, weight, out, geometry=place, epilogue=epilogue)
    return calls


def wan_calls(
    here: Target, dtype: torch.dtype, c: int, k: int, *, up: bool = False, stride: int = 1, still: bool = False
):
    """Into bf16; `up`: a composed nearest upsampling. still: of pictures, with sums of a norm."""
    h, w = 180, 320
    phases, kernel = ((1, 2, 2), (1, 2, 2)) if up else ((1, 1, 1), (1 if still else 3, 3, 3))
    rows = 4 * k if up else k
    scale = meta(rows) if dtype.itemsize == 1 else None
    weight = Weight(meta(rows, kernel[0] * kernel[1] * kernel[2] * c, dtype=dtype), c, k, kernel, scale, phases, up)
    out = meta(2, h * phases[1] // stride, w * phases[2] // stride, k, dtype=BF16)
    geometry = Geometry((1, stride, stride), (stride - 1, stride - 1))
    residual = None if still and (up or stride > 1) else out
    epilogue = Epilogue(meta(rows), residual, 32 if still else 0, half_accumulate=dtype == FP8)
    with cross_compile.recorded(*CONV) as calls:
        x = meta(4, h + 2, w + 2, c, dtype=dtype)
        conv3d.launch(here, x, weight, out, geometry=geometry, epilogue=epilogue)
    return calls


def wan_cases(here: Target):
    """Its widths in 8 bit, 96 and 160 of which are no whole steps, and those of 16 bit that have tiles of their own."""
    for dtype in (FP8, INT8) if here.fp8 else (INT8,):
        word = str(dtype).split(".")[1].split("_")[0] + ("_fast" if here.sm == 89 and dtype == FP8 else "")
        own = 90 <= here.sm < 100
        for c in (96, 160, 192, 320, 384, 640, 1024) if own else (96, 160, 384):
            yield f"conv {word} wan {c}", wan_calls(here, dtype, c, c)[0]
        yield f"upsample wan {word} 192", wan_calls(here, dtype, 384, 192, up=True)[0]
        if own:
            yield f"conv {word} wan 512", wan_calls(here, dtype, 512, 512)[0]
            yield f"upsample wan {word} 96", wan_calls(here, dtype, 192, 96, up=True)[0]
            yield f"upsample wan {word} 1024", wan_calls(here, dtype, 1024, 1024, up=True)[0]
    for stride in (1, 2):
        yield f"conv bfloat16 wan 160 stride {stride}", wan_calls(here, BF16, 160, 160, stride=stride)[0]


def picture_cases(here: Target):
    eight = FP8 if here.fp8 else INT8
    word = str(eight).split(".")[1].split("_")[0] + ("_fast" if here.sm == 89 and eight == FP8 else "")
    yield "conv bfloat16 picture 128", wan_calls(here, BF16, 128, 128, still=True)[0]
    yield "conv bfloat16 picture 512 stride 2", wan_calls(here, BF16, 512, 512, still=True, stride=2)[0]
    yield "upsample picture bfloat16 512", wan_calls(here, BF16, 512, 512, still=True, up=True)[0]
    yield "upsample picture bfloat16 256", wan_calls(here, BF16, 256, 256, still=True, up=True)[0]
    yield f"upsample picture {word} 512", wan_calls(here, eight, 512, 512, still=True, up=True)[0]


def depth_calls(here: Target, c: int, k: int, phases: tuple[int, int, int], kernel: tuple[int, int, int]):
    """A whole convolution whose channels become samples, in bf16; 3x3x3 ones onto the input's own samples."""
    h, w, edge = 90, 160, kernel[1] - 1
    rows = k * phases[0] * phases[1] * phases[2]
    weight = Weight(meta(rows, kernel[0] * kernel[1] * kernel[2] * c, dtype=BF16), c, k, kernel, None, phases)
    out = meta(2 * phases[0], h * phases[1], w * phases[2], k, dtype=BF16)
    epilogue = Epilogue(meta(rows), out if edge else None)
    with cross_compile.recorded(*CONV) as calls:
        conv3d.launch(here, meta(4, h + edge, w + edge, c, dtype=BF16), weight, out, epilogue=epilogue)
    return calls


def tuning_cases(here: Target):
    """Yield the tiles that a tuning tries beside the tables, each once: for the layers with most work of one family
    in 16 bit, or, if ZEROWASTE_COMPILE is "all", for all layers and types of three families."""
    every = os.environ.get("ZEROWASTE_COMPILE") == "all"
    types = [(HALF, "f32"), *([(HALF, "f16")] if here.half_accumulate else []), (INT8, "i32")]
    types += [(FP8, here.accumulate(FP8, True))] if here.fp8 else []
    seen = set()
    for architecture in ARCHITECTURES[: 3 if every else 1]:
        for layer in layers(FusedWalk(architecture, architecture.published.config, HALF, Options()), here):
            for dtype, accumulate in types if every else types[:1]:
                if every or (layer.kind.sums and layer.share > 0.08):
                    wide, fast = padded_channels(layer.kind.channels, dtype), accumulate == "f16"
                    kind = layer.kind._replace(operands=str(dtype).split(".")[1], accumulate=accumulate, channels=wide)
                    yield from _tried(here, replace(layer, kind=kind, half_accumulate=fast), seen)


def _tried(here: Target, layer: Layer, seen: set):
    kind = layer.kind
    word = kind.operands.split("_")[0] + ("_fast" if kind.accumulate == "f16" else "")
    for s in candidates(here, kind)[1:]:
        outputs = kind.outputs if s.tail or s.rest else 0
        case = kind._replace(channels=0, outputs=outputs, small=False), replace(s, group=1), layer.residual
        if case not in seen:
            seen.add(case)
            with cross_compile.recorded() as calls:
                problem(layer, torch.device("meta")).launch(here, s)
            stride = " stride 2" if kind.strided else ""
            yield f"conv {word} tried {kind}{stride} {s}", calls[0]


def duplicate_calls():
    with cross_compile.recorded("duplicate.duplicate_kernel") as calls:
        for k, frames, first in ((128, 1, True), (512, 2, False)):
            out = meta(4 * frames, 720, 1280, k, dtype=HALF)
            duplicate(meta(4, 360, 640, 256, dtype=HALF), out, frames=frames, samples_first=first)
    return calls


def conditioned_calls(dtype: torch.dtype):
    condition = Condition(meta(16, 256), meta(256), 4, meta(13, 90, 160, 16), 0, meta(90 * 160, 256))
    norm = Norm(weight=meta(128), bias=meta(128), per_chunk=True, condition=condition)
    with cross_compile.recorded("norm_act.conditioned_kernel") as calls:
        x, buffer = meta(4, 720, 1280, 128, dtype=BF16), meta(6, 722, 1282, 128, dtype=dtype)
        norm_act(x, norm, buffer, store=Store(scale=0.05))
    return calls


def norm_calls(dtype: torch.dtype):
    x, coefs = meta(4, 720, 1280, 128, dtype=HALF), meta(4, 2, 128)
    norm = Norm(weight=meta(128), bias=meta(128))
    names = ("norm_act.statistics_kernel", "norm_act.coefficients_kernel", "norm_act.norm_act_kernel")
    with cross_compile.recorded(*names) as calls:
        health = {"health": torch.empty((), device="meta")}
        norm_act(x, norm, meta(6, 722, 1282, 128, dtype=dtype), store=Store(scale=0.05), **health)
        norm_act(x, Norm("l2", meta(128)), meta(6, 722, 1282, 128, dtype=dtype), coefs=coefs, **health)
        copy = Store(silu=False, scale=0.05)
        norm_act(x, Norm("none"), meta(6, 722, 1282, 128, dtype=dtype), store=copy, **health)
        # Wan's: bf16, an int8 buffer balanced by a gain, a width that is no power of two
        wide = meta(6, 722, 1282, padded_channels(96, dtype), dtype=dtype)
        store = Store(scale=0.05, gain=meta(96) if dtype == INT8 else None)
        norm_act(meta(4, 720, 1280, 96, dtype=BF16), Norm("l2", meta(96)), wide, store=store, **health)
        timed = Norm("rms", meta(128), meta(128))
        reflected = Store(border="reflect", scale=0.05)
        norm_act(x, timed, meta(6, 722, 1282, 128, dtype=dtype), store=reflected, **health)
    return calls


def pixel_calls(here: Target, channels: int, kt: int = 3):
    weight = Weight(meta(3, kt * 9 * channels, dtype=HALF), channels, 3, (kt, 3, 3))
    with cross_compile.recorded("to_pixels.columns_kernel", "to_pixels.gather_kernel") as calls:
        x, out = meta(6, 722, 1282, channels, dtype=HALF), meta(4, 720, 1280, 3, dtype=torch.uint8)
        to_pixels.launch(here, x, weight, meta(3), out, health=meta(1))
    return calls[:2]


def patch_calls(here: Target):
    """A last convolution whose channels hold 2x2 pixels, into bytes."""
    weight, x = Weight(meta(12, 27 * 256, dtype=BF16), 256, 12, (3, 3, 3)), meta(4, 362, 642, 256, dtype=BF16)
    epilogue = Epilogue(meta(12), pixels=BYTES, health=meta(1))
    with cross_compile.recorded(*CONV) as calls:
        conv3d.launch(here, x, weight, meta(2, 360, 640, 12, dtype=torch.uint8), epilogue=epilogue)
    return calls


def attention_calls(here: Target, head: int, tokens: int = 14400):
    """Call attention of a frame of 1280x720; in 3840x2160 the second product is cut into parts."""
    q = meta(2, tokens, head, dtype=HALF)
    with cross_compile.recorded() as calls:
        attention.launch(here, q, q, q)
    names = ATTENTION if tokens > 14400 else ATTENTION[:3]
    return zip(names, calls[: len(names)], strict=True)


def cases(sm: int):
    """(name, recorded call) for one generation: every schedule of its table with every operand type that uses it."""
    here = capabilities(f"sm_{sm}", sm, triton_version())
    stored = FP8 if here.fp8 else INT8
    types = [(HALF, False, (NARROW, WIDE, SMALL)), (INT8, False, (NARROW, WIDE) if here.fp8 else (NARROW, WIDE, SMALL))]
    if here.fp8:
        types.append((FP8, sm == 89, (NARROW, WIDE, SMALL)))
    if sm == 120:  # Triton 3.5 has no block-scaled products: there fp8 sums in fp16, too
        older = capabilities("sm_120", 120, (3, 5))
        for stage in (NARROW, WIDE, SMALL):
            yield f"conv float8_fast {stage}", conv_calls(older, FP8, stage, fast=True)[0]
    if here.mma_sync:
        older = capabilities(f"sm_{sm}", sm, (3, 5))
        for dtype, stage in ((HALF, NARROW), (HALF, WIDE), (INT8, WIDE)):
            yield f"fallback {dtype} {stage}", conv_calls(older, dtype, stage)[0]
    if here.half_accumulate:
        types.append((HALF, True, (NARROW,)))
    for dtype, fast, stages in types:
        word = str(dtype).split(".")[1].split("_")[0] + ("_fast" if fast else "")
        for stage in stages:
            yield f"conv {word} {stage}", conv_calls(here, dtype, stage, fast=fast)[0]
        up = {"fast": fast, "phases": (2, 2, 2)}
        yield f"upsample time {word}", conv_calls(here, dtype, WIDE, **up)[0]
    yield "upsample space float16", conv_calls(here, HALF, WIDE, phases=(1, 2, 2))[0]
    eight = str(stored).split(".")[1].split("_")[0] + ("_fast" if sm == 89 else "")
    yield f"upsample space {eight}", conv_calls(here, stored, WIDE, fast=sm == 89, phases=(1, 2, 2))[0]
    yield "conv bfloat16", conv_calls(here, BF16, NARROW)[0]
    # Two tiles in one program, the narrowest and the widest pair.
    yield "conv float16 96", conv_calls(here, HALF, (720, 1280, 96))[0]
    yield "conv float16 384", conv_calls(here, HALF, (180, 320, 384))[0]
    yield from wan_cases(here)
    yield from picture_cases(here)
    yield "conv to samples", depth_calls(here, 1024, 512, (2, 2, 2), (3, 3, 3))[0]
    yield "conv to frames", depth_calls(here, 512, 256, (2, 1, 1), (3, 3, 3))[0]
    yield "linear to samples", depth_calls(here, 768, 768, (3, 2, 2), (1, 1, 1))[0]
    yield from tuning_cases(here)
    yield "conv bias only", conv_calls(here, HALF, WIDE, plain=True)[0]
    yield "conv sums, no residual", conv_calls(here, HALF, NARROW, residual=False)[0]
    for i, call in enumerate(duplicate_calls()):
        yield f"duplicate {i}", call
    yield "conv stride 2", conv_calls(here, HALF, WIDE, stride=(2, 2, 2))[0]
    for i, call in enumerate(norm_calls(HALF) + norm_calls(stored)[2:]):
        yield f"norm_act {i}", call
    for dtype in (BF16, stored):
        yield f"norm_act conditioned {dtype}", conditioned_calls(dtype)[0]
    for channels in (128, 256):
        for call, name in zip(pixel_calls(here, channels), ("columns", "gather"), strict=True):
            yield f"to_pixels {name} {channels}", call
    yield "conv bfloat16 to patches", patch_calls(here)[0]
    yield "to_pixels columns picture 128", pixel_calls(here, 128, 1)[0]
    yield from transformer_cases(here)
    for head in (512, 1024):
        for name, call in attention_calls(here, head):
            yield f"attention {name} {head}", call
    for name, call in attention_calls(here, 512, 129600):
        if name != "scores_kernel":
            yield f"attention {name} 512 in parts", call


if __name__ == "__main__":
    half, *numbers = map(int, sys.argv[1:])
    for number in numbers:
        for name, call in itertools.islice(cases(number), half, None, 2):
            try:
                result = cross_compile.build(call, number)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"[:400]}
            print(json.dumps({"sm": number, "case": name, **result}), flush=True)
