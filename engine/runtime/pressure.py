"""Signs that memory runs out."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Check whether `error` means that memory ran out: torch's own error, or one that a library passes on as text."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, Pressure)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


#: Texts of CUDA and Triton; cuBLAS; torch's allocator of host memory on Linux and Windows.
_SIGNS = ("out of memory", "alloc_failed", "can't allocate memory", "not enough memory")


class Pressure(Exception):
    """Raised between two chunks: the last one only just found its memory, and there is a leaner plan."""
