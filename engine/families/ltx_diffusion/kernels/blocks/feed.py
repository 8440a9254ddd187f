# ruff: noqa: ANN001, ANN201, ANN202
"""All products of a block after its attention as one kernel, for cards with wgmma, in Triton's lower-level language
(Gluon): what lies between the products never reaches memory.

Two groups of four warps have 64 rows each and multiply with the same weights, which one more warp copies into a ring of
buffers. Rows of x stay in shared memory, sums in registers. The groups take turns: one multiplies while the other goes
through SiLU.
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

#: Rows of a group; columns of the gate's results that one step makes.
ROWS: gl.constexpr = gl.constexpr(64)
STEP: gl.constexpr = gl.constexpr(64)
#: Columns of x in a buffer of the ring, beside 2 STEP rows of a weight or of both groups.
DEEP: gl.constexpr = gl.constexpr(128)
#: Bytes of a buffer.
BUFFER: gl.constexpr = gl.constexpr(32768)
SHARED: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _next(slot, phase, SLOTS: gl.constexpr):
    """Return the ring's next buffer, and how often it was filled before, modulo 2."""
    slot += 1
    ends = slot == SLOTS
    return gl.where(ends, 0, slot), gl.where(ends, phase ^ 1, phase)


@gluon.jit
def _fill(source, row, column, ring, full, empty, slot, phase, ROW: gl.constexpr, COLUMN: gl.constexpr,
          SLOTS: gl.constexpr):  # fmt: skip
    """Copy a part of a tensor into the ring's next buffer, once both groups have read what was in it."""
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), BUFFER)
    buffer = ring.index(slot)._reinterpret(ring.dtype, [ROW, COLUMN], SHARED)
    tma.async_copy_global_to_shared(source, [row, column], full.index(slot), buffer)
    return _next(slot, phase, SLOTS)


@gluon.jit
def _fill_rows(rows, weight, tile, ring, full, empty, slot, phase, C: gl.constexpr, SLOTS: gl.constexpr):
    """Copy both groups' rows of a tile and a weight [C, C]: columns that fill a buffer, then the weight's for them. All
    rows first would fill the ring for good: its next buffer comes free when the rows have been read."""
    for h in gl.static_range(0, C, DEEP):
        mbarrier.wait(empty.index(slot), phase ^ 1)
        mbarrier.expect(full.index(slot), BUFFER)
        both = ring.index(slot)._reinterpret(ring.dtype, [2, ROWS, DEEP], SHARED)
        for g in gl.static_range(2):
            row = 2 * ROWS * tile + ROWS * g
            tma.async_copy_global_to_shared(rows, [row, h], full.index(slot), both.index(g))
        slot, phase = _next(slot, phase, SLOTS)
        for c in gl.static_range(h, h + DEEP, STEP):
            slot, phase = _fill(weight, 0, c, ring, full, empty, slot, phase, C, STEP, SLOTS)
    return slot, phase


