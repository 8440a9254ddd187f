"""Measure how many multiply-adds a processor of this GPU makes in a clock by `mma.sync`, for each kind of product."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ....kernels.prebuilt.driver import driver
from .assemble import slowed

#: Kind -> the instruction, its registers of sums, and its multiply-adds.
_INSTRUCTIONS = {
    "f32": ("m16n8k16.row.col.f32.f16.f16.f32", 4, 16 * 8 * 16),
    "f16": ("m16n8k16.row.col.f16.f16.f16.f16", 2, 16 * 8 * 16),
    "s32": ("m16n8k32.row.col.satfinite.s32.s8.s8.s32", 4, 16 * 8 * 32),
}
#: Warps of a block, independent products of a warp in a turn of the loop, turns; one block a processor, held apart by
#: shared memory.
_WARPS, _PRODUCTS, _TURNS, _SHARED = 16, 12, 20_000, 120 << 10
_RUNS = 3


class Unit(NamedTuple):
    """Multiply-adds a clock and processor by kind, and the GPU's clock in MHz while it made them."""

    rates: dict[str, float]
    mhz: float


def measure(device: torch.device, folder: Path | None) -> Unit:
    """Measure a CUDA device's products, each kind alone.

    Args:
        device: with an index.
        folder: where assembled kernels are kept.
    """
    properties = torch.cuda.get_device_properties(device)
    sm, blocks = properties.major * 10 + properties.minor, properties.multi_processor_count
    here, index, found, clocks = driver(), device.index, {}, []
    with torch.cuda.device(device):
        taken = torch.zeros(blocks * _WARPS, dtype=torch.int64, device=device)
        for kind, (_, _, work) in _INSTRUCTIONS.items():
            code = slowed(text(kind), dict.fromkeys(_INSTRUCTIONS, 1.0), sm, kind, folder, index)
            function = here.load(index, code, "products", _SHARED)
            place, turns = ctypes.c_uint64(taken.data_ptr()), ctypes.c_uint32(_TURNS)
            given = (ctypes.c_void_p * 2)(ctypes.addressof(place), ctypes.addressof(turns))
            best = 0.0
            for _ in range(_RUNS):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                here.launch(index, function, (blocks,), 32 * _WARPS, _SHARED, torch.cuda.current_stream().cuda_stream,
                            given)  # fmt: skip
                end.record()
                torch.cuda.synchronize(device)
                spent = taken.view(blocks, _WARPS).amax(1).double().median().item()
                best = max(best, _WARPS * _PRODUCTS * _TURNS * work / spent)
                clocks.append(spent / (begin.elapsed_time(end) * 1e3))
            found[kind] = best
    return Unit(found, max(clocks))


def text(kind: str) -> str:
    """Return the PTX of a kernel whose warps make products of a kind and store the clocks that they took."""
    operation, sums, _ = _INSTRUCTIONS[kind]
    each = [", ".join(f"%r{16 + sums * n + i}" for i in range(sums)) for n in range(_PRODUCTS)]
    last = 16 + sums * _PRODUCTS
    lines = [f"mma.sync.aligned.{operation} {{{s}}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{{s}}};" for s in each]
    total = "".join(f"xor.b32 %r8, %r8, %r{n};\n" for n in range(16, last))
    return f""".version 8.0
.target sm_80
.address_size 64
.visible .entry products(.param .u64 place, .param .u32 turns)
.maxntid {32 * _WARPS}, 1, 1
{{
.reg .b32 %r<{last}>;
.reg .b64 %d<8>;
.reg .pred %p<3>;
ld.param.u64 %d1, [place];
ld.param.u32 %r7, [turns];
cvta.to.global.u64 %d1, %d1;
mov.u32 %r1, %laneid;
mov.u32 %r2, %smid;
and.b32 %r3, %r1, 3;
and.b32 %r4, %r2, 1;
mov.b32 %r5, %r3;
mov.b32 %r6, %r4;
{"".join(f"mov.b32 %r{n}, 0;{chr(10)}" for n in range(16, last))}mov.b32 %r9, 0;
bar.sync 0;
mov.u64 %d2, %clock64;
TURN:
{chr(10).join(lines)}
add.u32 %r9, %r9, 1;
setp.lt.u32 %p1, %r9, %r7;
@%p1 bra TURN;
mov.b32 %r8, 0;
{total}setp.eq.u32 %p2, %r8, 123456789;
@%p2 trap;
mov.u64 %d3, %clock64;
sub.u64 %d3, %d3, %d2;
mov.u32 %r10, %ctaid.x;
mov.u32 %r11, %tid.x;
shr.u32 %r11, %r11, 5;
mad.lo.u32 %r10, %r10, {_WARPS}, %r11;
mul.wide.u32 %d4, %r10, 8;
add.u64 %d1, %d1, %d4;
st.global.u64 [%d1], %d3;
ret;
}}
"""


def factors(own: Mapping[str, float], card: Mapping[str, float]) -> dict[str, float]:
    """Return how often each product must be made for a GPU's rates to be a card's; 1 where the card is as fast."""
    return {kind: max(1.0, own[kind] / card[kind]) for kind in own}
