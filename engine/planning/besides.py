"""What a plan counts besides a run's own memory."""

from __future__ import annotations

from ..network.hosted import moving, moving_bytes
from ..network.plain import Network
from .allocator import Allocator

#: What cuBLAS and cuDNN hold (40 to 60 MiB measured on an H200), with what torch's segments of weights have left.
LIBRARY_BYTES = 96 << 20
#: What cuBLAS alone does, beside packed weights, which lie in one segment: 33 MiB on an H200, in which 8 to 20 MiB more
#: were reserved than in use.
CUBLAS_BYTES = 72 << 20


def besides(model: Network, waits: bool, itemsize: int, half: str, fused: bool) -> int:
    """Bytes of the libraries, and of the model's own weights that are on the device while `half` runs: all of them, or
    where they wait in host memory (`waits`) those of the half, of which a fused run has the packed ones alone.

    model: without values; itemsize: of a value.
    """
    if not waits:
        return LIBRARY_BYTES + moving_bytes(model, itemsize=itemsize)
    if fused:
        return CUBLAS_BYTES
    copies = Allocator()  # torch reserves for them one by one (LTX-2.3: 812 MiB for 776)
    for size in moving(*getattr(model, half).everything(), itemsize=itemsize):
        copies.take(size)
    return LIBRARY_BYTES + copies.reserved
