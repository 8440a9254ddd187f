# ruff: noqa: ANN001, ANN201, ANN202
"""Products of `kernels.py` for cards with wgmma, in Triton's lower-level language (Gluon).

What follows a product, SiLU or the norm and rotation of a head, takes as long as the product itself. Here a program's
rows are in registers and one bulk copy brings a step's weights, so three programs share a processor: one multiplies
while the others finish their results. Of two buffers, one is filled while the other is read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..versions import barrier


@gluon.jit
def _buffers(TYPE: gl.constexpr, BN: gl.constexpr, C: gl.constexpr):
    """Return room for the weights of two steps, and the barrier that each of them arrives at."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    one, two = gl.allocate_shared_memory(TYPE, [BN, C], SHARED), gl.allocate_shared_memory(TYPE, [BN, C], SHARED)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), 1)
    mbarrier.init(bars.index(1), 1)
    fence_async_shared()
    barrier()
    return one, two, bars.index(0), bars.index(1)


@gluon.jit
def _at(step, FIRST: gl.constexpr, STEPS: gl.constexpr):
    """Return the part of the weight that a step takes. Programs that run at once take different ones."""
    return FIRST + (gl.program_id(0) + step) % STEPS


@gluon.jit
def _issue(weight, step, buffer, bar, FIRST: gl.constexpr, STEPS: gl.constexpr, BN: gl.constexpr, C: gl.constexpr):
    """Start to copy the weights of a step, if there is one."""
    real = step < STEPS
    mbarrier.expect(bar, 2 * BN * C, real)
    tma.async_copy_global_to_shared(weight, [_at(step, FIRST, STEPS) * BN, 0], bar, buffer, real)


