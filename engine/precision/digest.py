"""Digests of tensors and networks: short names of their contents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

#: More threads would wait for memory. Starting one takes as long as reading some hundred KB.
THREADS, BYTES_OF_A_THREAD = 8, 4 << 20


def of_network(network: nn.Module, family: str, dtype: torch.dtype | None = None) -> str:
    """Return the digest of everything that a network computes with: weights, configuration and timesteps.

    Args:
        network: the network.
        family: the architecture's name.
        dtype: as for `digest`.
    """
    timesteps = sorted({m.timestep for m in network.modules() if getattr(m, "timestep", None) is not None})
    return digest(network.state_dict(), dtype, f"{family} {network.config} {timesteps}")


def digest(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, beside: str = "") -> str:
    """Return the SHA-256 of names, shapes, types and values, which does not depend on the device.

    The published VAE's 0.5 GB take 0.4 s on one core; cores share the work.

    Args:
        tensors: by name.
        dtype: floating-point values are converted to it before they are hashed; None: they are hashed as stored.
        beside: text that is hashed, too.
    """

    def one(item: tuple[str, Tensor]) -> bytes:
        name, tensor = item
        tensor = tensor.detach().to("cpu", dtype if dtype is not None and tensor.is_floating_point() else None)
        tensor = tensor.contiguous()
        found = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
        return found.digest()

    # Threads begin with torch's defaults; views of inference tensors are fine there, too.
    threads = sum(t.nbytes for t in tensors.values()) // BYTES_OF_A_THREAD + 1
    with ThreadPoolExecutor(min(threads, THREADS, os.cpu_count() or 1)) as pool:
        found = b"".join(pool.map(one, sorted(tensors.items())))
    return hashlib.sha256(found + beside.encode()).hexdigest()
