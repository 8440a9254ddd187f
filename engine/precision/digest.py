"""What tensors hold, in one short name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

#: More threads wait for memory, and to start one takes as long as to read some hundred KB.
THREADS, BYTES_OF_A_THREAD = 8, 4 << 20


def of_network(network: nn.Module, family: str, dtype: torch.dtype | None = None) -> str:
    """Return the digest of all that a network computes with: its weights, and what no weight tells, such as the groups
    of norms. family: the architecture's name. dtype: as for `digest`."""
    timesteps = sorted({m.timestep for m in network.modules() if getattr(m, "timestep", None) is not None})
    return digest(network.state_dict(), dtype, f"{family} {network.config} {timesteps}")


def digest(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, beside: str = "") -> str:
    """SHA-256 over names, shapes, types and values, whatever device they are on. dtype: of floating-point values as
    they count, whatever they are stored in (None: as stored). beside: what else counts.

    The published VAE's 0.5 GB take 0.4 s on one core; cores share the work.
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
