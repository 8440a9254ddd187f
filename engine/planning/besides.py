"""Memory that a plan counts in addition to a run's own: libraries and the model's weights."""

from __future__ import annotations

from ..network.hosted import moving, moving_bytes
from ..network.plain import Network
from .allocator import Allocator

#: Memory of cuBLAS and cuDNN (40 to 60 MiB measured on an H200), and unused parts of the segments that hold weights.
LIBRARY_BYTES = 96 << 20
#: Memory of cuBLAS alone (33 MiB on an H200), for packed weights, which lie in one segment; 8 to 20 MiB more were
#: reserved there than in use.
CUBLAS_BYTES = 72 << 20


def besides(model: Network, waits: bool, itemsize: int, half: str, fused: bool) -> int:
    """Return the bytes of the libraries and of the model's own weights on the device while a component runs.

    Args:
        model: network without values.
        waits: the weights are in host memory and only those of `half` come to the device; a fused run then has only
            its packed weights, which are not counted here. False: all weights are on the device.
        itemsize: bytes of a value.
        half: "encoder" or "decoder".
        fused: the fused operators run it.
    """
    if not waits:
        return LIBRARY_BYTES + moving_bytes(model, itemsize=itemsize)
    if fused:
        return CUBLAS_BYTES
    copies = Allocator()  # torch allocates each tensor by itself (LTX-2.3: 812 MiB reserved for 776)
    for size in moving(*getattr(model, half).everything(), itemsize=itemsize):
        copies.take(size)
    return LIBRARY_BYTES + copies.reserved
