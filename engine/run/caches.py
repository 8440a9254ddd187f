"""What concerns a whole device or process, and so must not meet another thread's recording: giving back torch's own
caches of memory, and waiting."""

from __future__ import annotations

import threading

import torch

#: Held while launches are being recorded: in whichever thread, torch refuses to empty its cache then, and a wait for
#: the whole device may break the recording off.
RECORDING = threading.RLock()


def empty_device_cache() -> None:
    """Give back what torch has reserved on all GPUs and nobody uses."""
    with RECORDING:
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU."""
    with RECORDING:
        torch.cuda.synchronize(device)


def empty_host_cache() -> None:
    """Give back the page-locked host memory that torch keeps for copies to come. Old versions of torch cannot."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.cuda.is_initialized():
        empty()
