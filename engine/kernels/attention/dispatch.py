"""attention: flash where the head is small enough, the streaming kernel above, torch where there is no Triton."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..targets import Target, capabilities, interpreted, on_device, target, triton_version, use_triton
from . import reference
from .schedules import Schedule, large, pick

FLASH_HEAD = 256  # torch's flash kernels stop here
LARGEST_HEAD = 1024


def attention(q: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto") -> Tensor:
    """Single-head attention within each frame.

    q, k, v: [B, N, D] contiguous, fp16 or bf16 (fp32 runs torch), D a multiple of 8. Returns [B, N, D]:
    softmax(q k^T / sqrt(D)) v. Memory is O(N). backend "reference" is fp32 arithmetic. Raises ValueError where shapes
    or types differ.
    """
    if q.shape != k.shape or q.shape != v.shape or q.dim() != 3 or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention needs three [B, N, D] of one type, not {list(q.shape)}, {list(k.shape)}")
    if backend == "reference":
        return reference.attention(q, k, v)
    head = q.shape[2]
    fits = q.dtype in (torch.float16, torch.bfloat16) and FLASH_HEAD < head <= LARGEST_HEAD and head % 8 == 0
    here = target(q.device) if q.is_cuda else capabilities("interpreter", 90, triton_version())
    if backend == "triton":
        if not use_triton(q.device, backend) or head > LARGEST_HEAD:
            raise ValueError(f"no attention kernel for a head of {head}")
        with on_device(q):
            return launch(q.contiguous(), k.contiguous(), v.contiguous(), here)
    if fits and use_triton(q.device, backend, q.dtype) and pick(here.sm, head) is not None:
        with on_device(q):
            return launch(q.contiguous(), k.contiguous(), v.contiguous(), here)
    return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def launch(q: Tensor, k: Tensor, v: Tensor, here: Target, schedule: Schedule | None = None) -> Tensor:
    """Run the kernel on contiguous tensors; `schedule` overrides the table (checks and tuning only)."""
    from . import triton as kernels

    frames, tokens, head = q.shape
    s = schedule or pick(here.sm, head) or large(here.sm)
    wide = max(1 << (head - 1).bit_length(), 16)
    value = min(s.dv, wide)
    out = torch.empty_like(q)
    operands: list[Any] = [q, k, v]
    if here.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        blocks = ([s.bm, wide], [s.bn, wide], [s.bn, value])
        rows = [t.view(-1, head) for t in operands]
        operands = [TensorDescriptor(r, r.shape, r.stride(), b) for r, b in zip(rows, blocks, strict=True)]
    kernels.attention_kernel[(-(-tokens // s.bm), wide // value, frames)](
        *operands, out, tokens, math.log2(math.e) / math.sqrt(head), D=head, DP=wide, DV=value, TMA=here.tma,
        UPCAST=interpreted() and not q.is_cuda and q.dtype == torch.bfloat16, BM=s.bm, BN=s.bn,
        num_warps=s.warps, num_stages=s.stages,
    )  # fmt: skip
    return out
