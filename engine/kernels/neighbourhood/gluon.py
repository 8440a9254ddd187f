# ruff: noqa: ANN001, ANN201, ANN202
"""The kernel of `triton.py` with bounded logits for cards with wgmma, in Triton's lower-level language (Gluon).

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
def _at(step, place, TOKEN_K: gl.constexpr, WHOLE: gl.constexpr, BLOCKS: gl.constexpr, BN: gl.constexpr):
    """Return where a step's first key is. place: the first slot, slots, height, width, and the region's first row and
    column."""
    slot0, slots, height, width, top, left = place
    slot = slot0 + step // BLOCKS
    slot = gl.where(slot >= slots, slot - slots, slot).to(gl.int64)
    return ((slot * height + top + step % BLOCKS * (BN // WHOLE)) * width + left) * TOKEN_K


@gluon.jit
def _where(offsets, step, BLOCKS: gl.constexpr):
    """Return offsets of a step's keys from its first one."""
    others, last, channels = offsets
    return gl.where(step % BLOCKS == BLOCKS - 1, last, others)[:, None] + channels


@gluon.jit
def _keys(operands, buffers, step, steps, place, TOKEN_K: gl.constexpr, WHOLE: gl.constexpr, BLOCKS: gl.constexpr,
          BN: gl.constexpr, TERMS: gl.constexpr):  # fmt: skip
    """Start to copy the keys of a step and which of them are hidden, if there is one."""
    k, _, hidden, offsets, theirs = operands
    into, real = step % STAGES, step < steps
    at = k + _at(step, place, TOKEN_K, WHOLE, BLOCKS, BN)
    async_copy.async_copy_global_to_shared(buffers[0].index(into), at + _where(offsets, step, BLOCKS), real)
    at = hidden + step % BLOCKS * (BN * TERMS)
    async_copy.async_copy_global_to_shared(buffers[2].index(into), at + theirs, real)


@gluon.jit
def _issue(operands, buffers, step, steps, place, TOKEN_K: gl.constexpr, WHOLE: gl.constexpr, BLOCKS: gl.constexpr,
           BN: gl.constexpr, TERMS: gl.constexpr):  # fmt: skip
    """Start to copy the values of a step and the keys of the next one: what is needed at one time is one group."""
    _, v, _, offsets, _ = operands
    at = v + _at(step, place, TOKEN_K, WHOLE, BLOCKS, BN) + _where(offsets, step, BLOCKS)
    async_copy.async_copy_global_to_shared(buffers[1].index(step % STAGES), at, step < steps)
    _keys(operands, buffers, step + 1, steps, place, TOKEN_K, WHOLE, BLOCKS, BN, TERMS)
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
def _mixed(scores, acc, total, buffers, step, start, begin, KT, scale, peak, BLOCKS: gl.constexpr,
           WEIGHTS: gl.constexpr):  # fmt: skip
    """Add a step's values, and begin no other work before they are added."""
    frame = start + step // BLOCKS
    seen = (frame >= begin) & (frame < begin + KT)
    weight = gl.exp2(scores * scale - gl.where(seen, peak, float("inf"))[:, None])
    total += gl.sum(weight, 1)
    value = buffers[1].index(step % STAGES)
    return warpgroup_mma(gl.convert_layout(weight.to(value.dtype), WEIGHTS), value, acc, is_async=True), total


@gluon.jit(do_not_specialize=["frames", "height", "width", "first", "clip", "ring", "slots", "down", "across",
                              "KT", "KH", "KW"])
