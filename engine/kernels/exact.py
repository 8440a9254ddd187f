"""fp32 convolution as a sum of matrix products.

cuDNN's fp32 convolutions (without TF32) leave the full-width SeedVR2 decoder 1.7e-5 from its fp64 result on an H200,
plain matrix products 5e-6: the difference between missing and keeping the promised 1.5e-5.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor


def as_products(device: torch.device, dtype: torch.dtype, tf32: bool) -> bool:
    """Return True if the convolutions of a run are sums of matrix products."""
    return device.type == "cuda" and dtype == torch.float32 and not tf32


def conv3d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...],
           taps: int | None = None) -> Tensor:
    """Compute torch.nn.functional.conv3d with one product per kernel tap: x [B, C, T, H, W] -> [B, K, T', H', W'].

    taps: the number of taps to compute, for a dry run: each takes the same memory.
    """
    pt, ph, pw = padding
    x = F.pad(x, (pw, pw, ph, ph, pt, pt)).permute(0, 2, 3, 4, 1).contiguous()
    kernel = weight.shape[2:]
    size = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:4], kernel, stride, strict=True)]
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    total = bias.repeat(x.shape[0] * size[0] * size[1] * size[2], 1)
    for tap in itertools.islice(itertools.product(*map(range, kernel)), taps):
        window = [slice(o, o + (n - 1) * s + 1, s) for o, n, s in zip(tap, size, stride, strict=True)]
        total.addmm_(x[(slice(None), *window)].reshape(-1, x.shape[4]), weight[(slice(None), slice(None), *tap)].t())
    return total.view(x.shape[0], *size, -1).permute(0, 4, 1, 2, 3)
