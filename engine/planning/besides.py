"""Memory that a plan counts in addition to a run's own: libraries and the model's weights."""

from __future__ import annotations

from collections.abc import Iterable

from ..extras.plain_memory.allocator import Allocator
from ..network.offload import moving, moving_bytes
from ..network.plain import Network

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
    return LIBRARY_BYTES + reserved_for(moving(*getattr(model, half).everything(), itemsize=itemsize))


def reserved_for(sizes: Iterable[int]) -> int:
    """Return the bytes that torch reserves for tensors of these sizes (LTX-2.3's weights: 812 MiB for 776)."""
    copies = Allocator()
    for size in sizes:
        copies.take(size)
    return copies.reserved
