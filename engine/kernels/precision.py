"""Full fp32 products where rounding would be compounded or checked against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_matmul() -> Iterator[None]:
    """No TF32 in fp32 matrix products inside, whatever the host has set; its setting comes back."""
    kept = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = kept
