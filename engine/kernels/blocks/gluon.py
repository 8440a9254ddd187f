# ruff: noqa: ANN001, ANN201, ANN202
"""The gated product of `triton.py` for cards with wgmma, in Triton's lower-level language (Gluon).

SiLU takes as many instructions as the products take time of the matrix units. Here a program's rows are in registers,
and so few of these are needed that two programs share a processor: one multiplies while the other goes through SiLU.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..versions import barrier


@gluon.jit
def _issue(weight, offsets, step, buffers, STEPS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    """Start to copy the rows of one step. Programs that run at once read different ones."""
    n = (gl.program_id(0) + step) % STEPS
    async_copy.async_copy_global_to_shared(buffers.index(step % STAGES), weight + n * STEP + offsets)
    async_copy.commit_group()


@gluon.jit
def _begin(tile, buffers, step, ACC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Begin the products with a step's rows once they have arrived, and no warp reads those of the step before."""
    async_copy.wait_group(STAGES - 2)
    barrier()
    fence_async_shared()
    zero = gl.zeros([BM, BN], gl.float32, layout=ACC)
    right = buffers.index(step % STAGES).permute((1, 0))
    return warpgroup_mma(tile, right, zero, use_acc=False, is_async=True)


@gluon.jit
def _finish(made, over, biases, out, real, step, D: gl.constexpr, BIASED: gl.constexpr, STEPS: gl.constexpr,
            BM: gl.constexpr, BN: gl.constexpr, ACC: gl.constexpr, STORE: gl.constexpr):  # fmt: skip
    """Store SiLU of a step's even columns times its odd ones."""
    n = (gl.program_id(0) + step) % STEPS * BN
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
                      BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Compute what `gated_kernel` does."""
    WARPS: gl.constexpr = gl.num_warps()
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [WARPS, 1], [1, 0])
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [512 // BN, BN // 16], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    STEPS: gl.constexpr = 2 * D // BN
    STEP: gl.constexpr = BN * C
    TYPE: gl.constexpr = x.dtype.element_ty
    m0 = gl.program_id(0) * BM
    buffers = gl.allocate_shared_memory(TYPE, [STAGES, BN, C], SHARED)
    c = gl.arange(0, C, layout=gl.SliceLayout(0, COPY))
    offsets = gl.arange(0, BN, layout=gl.SliceLayout(1, COPY))[:, None] * C + c[None, :]
    for step in gl.static_range(STAGES - 1):
        _issue(weight, offsets, step, buffers, STEPS, STEP, STAGES)
    m, c = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, LEFT)), gl.arange(0, C, layout=gl.SliceLayout(0, LEFT))
    tile = gl.load(x + m.to(gl.int64)[:, None] * C + c[None, :], mask=(m < rows)[:, None], other=0.0)
    wide = tile.to(gl.float32)
    over = gl.convert_layout(gl.rsqrt(gl.sum(wide * wide, 1) / C + eps), gl.SliceLayout(1, ACC))
    m = m0 + gl.arange(0, BM, layout=gl.SliceLayout(1, STORE))
    real, n = (m < rows)[:, None], gl.arange(0, BN // 2, layout=gl.SliceLayout(0, STORE))
    where = out + m.to(gl.int64)[:, None] * D + n[None, :]
    for step in range(STEPS):
        made = _begin(tile, buffers, step, ACC, BM, BN, STAGES)
        _issue(weight, offsets, step + STAGES - 1, buffers, STEPS, STEP, STAGES)
        made = warpgroup_mma_wait(0, deps=[made])
        _finish(made, over, biases, where, real, step, D, BIASED, STEPS, BM, BN, ACC, STORE)
    async_copy.wait_group(0)
