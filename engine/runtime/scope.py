"""Math settings of our own calls, put back afterwards: nothing global is changed behind the user's back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_math(device: torch.device) -> Iterator[None]:
    """No gradients; on CUDA, fp32 convolutions and products in fp32 (torch's default for convolutions is TF32)."""
    with torch.no_grad():
        if device.type != "cuda":
            yield
            return
        conv, product = torch.backends.cudnn, torch.backends.cuda.matmul
        fp16_sums = getattr(product, "allow_fp16_accumulation", None)
        # torch 2.9 replaced the two booleans by fp32_precision and refuses a mixture of both.
        name = "fp32_precision" if hasattr(product, "fp32_precision") else "allow_tf32"
        holders = (conv.conv, product) if name == "fp32_precision" else (conv, product)
        saved = [getattr(h, name) for h in holders]
        try:
            for holder in holders:
                setattr(holder, name, "ieee" if name == "fp32_precision" else False)
            if fp16_sums:
                product.allow_fp16_accumulation = False
            yield
        finally:
            for holder, value in zip(holders, saved, strict=True):
                setattr(holder, name, value)
            if fp16_sums:
                product.allow_fp16_accumulation = True
