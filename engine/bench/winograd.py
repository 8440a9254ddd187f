"""Benchmark of a layer (norm_act and conv3d), direct and in Winograd form, on consumer cards in both of these; `tune`
times other tiles.

Rates are of the direct form's products, so that they compare. The direct form is measured twice, before and after the
others, which shows a GPU that slows down within a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..kernels.conv3d import (
    Epilogue,
    buffer_shape,
    conv3d,
    pack_planes,
    pack_tiles,
    pack_weight,
    padded_channels,
    winograd2d,
)
from ..kernels.norm_act import Norm, Store, coefficients, norm_act, statistics
from ..kernels.targets import FP8, target
from .rows import Meter, Row
from .timing import matrix_rate

# D_out x H x W, C = K at 720p: EVEN from the highest to the lowest stage, OTHERS in-between.
EVEN = ((4, 720, 1280, 128), (2, 720, 1280, 256), (4, 360, 640, 256), (4, 360, 640, 512), (2, 180, 320, 512),
           (1, 90, 160, 512))  # fmt: skip
OTHERS = ((4, 180, 320, 384), (4, 360, 640, 256), (4, 180, 320, 1024), (4, 360, 640, 192), (4, 720, 1280, 96))


def cases(bench: Meter) -> Iterator[Row]:
    """Measure narrow, wide and small layers in each type."""
    able = target(bench.device).supports
    for dtype in (torch.float16, FP8):
        if able(dtype):
            for shape in EVEN:
                yield from layer(bench, shape, dtype)
    for shape in OTHERS:
        yield from layer(bench, shape, torch.bfloat16)
    if able(torch.int8):
        for shape in EVEN[::3]:
            yield from layer(bench, shape, torch.int8)


def layer(bench: Meter, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Iterator[Row]:
    """Measure the passes of one layer, alone and together, in both forms.

    Args:
        bench: times calls.
        shape: D_out, H, W, and C = K.
        dtype: of the operands.
    """
    d, h, w, c = shape
    bench.ceiling = matrix_rate(bench.device, dtype)
    name, work = f"{d}x{h}x{w} {c}", 2.0 * 27 * c * c * d * h * w
    wide, kind = padded_channels(c, dtype), torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    x, residual, out = (bench.random(d, h, w, c, dtype=kind) for _ in range(3))
    weight = torch.randn(c, c, 3, 3, 3, device=bench.device) * (27 * c) ** -0.5
    groups = 32 if c % 32 == 0 and dtype != torch.bfloat16 else 0  # Wan's norms need no sums
    scale = 1.0 if dtype.itemsize == 2 else 0.05
    epilogue = Epilogue(torch.randn(c, device=bench.device), residual, groups, scale)
    norm, coefs = Norm("l2", torch.randn(c, device=bench.device)), None
    if groups:
        norm = Norm(weight=norm.weight, bias=torch.randn(c, device=bench.device))
        coefs = coefficients(statistics(x, groups), norm, h * w)
    forms = {
        "direct": (torch.zeros(d + 2, h + 2, w + 2, wide, dtype=dtype, device=bench.device),
                   pack_weight(weight, dtype)),
        "Winograd": (torch.zeros(d + 2, *buffer_shape(h, w, wide), dtype=dtype, device=bench.device),
                     pack_planes(weight, dtype)),
    }
    if target(bench.device).tiles and winograd2d.takes(dtype, c, c):
        forms["Winograd in registers"] = torch.zeros_like(forms["direct"][0]), pack_tiles(weight, dtype)

    def normed(form: str) -> None:
        store = Store(scale=scale, rounded=form == "Winograd")
        norm_act(x, norm, forms[form][0], slot=2, store=store, coefs=coefs)

    def convolved(form: str) -> None:
        conv3d(*forms[form], out, epilogue=epilogue)

    def both(form: str) -> None:
        normed(form)
        convolved(form)

    def row(operator: str, who: str, call: Callable[[], object]) -> Row:
        return bench.flops(operator, name, dtype, who, work, call)

    for form in forms:  # fill the frames of the history, as in a clip
        normed(form)
        forms[form][0][:2] = forms[form][0][2]
    for form in (*forms, "direct"):
        yield row("winograd conv3d", form, lambda form=form: convolved(form))
    for form in (*forms, "direct"):
        yield row("winograd layer", form, lambda form=form: both(form))
    moved, bench.ceiling = x.nbytes + x.numel() * dtype.itemsize, None
    for form, more in (("direct", 0), ("Winograd", x.numel() * dtype.itemsize)):
        yield bench.bytes("winograd norm_act", name, dtype, form, moved + more, lambda form=form: normed(form))
