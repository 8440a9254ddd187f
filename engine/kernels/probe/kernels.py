# ruff: noqa: ANN001, ANN201
"""The smallest kernel: what is compiled and run first."""

import triton
import triton.language as tl


@triton.jit
def doubling_kernel(x, out, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, 2 * tl.load(x + place))
