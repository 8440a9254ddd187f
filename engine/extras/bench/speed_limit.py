"""Least time of a decode or encode: its FLOP at the rate of matrix products plus its bytes at the rate of copies.

Both rates are measured here, in the same run, with the vendor's own routines. FLOP are those of the Program's steps (2
per multiply-add, attention included); bytes count every convolution reading its input and writing its output once, with
everything else fused into them. The upsamplers are counted in their composed form where that is fewer FLOP (DESIGN: 21
% of the decoder), because that is the least known."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...network.architecture import Architecture
from ...network.values import Work
from ...planning.fused_walk import FusedWalk
from .timing import copy_rate, matrix_rate

#: Type of the matrix product that a precision is compared with; float16 for precisions not listed.
MATRIX_TYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp16_fast": torch.float16,
    "fp8": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """Measured ceilings: TFLOP/s of square products in `product` (a type's name), TB/s of a copy (read + written)."""

    product: str
    matrix: float
    copy: float


def work(architecture: Architecture, config: object, half: str, latents: int, height: int, width: int) -> Work:
    """Return the work of a clip.

    Args:
        architecture: the family.
        config: sizes of the network.
        half: "decoder" or "encoder".
        latents, height, width: of the clip, in latent pixels.
    """
    program = architecture.program(half, config)
    if half == "decoder":
        size = latents, height, width
    else:
        s = architecture.spatial
        size = architecture.frames(latents), s * height, s * width
    return program.work(*size)


def in_form(work: Work, walk: FusedWalk, half: str, height: int, width: int) -> Work:
    """Return a clip's work with four ninths of the products of convolutions in Winograd form, the least known of those.

    Args:
        work: of the clip.
        walk: dry runs of the model, with the form that its layers have.
        half: "decoder" or "encoder".
        height, width: of the clip, in latent pixels.
    """
    if half not in walk.halves or not walk.network(half).formed[0]:
        return work
    calls = walk.run(half, height, width).calls.values()
    share = sum(call.work for call in calls if call.weight.tiles) / sum(call.work for call in calls)
    return work._replace(composed_flop=work.composed_flop * (1 - 5 / 9 * share))


def seconds(work: Work, precision: str, flop_rate: float, byte_rate: float) -> float:
    """Return the speed limit in seconds.

    Args:
        work: FLOP and values of a clip. 8-bit precisions keep the outputs of convolutions in 16 bits.
        precision: a precision's name.
        flop_rate: TFLOP/s.
        byte_rate: TB/s.
    """
    value_bytes = 4 if precision == "fp32" else 2
    return work.composed_flop * 1e-12 / flop_rate + work.values * value_bytes * 1e-12 / byte_rate


def rates(device: torch.device, precision: str) -> Rates:
    """Measure both ceilings for a precision (one not in MATRIX_TYPES counts as fp16, an 8-bit one on a CPU as fp32)."""
    dtype = MATRIX_TYPES.get(precision, torch.float16)
    if device.type != "cuda" and dtype.itemsize == 1:
        dtype = torch.float32
    matrix = matrix_rate(device, dtype) or matrix_rate(device, torch.float16)
    return Rates(str(dtype).removeprefix("torch."), matrix, copy_rate(device))