@gluon.jit
def _copies(mixed, proj, gates, down, context, weights, ring, full, empty, tiles, C: gl.constexpr, D: gl.constexpr,
            MIXED: gl.constexpr, MORE: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """Copy the weights, and the rows that they multiply besides x, in the order in which they are used."""
    slot, phase = 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        if MIXED:
            slot, phase = _fill_rows(mixed, proj, tile, ring, full, empty, slot, phase, C, SLOTS)
        for i in range(D // STEP):
            for c in gl.static_range(0, C, DEEP):
                slot, phase = _fill(gates, 2 * STEP * i, c, ring, full, empty, slot, phase, 2 * STEP, DEEP, SLOTS)
            slot, phase = _fill(down, 0, STEP * i, ring, full, empty, slot, phase, C, STEP, SLOTS)
        if MORE:
            slot, phase = _fill_rows(context, weights, tile, ring, full, empty, slot, phase, C, SLOTS)


@gluon.jit
def _issue_gates(own, ring, full, slot, phase, C: gl.constexpr, MADE: gl.constexpr, SLOTS: gl.constexpr):
    """Issue the products of a group's rows with a step's rows of the gates' weight."""
    made = gl.zeros([ROWS, 2 * STEP], gl.float32, layout=MADE)
    for c in gl.static_range(0, C, DEEP):
        mbarrier.wait(full.index(slot), phase)
        part = ring.index(slot)._reinterpret(ring.dtype, [2 * STEP, DEEP], SHARED)
        left = own.slice(c, DEEP, dim=1)
        made = warpgroup_mma(left, part.permute((1, 0)), made, use_acc=c > 0, is_async=True)
        slot, phase = _next(slot, phase, SLOTS)
    return made, slot, phase


@gluon.jit
def _gates_done(made, first, empty, C: gl.constexpr, SLOTS: gl.constexpr):
    """Wait for these products, and give back the buffers from `first` on."""
    made = warpgroup_mma_wait(0, deps=[made])
    barrier()
    for _ in gl.static_range(0, C, DEEP):
        mbarrier.arrive(empty.index(first))
        first, _ = _next(first, 0, SLOTS)
    return made


@gluon.jit
def _issue_added(left, acc, ring, slot):
    """Issue the product of `left` with a buffer, columns of a weight."""
    part = ring.index(slot)._reinterpret(ring.dtype, [acc.shape[1], STEP], SHARED)
    return warpgroup_mma(left, part.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _added(left, acc, ring, full, empty, slot, phase, SLOTS: gl.constexpr):
    """Add the product of `left` with the ring's next buffer."""
    mbarrier.wait(full.index(slot), phase)
    acc = warpgroup_mma_wait(0, deps=[_issue_added(left, acc, ring, slot)])
    barrier()
    mbarrier.arrive(empty.index(slot))
    slot, phase = _next(slot, phase, SLOTS)
    return acc, slot, phase


@gluon.jit
def _rows_added(acc, bias, ring, full, empty, slot, phase, C: gl.constexpr, GROUP: gl.constexpr, SLOTS: gl.constexpr):
    """Add the product of a group's rows with a weight, both from the ring, and a bias."""
    for _ in gl.static_range(0, C, DEEP):
        mbarrier.wait(full.index(slot), phase)
        first, left = slot, ring.index(slot)._reinterpret(ring.dtype, [2, ROWS, DEEP], SHARED).index(GROUP)
        slot, phase = _next(slot, phase, SLOTS)
        for c in gl.static_range(0, DEEP, STEP):
            acc, slot, phase = _added(left.slice(c, STEP, dim=1), acc, ring, full, empty, slot, phase, SLOTS)
        mbarrier.arrive(empty.index(first))
    acc += gl.load(bias + gl.arange(0, C, layout=gl.SliceLayout(0, acc.type.layout))).to(gl.float32)[None, :]
    return acc, slot, phase


@gluon.jit
def _silu(made, over, biases, i, BIASED: gl.constexpr, LEFT: gl.constexpr):
    """Return SiLU of a step's even columns times the odd ones, as the left operand of a product."""
    made = made * over[:, None]
    if BIASED:
        n = 2 * STEP * i + gl.arange(0, 2 * STEP, layout=gl.SliceLayout(0, made.type.layout))
        made += gl.load(biases + n).to(gl.float32)[None, :]
    g, u = made.reshape([ROWS, STEP, 2]).split()
    # A root and its square take fewer instructions than a quotient. SiLU is 0 at -inf, where its product is NaN.
    root = gl.rsqrt(1.0 + gl.exp2(g * -1.4426950408889634))
    found = (gl.where(g == float("-inf"), 0.0, g * root * root) * u).to(biases.dtype.element_ty)
    # Of each four columns a thread has one, but of an operand's it has two in turn: `turned_columns` of the weight.
    found = found.reshape([ROWS, STEP // 8, 2, 4]).permute([0, 1, 3, 2]).reshape([ROWS, STEP])
    return gl.convert_layout(found, LEFT)


@gluon.jit
def _stored(acc, own):
    """Add x to the sums, and store them as x."""
    acc += own.load(acc.type.layout).to(gl.float32)
    own.store(acc.to(own.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def _rows(x, proj_bias, biases, bias, own, ring, full, empty, came, turns, tiles, eps, C: gl.constexpr,
          D: gl.constexpr, BIASED: gl.constexpr, MIXED: gl.constexpr, MORE: gl.constexpr, GROUP: gl.constexpr,
          SLOTS: gl.constexpr):  # fmt: skip
    """Compute a group's rows of every tile. own: their buffer; they arrive at the barrier `came`."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    MADE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * STEP, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    slot, phase, times, turn = 0, 0, 0, 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = 2 * ROWS * tile + ROWS * GROUP
        mbarrier.expect(came, 2 * ROWS * C)
        tma.async_copy_global_to_shared(x, [row, 0], came, own)
        mbarrier.wait(came, times)
        times ^= 1
        if MIXED:
            acc = gl.zeros([ROWS, C], gl.float32, layout=ACC)
            acc, slot, phase = _rows_added(acc, proj_bias, ring, full, empty, slot, phase, C, GROUP, SLOTS)
            _stored(acc, own)
        wide = own.load(LEFT).to(gl.float32)
        over = gl.convert_layout(gl.rsqrt(gl.sum(wide * wide, 1) / C + eps), gl.SliceLayout(1, MADE))
        acc = gl.zeros([ROWS, C], gl.float32, layout=ACC)
        first = slot
        made, slot, phase = _issue_gates(own, ring, full, slot, phase, C, MADE, SLOTS)
        made = _gates_done(made, first, empty, C, SLOTS)
        for i in range(D // STEP - 1):
            found = _silu(made, over, biases, i, BIASED, LEFT)
            mbarrier.wait(full.index(slot), phase)
            mbarrier.wait(turns.index(GROUP), turn ^ (1 - GROUP))
            turn ^= 1
            acc = _issue_added(found, acc, ring, slot)
            last = slot
            slot, phase = _next(slot, phase, SLOTS)
            first = slot
            made, slot, phase = _issue_gates(own, ring, full, slot, phase, C, MADE, SLOTS)
            mbarrier.arrive(turns.index(1 - GROUP))
            acc = warpgroup_mma_wait(C // DEEP, deps=[acc])
            barrier()
            mbarrier.arrive(empty.index(last))
            made = _gates_done(made, first, empty, C, SLOTS)
        found = _silu(made, over, biases, D // STEP - 1, BIASED, LEFT)
        acc, slot, phase = _added(found, acc, ring, full, empty, slot, phase, SLOTS)
        if MORE:
            acc, slot, phase = _rows_added(acc, bias, ring, full, empty, slot, phase, C, GROUP, SLOTS)
        _stored(acc, own)
        tma.async_copy_shared_to_global(x, [row, 0], own)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles"])
def feed_kernel(x, mixed, proj, proj_bias, gates, biases, down, context, weights, bias, tiles, eps, C: gl.constexpr,
                D: gl.constexpr, BIASED: gl.constexpr, MIXED: gl.constexpr, MORE: gl.constexpr,
                SLOTS: gl.constexpr):  # fmt: skip
    """x [R, C] += mixed [R, C] times proj [C, C], plus proj_bias; then x += the gated product of x as `gated_kernel`
    makes it, times down [C, D], plus context [R, C] times weights [C, C], plus bias. Tensors of two dimensions are
    descriptors; tiles: of 2 ROWS rows, which programs take in turn."""
    own = gl.allocate_shared_memory(x.dtype, [2, ROWS, C], SHARED)
    ring = gl.allocate_shared_memory(x.dtype, [SLOTS, C, STEP], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    came = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 2)
    for i in gl.static_range(2):
        mbarrier.init(came.index(i), 1)
        mbarrier.init(turns.index(i), 1)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (_rows, (x, proj_bias, biases, bias, own.index(0), ring, full, empty, came.index(0), turns, tiles, eps, C, D,
                 BIASED, MIXED, MORE, 0, SLOTS)),
        (_rows, (x, proj_bias, biases, bias, own.index(1), ring, full, empty, came.index(1), turns, tiles, eps, C, D,
                 BIASED, MIXED, MORE, 1, SLOTS)),
        (_copies, (mixed, proj, gates, down, context, weights, ring, full, empty, tiles, C, D, MIXED, MORE, SLOTS)),
    ], [4, 1], [240, 24])  # fmt: skip
