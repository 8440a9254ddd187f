"""The launch of the form, with arguments that conv3d has checked. Its text is written here, not shipped: the driver of
any card from sm_80 on compiles it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ...prebuilt.driver import driver
from ...prebuilt.errors import PrebuiltError, WrittenError
from ...prebuilt.launch import written
from ..schedules import SMALL_PLANE
from ..types import Epilogue, Geometry, Partials, Weight, stat_span
from .form import KINDS, PARAMETERS, Form
from .pack import warps
from .ptx import text

#: Parameters of a launch, packed one after the other, and where each lies.
_LETTERS = "".join("Q" if kind == "u64" else "I" for kind in PARAMETERS.values())
_PACKED = struct.Struct("@" + _LETTERS)
_PLACES = tuple(struct.calcsize("@" + _LETTERS[: i + 1]) - struct.calcsize(one) for i, one in enumerate(_LETTERS))


def form_of(weight: Weight, frame: tuple[int, int], epilogue: Epilogue) -> Form:
    """Return the text of a layer: it depends on the layer and the full frame (H, W) only."""
    per_warp, wide = warps(weight.out_channels) or (0, 0)
    form = Form(KINDS[weight.data.dtype], per_warp=per_warp, wide=wide, residual=epilogue.residual is not None,
                bias=epilogue.bias is not None)  # fmt: skip
    # Of threads that share one: two or four.
    widest = form.per_warp if form.each == 16 else 4
    span = stat_span(weight.out_channels, epilogue.groups, widest) if epilogue.groups else 0
    rows = 8 if wide == 1 else 4
    # Blocks of twelve rows do not divide those of sums. At 192 channels they are 5 % faster, on small planes slower.
    if wide * per_warp == 96 and not span and frame[0] * frame[1] >= SMALL_PLANE:
        rows = 6
    return Form(**vars(form) | {"rows": rows, "span": span})


def launch(x: Tensor, weight: Weight, out: Tensor, geometry: Geometry, epilogue: Epilogue,
           start: int) -> Partials | None:  # fmt: skip
    """Run the kernel on a plain buffer [slots, Hp, Wp, C]; phase by phase.

    Raises: WrittenError where the driver does not take it."""
    if weight.phases != (1, 1, 1):
        for part, place, one in _by_phase(weight, out, epilogue):
            launch(x, part, place, geometry, one, start)
        return None
    d, h, w, k = out.shape
    form = form_of(weight, (geometry.frame_rows or h, w), epilogue)
    across, down = -(-w // (2 * form.columns)), -(-h // (2 * form.rows))
    partials = None
    if form.span:
        shape = (d, across * down, k // form.span, 2)
        partials = Partials(torch.empty(shape, dtype=torch.float32, device=x.device), form.span)
    if x.is_meta:
        return partials
    slots, rows, pitch, channels = x.shape
    (top, left), residual = geometry.origin, out if epilogue.residual is None else epilogue.residual
    blocks = k // form.outputs
    tensors = (x, weight.data, out, residual, epilogue.bias, partials and partials.data)
    block = ctypes.create_string_buffer(_PACKED.size)
    _PACKED.pack_into(
        block, 0, *(0 if t is None else t.data_ptr() for t in tensors), slots, start, rows * pitch, pitch,
        top * pitch + left, rows - 1 - top, pitch - 1 - left, h, w, weight.kernel[0], channels, blocks, across, down,
        *out.stride()[:3], *residual.stride()[:3],
    )  # fmt: skip
    address = ctypes.addressof(block)
    places = (ctypes.c_void_p * len(_PLACES))(*(address + place for place in _PLACES))
    device, grid = x.get_device(), (blocks * across * down * d,)
    stream = torch._C._cuda_getCurrentRawStream(device)
    try:
        function = written(device, form.symbol, repr(form), form.shared, lambda: text(form))
        driver().launch(device, function, grid, form.threads, form.shared, stream, places)
    except PrebuiltError as error:
        raise WrittenError(str(error)) from error
    return partials


def _by_phase(weight: Weight, out: Tensor, epilogue: Epilogue) -> Iterator[tuple[Weight, Tensor, Epilogue]]:
    """Yield the weight, output and epilogue of each phase."""
    (pt, py, px), k = weight.phases, weight.out_channels
    for number, (iy, ix, it) in enumerate(product(range(py), range(px), range(pt))):
        place = slice(it, None, pt), slice(iy, None, py), slice(ix, None, px)
        bias, residual = epilogue.bias, epilogue.residual
        one = replace(epilogue, bias=None if bias is None else bias[number * k : number * k + k],
                      residual=None if residual is None else residual[place])  # fmt: skip
        yield weight.phase(number), out[place], one
