"""Block sizes of the memory-bound passes: elements in flight per program, for whole channel rows."""

from __future__ import annotations

import torch

from ..targets import FP8

# Elements one program of `warps` warps holds: 16-byte accesses, two or more in flight per thread.
ELEMENTS = 4096
WARPS = 4
# Image rows summed by one program of the statistics pass (its blocks never depend on the launch).
STAT_ROWS = 1
STAT_ELEMENTS = 4096
# Planes after a norm over channels: where fewer warps share a sum and each turn makes two columns, it takes 0.20
# ms, not 0.24 (1280x720x128, fp16, H200). int8 would spill on sm_100.
PLANE_WARPS = {torch.float16: 2, torch.bfloat16: 2, FP8: 2}
# Planes after other norms: 0.21 ms, not 0.23 (the same in fp8); in fp16 four warps are as fast.
OTHER_PLANE_WARPS = {FP8: 2}
# Planes: the neighbouring pairs that a program walks along, and the elements of one column of all its walks (1024 of
# 512 channels do not fit the registers of sm_80 to 89).
WALK = (4, 512)


def positions(channels: int, elements: int = ELEMENTS) -> int:
    """Return the positions per program for `channels` (a power of two) channels."""
    return max(elements // channels, 1)