def wide_neighbourhood_kernel(q, k, v, hidden, kinds, out, frames, height, width, first, clip, ring, slots, down,
                              across, KT, KH, KW, scale, peak, HEADS: gl.constexpr, D: gl.constexpr,
                              TOKEN_Q: gl.constexpr, TOKEN_K: gl.constexpr, RH: gl.constexpr, RW: gl.constexpr,
                              BT: gl.constexpr, BH: gl.constexpr, BW: gl.constexpr, BM: gl.constexpr,
                              BN: gl.constexpr, TERMS: gl.constexpr, WHOLE: gl.constexpr):  # fmt: skip
    """Compute what `neighbourhood_kernel` does, where no region reaches beyond the frame and has an even number of
    steps."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = (RH * RW + BN - 1) // BN
    REST: gl.constexpr = RW - WHOLE if RW > WHOLE else 1
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    COPY_HIDDEN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // TERMS, TERMS // 8], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.NVMMASharedLayout(min(2 * D, 128), 16, 2)
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
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
    steps = (stop - start) * BLOCKS

    n = gl.arange(0, BN, layout=gl.SliceLayout(1, COPY))
    # The last step of a frame has its keys elsewhere: see `_place` in triton.py.
    i = (BLOCKS - 1) * BN + n
    after = gl.maximum(i - RH * WHOLE, 0)
    row_n = gl.minimum(gl.where(i < RH * WHOLE, i // WHOLE, after // REST), RH - 1) - (BLOCKS - 1) * (BN // WHOLE)
    column_n = gl.minimum(gl.where(i < RH * WHOLE, i % WHOLE, WHOLE + after % REST), RW - 1)
    others, last = (n // WHOLE * width + n % WHOLE) * TOKEN_K, (row_n * width + column_n) * TOKEN_K
    offsets = (others, last, head * D + d)
    n = gl.arange(0, BN, layout=gl.SliceLayout(1, COPY_HIDDEN))
    theirs = n[:, None] * TERMS + gl.arange(0, TERMS, layout=gl.SliceLayout(0, COPY_HIDDEN))[None, :]
    hidden += gl.load(kinds + spot).to(gl.int64) * (BLOCKS * BN * TERMS)
    top = gl.maximum(gl.minimum(y0 - KH // 2, height - RH), 0)
    left = gl.maximum(gl.minimum(x0 - KW // 2, width - RW), 0)
    place = ((start + ring) % slots, slots, height, width, top, left)
    operands = (k, v, hidden, offsets, theirs)
    buffers = (
        gl.allocate_shared_memory(TYPE, [STAGES, BN, D], ROWS),
        gl.allocate_shared_memory(TYPE, [STAGES, BN, D], ROWS),
        gl.allocate_shared_memory(TYPE, [STAGES, BN, TERMS], gl.NVMMASharedLayout(2 * TERMS, 16, 2)),
    )
    _keys(operands, buffers, 0, steps, place, TOKEN_K, WHOLE, BLOCKS, BN, TERMS)
    async_copy.commit_group()
    _issue(operands, buffers, 0, steps, place, TOKEN_K, WHOLE, BLOCKS, BN, TERMS)
    _issue(operands, buffers, 1, steps, place, TOKEN_K, WHOLE, BLOCKS, BN, TERMS)
    even = _logits(query, ours, buffers, 0, LOGITS, BM, BN)
    acc = gl.zeros([BM, D], gl.float32, layout=VALUES)
    total = gl.zeros([BM], gl.float32, layout=gl.SliceLayout(1, LOGITS))
    scores = warpgroup_mma_wait(0, deps=[even])
    for i in range(0, steps, 2):
        odd = _logits(query, ours, buffers, i + 1, LOGITS, BM, BN)
        _issue(operands, buffers, i + 2, steps, place, TOKEN_K, WHOLE, BLOCKS, BN, TERMS)
        mixed, total = _mixed(scores, acc, total, buffers, i, start, begin, KT, scale, peak, BLOCKS,
                              gl.DotOperandLayout(0, VALUES, 2))  # fmt: skip
        scores, acc = warpgroup_mma_wait(0, deps=[odd, mixed])
        even = _logits(query, ours, buffers, i + 2, LOGITS, BM, BN)  # the last one is not used
        _issue(operands, buffers, i + 3, steps, place, TOKEN_K, WHOLE, BLOCKS, BN, TERMS)
        mixed, total = _mixed(scores, acc, total, buffers, i + 1, start, begin, KT, scale, peak, BLOCKS,
                              gl.DotOperandLayout(0, VALUES, 2))  # fmt: skip
        scores, acc = warpgroup_mma_wait(0, deps=[even, mixed])
    async_copy.wait_group(0)
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, VALUES))[:, None]
    found = gl.convert_layout(acc.to(TYPE), COPY)
    gl.store(out + row * (HEADS * D) + head * D + d, found, mask=real[:, None])
