# ruff: noqa: ANN001, ANN201, ANN202
"""The kernel of `kernels.py` with bounded logits for cards with wgmma, in Triton's lower-level language (Gluon).

Triton makes a step's logits, then their softmax, then the products with values. Here the next step's logits are made
while these go through the softmax, so that the matrix units do not wait for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..versions import barrier

#: Steps whose keys are in shared memory, and steps whose values are.
STAGES = gl.constexpr(3)


@gluon.jit
def _tokens(step, last, place, RW: gl.constexpr, BLOCKS: gl.constexpr, BN: gl.constexpr):
    """Return the tokens of a step's keys in the ring. place: the first slot, slots, frames of the region, height,
    width, the region's first row and column, the keys' numbers in a step, and the tokens of the last step."""
    slot0, slots, frames, height, width, top, left, n, others = place
    slot = slot0 + gl.minimum(step // BLOCKS, frames - 1)
    slot = gl.where(slot >= slots, slot - slots, slot)
    i = step % BLOCKS * BN + n
    row = i * ((65536 + RW - 1) // RW) >> 16
    return gl.where(step == last, others, (slot * height + top) * width + left + i + row * (width - RW))


@gluon.jit
def _keys(operands, buffers, step, last, place, TOKEN_K: gl.constexpr, RW: gl.constexpr, BLOCKS: gl.constexpr,
          BN: gl.constexpr, TERMS: gl.constexpr):  # fmt: skip
    """Start to copy the keys of a step and which of them are hidden, if there is one."""
    k, _, hidden, channels, theirs = operands
    into, real = step % STAGES, step <= last
    at = _tokens(step, last, place, RW, BLOCKS, BN).to(gl.int64)[:, None] * TOKEN_K + channels
    async_copy.async_copy_global_to_shared(buffers[0].index(into), k + at, real)
    at = hidden + gl.where(step == last, BLOCKS, step % BLOCKS) * (BN * TERMS)
    async_copy.async_copy_global_to_shared(buffers[2].index(into), at + theirs, real)


@gluon.jit
def _issue(operands, buffers, step, last, place, TOKEN_K: gl.constexpr, RW: gl.constexpr, BLOCKS: gl.constexpr,
           BN: gl.constexpr, TERMS: gl.constexpr):  # fmt: skip
    """Start to copy the values of a step and the keys of the next one: what is needed at one time is one group."""
    _, v, _, channels, _ = operands
    at = _tokens(step, last, place, RW, BLOCKS, BN).to(gl.int64)[:, None] * TOKEN_K + channels
    async_copy.async_copy_global_to_shared(buffers[1].index(step % STAGES), v + at, step <= last)
    _keys(operands, buffers, step + 1, last, place, TOKEN_K, RW, BLOCKS, BN, TERMS)
    async_copy.commit_group()


@gluon.jit
def _logits(query, ours, buffers, step, LOGITS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Begin the products of a step's keys once they have arrived, with the values of the step before, and no warp reads
    what the copies after it overwrite."""
    async_copy.wait_group(1)
    barrier()
    fence_async_shared()
    one = step % STAGES
    zero = gl.zeros([BM, BN], gl.float32, layout=LOGITS)
    found = warpgroup_mma(ours, buffers[2].index(one).permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(query, buffers[0].index(one).permute((1, 0)), found, is_async=True)


@gluon.jit
def _mixed(scores, acc, total, buffers, step, subtrahend, scale, WEIGHTS: gl.constexpr):
    """Begin to add a step's values. subtrahend: the peak, or infinity where a query does not attend to a key."""
    weight = gl.exp2(scores * scale - subtrahend)
    # A thread adds up what it has of a row: threads' sums meet at the end.
    total += gl.sum(gl.sum(weight.reshape([weight.shape[0], weight.shape[1] // 8, 4, 2]), 3), 1)
    value = buffers[1].index(step % STAGES)
    return warpgroup_mma(gl.convert_layout(weight.to(value.dtype), WEIGHTS), value, acc, is_async=True), total


@gluon.jit
def _peaks(step, start, begin, KT, peak, BLOCKS: gl.constexpr):
    """Return what is subtracted from the logits of a frame's keys, for each query."""
    frame = start + step // BLOCKS
    seen = (frame >= begin) & (frame < begin + KT)
    return gl.where(seen, peak, float("inf"))[:, None]


@gluon.jit(do_not_specialize=["frames", "height", "width", "first", "clip", "ring", "slots", "origin", "down", "across",
                              "KT", "KH", "KW"])
def wide_neighbourhood_kernel(q, k, v, hidden, kinds, out, frames, height, width, first, clip, ring, slots, origin,
                              down, across, KT, KH, KW, scale, peak, HEADS: gl.constexpr, D: gl.constexpr,
                              TOKEN_Q: gl.constexpr, TOKEN_K: gl.constexpr, RH: gl.constexpr, RW: gl.constexpr,
                              BT: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr, BM: gl.constexpr,
                              BN: gl.constexpr, TERMS: gl.constexpr):  # fmt: skip
    """Compute what `neighbourhood_kernel` does, where no region reaches beyond the frame.

    A frame's keys are whole steps and REST more. Those of all frames are in one step behind the others, each frame's at
    a place that its number in the whole clip gives it: so no bit depends on the frames of a program."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = RH * RW // BN
    REST: gl.constexpr = RH * RW - BLOCKS * BN
    SPAN: gl.constexpr = BN // REST
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    COPY_HIDDEN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // TERMS, TERMS // 8], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.NVMMASharedLayout(min(2 * D, 128), 16, 2)
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    TYPE: gl.constexpr = q.dtype.element_ty
    head, tile = gl.program_id(0) % HEADS, gl.program_id(0) // HEADS
    spot = tile % (down * across)
    t0, y0, x0 = tile // (down * across) * BT, spot // across * BH, spot % across * BW

    m = gl.arange(0, BM, layout=gl.SliceLayout(1, COPY))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))[None, :]
    t, y, x = t0 + m // (BH * BW), y0 + m // BW % BH, x0 + m % BW
    real = (m < BT * BH * BW) & (t < frames) & (y < height) & (x < width)
    row = ((t * height + y).to(gl.int64) * width + x)[:, None]
    query = gl.allocate_shared_memory(TYPE, [BM, D], ROWS)
    async_copy.async_copy_global_to_shared(query, q + row * TOKEN_Q + head * D + d, real[:, None])

    m = gl.arange(0, BM, layout=gl.SliceLayout(1, LOGITS))
    e = gl.arange(0, TERMS, layout=gl.SliceLayout(0, LOGITS))[None, :]
    ours = (e == (m // BW % BH)[:, None]) | (e == (BH + m % BW)[:, None])
    ours = gl.convert_layout(ours.to(gl.float32).to(TYPE), gl.DotOperandLayout(0, LOGITS, 2))
    begin = gl.maximum(gl.minimum(first + t0 + m // (BH * BW) - KT // 2, clip - KT), 0)
    start = gl.maximum(gl.minimum(first + t0 - KT // 2, clip - KT), 0)
    stop = gl.maximum(gl.minimum(first + gl.minimum(t0 + BT, frames) - 1 - KT // 2, clip - KT), 0) + KT
    last = ((stop - start) * BLOCKS + 1) // 2 * 2  # an odd number has one more, of hidden keys

    n = gl.arange(0, BN, layout=gl.SliceLayout(1, COPY))
    top = gl.maximum(gl.minimum(y0 - KH // 2, height - RH), 0)
    left = gl.maximum(gl.minimum(x0 - KW // 2, width - RW), 0)
    # Frames after the region have hidden keys: any of the region are there.
    ahead = (n // REST + SPAN - (start + origin) % SPAN) % SPAN
    slot = (start + gl.where(ahead < stop - start, ahead, 0) + ring) % slots
    i = BLOCKS * BN + n % REST
    others = (slot * height + top + i // RW) * width + left + i % RW
    place = ((start + ring) % slots, slots, stop - start, height, width, top, left, n, others)
    n = gl.arange(0, BN, layout=gl.SliceLayout(1, COPY_HIDDEN))
    theirs = n[:, None] * TERMS + gl.arange(0, TERMS, layout=gl.SliceLayout(0, COPY_HIDDEN))[None, :]
    hidden += gl.load(kinds + spot).to(gl.int64) * ((BLOCKS + 1) * BN * TERMS)
    operands = (k, v, hidden, head * D + d, theirs)
    buffers = (
        gl.allocate_shared_memory(TYPE, [STAGES, BN, D], ROWS),
        gl.allocate_shared_memory(TYPE, [STAGES, BN, D], ROWS),
        gl.allocate_shared_memory(TYPE, [STAGES, BN, TERMS], gl.NVMMASharedLayout(2 * TERMS, 16, 2)),
    )
    _keys(operands, buffers, 0, last, place, TOKEN_K, RW, BLOCKS, BN, TERMS)
    async_copy.commit_group()
    _issue(operands, buffers, 0, last, place, TOKEN_K, RW, BLOCKS, BN, TERMS)
    _issue(operands, buffers, 1, last, place, TOKEN_K, RW, BLOCKS, BN, TERMS)
    even = _logits(query, ours, buffers, 0, LOGITS, BM, BN)
    acc = gl.zeros([BM, D], gl.float32, layout=VALUES)
    total = gl.sum(gl.sum(gl.zeros([BM, BN], gl.float32, layout=LOGITS).reshape([BM, BN // 8, 4, 2]), 3), 1)
    scores = warpgroup_mma_wait(0, deps=[even])
    for i in range(0, last, 2):
        odd = _logits(query, ours, buffers, i + 1, LOGITS, BM, BN)
        _issue(operands, buffers, i + 2, last, place, TOKEN_K, RW, BLOCKS, BN, TERMS)
        peaks = _peaks(i, start, begin, KT, peak, BLOCKS)
        mixed, total = _mixed(scores, acc, total, buffers, i, peaks, scale, WEIGHTS)
        scores, acc = warpgroup_mma_wait(0, deps=[odd, mixed])
        even = _logits(query, ours, buffers, i + 2, LOGITS, BM, BN)
        _issue(operands, buffers, i + 3, last, place, TOKEN_K, RW, BLOCKS, BN, TERMS)
        peaks = _peaks(i + 1, start, begin, KT, peak, BLOCKS)
        mixed, total = _mixed(scores, acc, total, buffers, i + 1, peaks, scale, WEIGHTS)
        scores, acc = warpgroup_mma_wait(0, deps=[even, mixed])
    async_copy.wait_group(0)
    barrier()
    fence_async_shared()
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, LOGITS))
    frame = (start + (n // REST + SPAN - (start + origin) % SPAN) % SPAN)[None, :]
    seen = (frame >= begin[:, None]) & (frame < (begin + KT)[:, None])
    mixed, total = _mixed(scores, acc, total, buffers, last, gl.where(seen, peak, float("inf")), scale, WEIGHTS)
    acc = warpgroup_mma_wait(0, deps=[mixed])
    acc = acc / gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, VALUES))[:, None]
    found = gl.convert_layout(acc.to(TYPE), COPY)
    gl.store(out + row * (HEADS * D) + head * D + d, found, mask=real[:, None])
