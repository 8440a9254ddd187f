"""What a plan counts besides a run's own memory."""

from __future__ import annotations

from ..network.hosted import moving_bytes
from ..network.plain import Network

#: What cuBLAS and cuDNN hold (40 to 60 MiB measured on an H200).
LIBRARY_BYTES = 96 << 20


def besides(model: Network, waits: bool, itemsize: int, half: str, fused: bool) -> int:
    """Bytes of the libraries, and of the model's own weights that are on the device while `half` runs: all of them, or
    where they wait in host memory (`waits`) those of the half, of which a fused run has the packed ones alone.

    model: without values; itemsize: of a value.
    """
    parts = (model,) if not waits else () if fused else getattr(model, half).everything()
    return LIBRARY_BYTES + moving_bytes(*parts, itemsize=itemsize)