@gluon.jit
def _product(tile, weight, step, buffer, bar, other, next_bar, FIRST: gl.constexpr, STEPS: gl.constexpr,
             BM: gl.constexpr, BN: gl.constexpr, C: gl.constexpr, ACC: gl.constexpr):  # fmt: skip
    """Return the products of a step whose weights come to `buffer`, and start to copy those of the next to `other`."""
    mbarrier.wait(bar, step // 2 & 1)
    barrier()  # no warp reads the other buffer any more
    _issue(weight, step + 1, other, next_bar, FIRST, STEPS, BN, C)
    zero = gl.zeros([BM, BN], gl.float32, layout=ACC)
    made = warpgroup_mma(tile, buffer.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[made])


@gluon.jit
def _over(tile, eps, C: gl.constexpr, ACC: gl.constexpr):
    """Return one over the root mean squares of rows."""
    wide = tile.to(gl.float32)
    return gl.convert_layout(gl.rsqrt(gl.sum(wide * wide, 1) / C + eps), gl.SliceLayout(1, ACC))


@gluon.jit
def _gated(made, over, biases, out, real, step, BIASED: gl.constexpr, STEPS: gl.constexpr, BM: gl.constexpr,
           BN: gl.constexpr, ACC: gl.constexpr, STORE: gl.constexpr):  # fmt: skip
    """Store SiLU of a step's even columns times its odd ones."""
    n = _at(step, 0, STEPS) * BN
    made = made * over[:, None]
    if BIASED:
        made += gl.load(biases + n + gl.arange(0, BN, layout=gl.SliceLayout(0, ACC))).to(gl.float32)[None, :]
    g, u = made.reshape([BM, BN // 2, 2]).split()
    # A root and its square take fewer instructions than a quotient. SiLU is 0 at -inf, where its product is NaN.
    root = gl.rsqrt(1.0 + gl.exp2(g * -1.4426950408889634))
    silu = gl.where(g == float("-inf"), 0.0, g * root * root)
    found = gl.convert_layout((silu * u).to(out.dtype.element_ty), STORE)
    gl.store(out + n // 2, found, mask=real)


@gluon.jit(do_not_specialize=["rows"])
def wide_gated_kernel(x, weight, biases, out, rows, eps, C: gl.constexpr, D: gl.constexpr, BIASED: gl.constexpr,
                      BM: gl.constexpr, BN: gl.constexpr):  # fmt: skip
    """Compute what `gated_kernel` does. weight: a descriptor of BN rows at once, of which there is an even number."""
    WARPS: gl.constexpr = gl.num_warps()
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [512 // BN, BN // 16], [WARPS, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    STEPS: gl.constexpr = 2 * D // BN
    m0 = gl.program_id(0) * BM
    one, two, bar_one, bar_two = _buffers(x.dtype.element_ty, BN, C)
    _issue(weight, 0, one, bar_one, 0, STEPS, BN, C)
    m, c = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, LEFT)), gl.arange(0, C, layout=gl.SliceLayout(0, LEFT))
    tile = gl.load(x + m.to(gl.int64)[:, None] * C + c[None, :], mask=(m < rows)[:, None], other=0.0)
    over = _over(tile, eps, C, ACC)
    m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, STORE))
    real, n = (m < rows)[:, None], gl.arange(0, BN // 2, layout=gl.SliceLayout(0, STORE))
    where = out + m.to(gl.int64)[:, None] * D + n[None, :]
    for i in range(0, STEPS, 2):
        made = _product(tile, weight, i, one, bar_one, two, bar_two, 0, STEPS, BM, BN, C, ACC)
        _gated(made, over, biases, where, real, i, BIASED, STEPS, BM, BN, ACC, STORE)
        made = _product(tile, weight, i + 1, two, bar_two, one, bar_one, 0, STEPS, BM, BN, C, ACC)
        _gated(made, over, biases, where, real, i + 1, BIASED, STEPS, BM, BN, ACC, STORE)


@gluon.jit
def _head(made, over, bias, norms, turns, out, real, part, eps, HEADS: gl.constexpr, HALF: gl.constexpr,
          FIRST: gl.constexpr, BM: gl.constexpr, ACC: gl.constexpr, STORE: gl.constexpr):  # fmt: skip
    """Store a head's queries, keys or values. turns: cosines and sines in turn."""
    column = gl.arange(0, 2 * HALF, layout=gl.SliceLayout(0, ACC))
    made = made * over[:, None] + gl.load(bias + part * (2 * HALF) + column).to(gl.float32)[None, :]
    if part < 2 * HEADS:
        scale = gl.rsqrt(gl.sum(made * made, 1) / (2 * HALF) + eps)
        made = made * scale[:, None] * gl.load(norms + part // HEADS * (2 * HALF) + column)[None, :]
        a, b = made.reshape([BM, HALF, 2]).split()
        cos, sin = turns.reshape([BM, HALF, 2]).split()
        made = gl.convert_layout(gl.join(a * cos - b * sin, a * sin + b * cos).reshape([BM, 2 * HALF]), ACC)
    found = gl.convert_layout(made.to(out.dtype.element_ty), STORE)
    gl.store(out + (part - FIRST) * (2 * HALF), found, mask=real)


@gluon.jit
def _ring(TYPE: gl.constexpr, BN: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr):
    """Return room for the weights of some steps, and the barriers that they arrive at."""
    BITS: gl.constexpr = TYPE.primitive_bitwidth
    SHARED: gl.constexpr = gl.NVMMASharedLayout(min(C * BITS // 8, 128), BITS, 2)
    buffers = gl.allocate_shared_memory(TYPE, [STAGES, BN, C], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
    fence_async_shared()
    barrier()
    return buffers, full


@gluon.jit
def _coded(values, TYPE: gl.constexpr, LIMIT: gl.constexpr):
    """Return rows of fp32 values as codes, and the rows' scales, as `_coded` of kernels.py does."""
    largest = gl.max(gl.where(values == values, gl.abs(values), float("inf")), 1)
    scale = gl.where(largest < float("inf"), gl.maximum(largest / LIMIT, 1e-12), float("nan"))
    values = gl.minimum(gl.maximum(values * (1.0 / scale)[:, None], -LIMIT), LIMIT)
    if LIMIT == 127:
        values = gl.floor(values + 0.5)
    return values.to(TYPE), scale


@gluon.jit
def _rows(x, m0, rows, eps, TYPE: gl.constexpr, C: gl.constexpr, BM: gl.constexpr, ACC: gl.constexpr,
          LIMIT: gl.constexpr):  # fmt: skip
    """Return BM rows of x [R, C] as the left operand of products, and what is multiplied with their results: one over
    the rows' root mean squares, and the scales of codes."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 4 if LIMIT else 2)
    m, c = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, LEFT)), gl.arange(0, C, layout=gl.SliceLayout(0, LEFT))
    tile = gl.load(x + m.to(gl.int64)[:, None] * C + c[None, :], mask=(m < rows)[:, None], other=0.0)
    wide = tile.to(gl.float32)
    over = gl.rsqrt(gl.sum(wide * wide, 1) / C + eps)
    if LIMIT:
        tile, scale = _coded(wide, TYPE, LIMIT)
        over *= scale
    return tile, gl.convert_layout(over, gl.SliceLayout(1, ACC))


@gluon.jit
def _result(tile, buffer, BM: gl.constexpr, BN: gl.constexpr, ACC: gl.constexpr, LIMIT: gl.constexpr):
    """Return the product of rows with a step's weights, in fp32."""
    zero = gl.zeros([BM, BN], gl.int32 if LIMIT == 127 else gl.float32, layout=ACC)
    made = warpgroup_mma(tile, buffer.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[made]).to(gl.float32)


@gluon.jit
def _bring(weight, step, turn, buffers, full, C: gl.constexpr, BN: gl.constexpr, FIRST: gl.constexpr,
           STEPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Start to copy the weights of a step, if there is one."""
    real = step < STEPS
    mbarrier.expect(full.index(step % STAGES), BN * C * (weight.dtype.primitive_bitwidth // 8), real)
    at = (FIRST + (turn + step) % STEPS) * BN
    tma.async_copy_global_to_shared(weight, [at, 0], full.index(step % STAGES), buffers.index(step % STAGES), real)


@gluon.jit(do_not_specialize=["rows", "first", "height", "width"])
def wide_projected_kernel(x, weight, columns, bias, norms, table, out, rows, first, height, width, eps,
                          C: gl.constexpr, HEADS: gl.constexpr, HALF: gl.constexpr, OF_FRAME: gl.constexpr,
                          OF_ROW: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr, BM: gl.constexpr,
                          STAGES: gl.constexpr, LIMIT: gl.constexpr):  # fmt: skip
    """Compute what `projected_kernel` does, of queries or of keys and values, with 8-bit codes too. weight: a
    descriptor of a head's rows."""
    WARPS: gl.constexpr = gl.num_warps()
    BN: gl.constexpr = 2 * HALF
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BN, BN // 8], [WARPS, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 32 if LIMIT else 16])
    STEPS: gl.constexpr = LAST - FIRST
    buffers, full = _ring(weight.dtype, BN, C, STAGES)
    turn = gl.program_id(0) % STEPS  # programs that run at once read different parts of the weight
    for i in gl.static_range(STAGES):
        _bring(weight, i, turn, buffers, full, C, BN, FIRST, STEPS, STAGES)
    m0 = gl.program_id(0) * BM
    tile, over = _rows(x, m0, rows, eps, weight.dtype, C, BM, ACC, LIMIT)
    m, n = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, STORE)), gl.arange(0, BN, layout=gl.SliceLayout(0, STORE))
    real, n = (m < rows)[:, None], n[None, :]
    frame, token = first + m // (height * width), m % (height * width)
    place = gl.where(n < 2 * (OF_FRAME + OF_ROW), (token // width)[:, None], (token % width)[:, None])
    place = gl.where(n < 2 * OF_FRAME, frame[:, None], place)
    turns = gl.convert_layout(gl.load(table + place * BN + n, mask=real, other=0.0), ACC)
    where = out + m.to(gl.int64)[:, None] * (STEPS * BN) + n
    column = gl.arange(0, BN, layout=gl.SliceLayout(0, ACC))
    for i in range(STEPS):
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        made = _result(tile, buffers.index(i % STAGES), BM, BN, ACC, LIMIT)
        barrier()  # no warp reads the buffer any more
        _bring(weight, i + STAGES, turn, buffers, full, C, BN, FIRST, STEPS, STAGES)
        part = FIRST + (turn + i) % STEPS
        if LIMIT:
            made *= gl.load(columns + part * BN + column)[None, :]
        _head(made, over, bias, norms, turns, where, real, part, eps, HEADS, HALF, FIRST, BM, ACC, STORE)
