"""The speed at which memory comes back to a GPU, measured once: what a model costs that makes room for a run."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ...runtime.pinned import staging
from ...runtime.pressure import out_of_memory
from ...system.devices import empty_host_cache, synchronize

#: Bytes that are copied for one speed, and the part of them that lies on the GPU: a full card has no more to spare.
COPIED, PIECE = 256 << 20, 32 << 20


@dataclass(frozen=True)
class Link:
    """Bytes per second that come to a GPU from page-locked host memory, from other host memory and from disk.

    The defaults serve where nothing was measured: PCIe 4.0 with 16 lanes, and a common NVMe disk, whose speed is never
    measured."""

    pinned: float = 24e9
    pageable: float = 8e9
    disk: float = 2e9


def measured(device: torch.device) -> Link:
    """Return the speeds of a GPU's link, measured at the first call that finds the memory for it. Until then, and
    elsewhere, they are the defaults."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Link()
    try:
        return _measured(device)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return Link()


@functools.cache
def _measured(device: torch.device) -> Link:
    try:
        there = torch.empty(PIECE, dtype=torch.uint8, device=device)
        pageable = _speed(torch.ones(COPIED, dtype=torch.uint8, device="cpu"), there)
        locked = staging((COPIED,), torch.uint8)
        pinned = pageable if locked is None else _speed(locked, there)
    finally:
        locked = None
        empty_host_cache()
    return Link(pinned, pageable)


def _speed(source: Tensor, target: Tensor) -> float:
    """Return the bytes per second of copies of `source` in pieces, behind a first piece that is not counted."""
    target.copy_(source[:PIECE], non_blocking=True)
    synchronize(target.device)
    began = time.perf_counter()
    for piece in source.split(PIECE):
        target.copy_(piece, non_blocking=True)
    synchronize(target.device)
    return source.numel() / (time.perf_counter() - began)
