"""Benchmark of a layer (norm_act and conv3d), direct and in Winograd form.

Rates are of the direct form's products, so that they compare. The direct form is measured twice, before and after the
others, which shows a GPU that slows down within a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ...kernels.conv3d import Epilogue, conv3d, pack_tiles, pack_weight
from ...kernels.norm_act import Norm, coefficients, norm_act, statistics
from .rows import Meter, Row
from .timing import matrix_rate

# D_out x H x W, C = K at 720p: EVEN from the highest to the lowest stage, OTHERS in-between.
EVEN = ((4, 720, 1280, 128), (2, 720, 1280, 256), (4, 360, 640, 256), (4, 360, 640, 512), (2, 180, 320, 512),
           (1, 90, 160, 512))  # fmt: skip
OTHERS = ((4, 180, 320, 384), (4, 360, 640, 256), (4, 180, 320, 1024), (4, 360, 640, 192), (4, 720, 1280, 96))


def cases(bench: Meter) -> Iterator[Row]:
    """Measure narrow, wide and small layers in each type."""
    for dtype, shapes in ((torch.float16, EVEN), (torch.bfloat16, OTHERS)):
        for shape in shapes:
            yield from layer(bench, shape, dtype)


def layer(bench: Meter, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Iterator[Row]:
    """Measure one layer's convolution, alone and behind its norm, in both forms.

    Args:
        bench: times calls.
        shape: D_out, H, W, and C = K.
        dtype: of the operands.
    """
    d, h, w, c = shape
    bench.ceiling = matrix_rate(bench.device, dtype)
    name, work = f"{d}x{h}x{w} {c}", 2.0 * 27 * c * c * d * h * w
    x, residual, out = (bench.random(d, h, w, c, dtype=dtype) for _ in range(3))
    weight = torch.randn(c, c, 3, 3, 3, device=bench.device) * (27 * c) ** -0.5
    groups = 32 if c % 32 == 0 and dtype != torch.bfloat16 else 0  # Wan's norms need no sums
    epilogue = Epilogue(torch.randn(c, device=bench.device), residual, groups)
    norm, coefs = Norm("l2", torch.randn(c, device=bench.device)), None
    if groups:
        norm = Norm(weight=norm.weight, bias=torch.randn(c, device=bench.device))
        coefs = coefficients(statistics(x, groups), norm, h * w)
    forms = {"direct": pack_weight(weight, dtype), "Winograd": pack_tiles(weight, dtype)}
    buffer = torch.zeros(d + 2, h + 2, w + 2, c, dtype=dtype, device=bench.device)

    def normed() -> None:
        norm_act(x, norm, buffer, slot=2, coefs=coefs)

    def convolved(form: str) -> None:
        conv3d(buffer, forms[form], out, epilogue=epilogue)

    def both(form: str) -> None:
        normed()
        convolved(form)

    def row(operator: str, who: str, call: Callable[[], object]) -> Row:
        return bench.flops(operator, name, dtype, who, work, call)

    normed()  # fill the frames of the history, as in a clip
    buffer[:2] = buffer[2]
    for form in (*forms, "direct"):
        yield row("winograd conv3d", form, lambda form=form: convolved(form))
    for form in (*forms, "direct"):
        yield row("winograd layer", form, lambda form=form: both(form))
