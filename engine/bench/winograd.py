"""Benchmark of a layer (norm_act and conv3d), direct and in Winograd form, with candidate tiles.

Rates are of the direct form's products, so that they compare. The direct form is measured twice, before and after the
others, which shows a GPU that slows down within a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..kernels.conv3d import Epilogue, buffer_shape, conv3d, pack_planes, pack_weight, padded_channels
from ..kernels.conv3d.schedules import SMALL_PLANE, Schedule
from ..kernels.conv3d.tuned import Kind
from ..kernels.norm_act import Norm, Store, coefficients, norm_act, statistics
from ..kernels.norm_act.schedules import WALK
from ..kernels.targets import FP8, target
from ..tuning.candidates import candidates
from .rows import Meter, Row
from .timing import matrix_rate

# D_out x H x W, C = K at 720p: EVEN from the highest to the lowest stage, OTHERS in-between.
EVEN = ((4, 720, 1280, 128), (2, 720, 1280, 256), (4, 360, 640, 256), (4, 360, 640, 512), (2, 180, 320, 512),
           (1, 90, 160, 512))  # fmt: skip
TUNED = EVEN[0], EVEN[3], EVEN[5]
OTHERS = ((4, 180, 320, 384), (4, 360, 640, 256), (4, 180, 320, 1024), (4, 360, 640, 192), (4, 720, 1280, 96))
#: Neighbouring pairs that a program of norm_act goes through, and elements of one column of its pairs.
WALKS = ((1, 1024), (2, 1024), (4, 1024), (8, 1024), (4, 2048))


def others(device: torch.device, dtype: torch.dtype, channels: int, frame: tuple[int, int]) -> list[Schedule]:
    """Return the schedules that tuning would try for a layer with as many outputs as inputs, without the table's own.

    Args:
        device: the GPU.
        dtype: of the operands.
        channels: of the layer.
        frame: rows and columns of its positions.
    """
    here, small = target(device), frame[0] * frame[1] < SMALL_PLANE
    kind = Kind("winograd", str(dtype)[6:], here.accumulate(dtype, False), padded_channels(channels, dtype), channels,
                small, 1, 3, False, True)  # fmt: skip
    return candidates(here, kind)[1:]


def cases(bench: Meter) -> Iterator[Row]:
    """Measure every candidate for a narrow, a wide and a small layer.

    Other types and widths are measured with the table's own tile."""
    able = target(bench.device).supports
    for dtype in (torch.float16, FP8):
        if able(dtype):
            for shape in EVEN:
                yield from layer(bench, shape, dtype, tune=shape in TUNED)
    for shape in OTHERS:
        yield from layer(bench, shape, torch.bfloat16)
    if able(torch.int8):
        for shape in EVEN[::3]:
            yield from layer(bench, shape, torch.int8)


def layer(bench: Meter, shape: tuple[int, int, int, int], dtype: torch.dtype, tune: bool = False) -> Iterator[Row]:
    """Measure the passes of one layer, alone and together, in both forms.

    Args:
        bench: times calls.
        shape: D_out, H, W, and C = K.
        dtype: of the operands.
        tune: measure every candidate, too.
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

    def normed(form: str, walk: tuple[int, int] = WALK) -> None:
        store = Store(scale=scale, rounded=form == "Winograd")
        norm_act(x, norm, forms[form][0], slot=2, store=store, coefs=coefs, walk=walk)

    def convolved(form: str, schedule: Schedule | None = None) -> None:
        conv3d(*forms[form], out, epilogue=epilogue, schedule=schedule)

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
    if tune:
        for s in others(bench.device, dtype, c, (h, w)):
            tile = f"{s.positions}x{s.columns}x{s.depth} {s.warps}w{s.stages}s g{s.group}"
            yield row("winograd conv3d", tile, lambda s=s: convolved("Winograd", s))
    for form in (*forms, "direct"):
        yield row("winograd layer", form, lambda form=form: both(form))
    moved = x.nbytes + x.numel() * dtype.itemsize
    bench.ceiling = None
    yield bench.bytes("winograd norm_act", name, dtype, "direct", moved, lambda: normed("direct"))
    moved += x.numel() * dtype.itemsize
    for walk in (WALK, *(WALKS if tune and h > 180 else ())):
        yield bench.bytes("winograd norm_act", name, dtype, f"Winograd walk {walk[0]} of {walk[1]}", moved,
                          lambda walk=walk: normed("Winograd", walk))
