"""torch's own caches of memory, given back to the system."""

from __future__ import annotations

import threading

import torch

#: Held while launches are being recorded: torch refuses to empty its cache then, in whichever thread.
RECORDING = threading.RLock()


def empty_device_cache() -> None:
    """Give back what torch has reserved on all GPUs and nobody uses."""
    with RECORDING:
        torch.cuda.empty_cache()


def empty_host_cache() -> None:
    """Give back the page-locked host memory that torch keeps for copies to come. Old versions of torch cannot."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.cuda.is_initialized():
        empty()
