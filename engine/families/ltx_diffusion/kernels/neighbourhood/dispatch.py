"""Dispatch of neighbourhood attention: our kernels where there are some, else torch."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from .....kernels.launching import launcher
from .....kernels.observe import observed
from .....kernels.targets import Target, interpreted, kernels_for, on_device
from . import reference
from .schedules import LONGEST, WIDE, WIDE_TILE, Schedule, pick, wide_fits
from .windows import TERMS, Window, hidden, whole

#: Sizes of a head that the kernel takes.
HEADS = (16, 32, 64, 128)
LOG2E = math.log2(math.e)
#: The largest bound of logits, in powers of two, under which the least weight of a softmax is still a normal bf16.
LARGEST_PEAK = 60.0
#: Size of a head for which the kernel for wgmma exists, and its registers: with these, three
#: programs run on a processor.
WIDE_HEAD, REGISTERS = 64, 168


@observed
def neighbourhood(
    q: Tensor, k: Tensor, v: Tensor, window: Window, *, ring: int = 0, bound: float = math.inf,
    out: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Attend from every query to the keys in its window of frames, rows and columns: softmax(q k^T) v.

    Windows are moved inward at the clip's and the frame's borders, so that all have the same number of keys.

    Args:
        q: [T, H, W, heads, D], scaled; frames from `window.first` on.
        k, v: [slots, H, W, heads, D], strided alike; the clip's frame f is in slot (f + ring) % slots, and every frame
            of the queries' windows is there.
        window: its size and place.
        bound: a number that no q . k exceeds; infinite where none is known.
        out: memory for the result, contiguous; may be q's where q is contiguous.
        backend: "auto", "triton" or "reference".

    Returns:
        [T, H, W, heads, D].

    Raises:
        ValueError: shapes or types differ.
    """
    alike = k.shape == v.shape and k.stride() == v.stride() and q.dtype == k.dtype == v.dtype
    if not alike or q.shape[1:] != k.shape[1:]:
        shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        raise ValueError(f"neighbourhood needs queries and keys of one size and type, not {shapes}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[4] in HEADS and max(window.kernel) <= LONGEST
    here = kernels_for(q.device, backend) if fits or backend == "triton" else None
    if here is None:
        if not q.is_meta:
            reference.neighbourhood(q, k, v, window, ring, out)
        return out
    with on_device(q):
        launch(q, k, v, window, here, ring=ring, bound=bound, out=out)
    return out


def launch(
    q: Tensor, k: Tensor, v: Tensor, window: Window, here: Target, *, out: Tensor, ring: int = 0,
    bound: float = math.inf, schedule: Schedule | None = None,
) -> None:  # fmt: skip
    """Run the kernel; `schedule` overrides the table (checks and tuning only)."""
    frames, height, width, heads, head = q.shape
    kernel = window.within(height, width)
    peak = bound * LOG2E
    # fp16 weights would lose their small values below 2^-14.
    bounded = peak <= LARGEST_PEAK and q.dtype != torch.float16
    if here.wgmma and schedule is None and (bounded or q.is_meta) and head == WIDE_HEAD:
        size = tuple(n + k - 1 for n, k in zip(WIDE_TILE, kernel[1:], strict=True))
        if height >= size[0] and width >= size[1] and wide_fits(kernel, size):
            table, kinds, grid = hidden(
                height, width, kernel[1:], WIDE_TILE, size, WIDE.keys, q.dtype, q.device, wide=True
            )
            launcher("neighbourhood.wide_neighbourhood_kernel", here)[
                (heads * math.prod(grid) * -(-frames // WIDE.frames),)
            ](
                q, k, v, table, kinds, out, frames, height, width, window.first, window.clip, ring, k.shape[0],
                window.origin, *grid, *kernel, LOG2E, peak, HEADS=heads, D=head, TOKEN_Q=q.stride(2),
                TOKEN_K=k.stride(2), RH=size[0], RW=size[1], BT=WIDE.frames, BH=WIDE_TILE[0], BW=WIDE_TILE[1],
                BM=WIDE.queries, BN=WIDE.keys, TERMS=TERMS, num_warps=WIDE.warps, maxnreg=REGISTERS,
            )  # fmt: skip
            if not q.is_meta:
                return
    s = schedule or pick(here.sm)
    tile, size = s.tile(window.kernel)
    table, kinds, grid = hidden(height, width, kernel[1:], tile, size, s.keys, q.dtype, q.device)
    programs = heads * math.prod(grid) * -(-frames // s.frames)
    fits = height >= size[0] and width >= size[1]
    # Weights on the meta device have no bound, and frames there stand for all sizes: all forms are recorded.
    forms = itertools.product((False, True), repeat=2) if q.is_meta else ((fits, not bounded),)
    for inside, running in forms:
        launcher("neighbourhood.neighbourhood_kernel", here)[(programs,)](
            q, k, v, table, kinds, out, frames, height, width, window.first, window.clip, ring, k.shape[0], *grid,
            *kernel, LOG2E, 0.0 if running else peak, HEADS=heads, D=head, TOKEN_Q=q.stride(2), TOKEN_K=k.stride(2),
            RH=size[0], RW=size[1], WHOLE=whole(size[1]), BT=s.frames, BH=tile[0], BW=tile[1], BM=s.queries, BN=s.keys,
            TERMS=TERMS, num_warps=s.warps, INSIDE=inside, RUNNING=running, num_stages=s.stages,
            UPCAST=interpreted() and q.is_cpu and q.dtype == torch.bfloat16,
        )  # fmt: skip
