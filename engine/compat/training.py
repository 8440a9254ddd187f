"""Parts for training a VAE: gradients through the plain modules, less memory for them, sampling, data."""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from .. import log
from ..network.ops.attention import FrameAttention
from ..network.ops.resnet import Resnet
from ..network.state import State
from ..options import DEFAULTS
from ..vae import VideoVAE

#: On Windows every worker is a new process that imports everything again.
WINDOWS_WORKERS = 2


def trainable(vae: VideoVAE, device: torch.device) -> VideoVAE:
    """Return a copy to train: fp32 weights with gradients on `device`, blocks checkpointed. `vae` stays as it is.

    Call its modules, `model.decoder(z)` and `model.encoder(x)`; `decode` and `encode` track no gradients but see the
    weights as they are, since the fused kernels, which would have packed them once, are off.
    """
    model = copy.deepcopy(vae.model).to(device, torch.float32).requires_grad_(True).train()
    checkpoint_blocks(model)
    other = VideoVAE(model, vae.architecture, "fp32", torch.float32, device, vae.path)
    other.options = DEFAULTS.switched(off=["triton_fusion"])
    return other


def checkpoint_blocks(module: nn.Module) -> int:
    """Have the innermost blocks of `module` computed again in the backward pass instead of kept; return how many.

    A block is one of our residual or attention blocks, or a module whose class is called one. A block that is given a
    State runs as it is: computing it again would find the history of later frames.
    """
    named = [m for m in module.modules() if _is_block(m)]
    innermost = [m for m in named if not any(_is_block(child) for child in m.modules() if child is not m)]
    fresh = [m for m in innermost if "forward" not in vars(m)]
    for block in fresh:
        # A partial of the bound method, because that can be deep-copied together with the block.
        block.forward = functools.partial(_recomputed, block.forward)
    return len(fresh)


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, (Resnet, FrameAttention)) or "block" in type(module).__name__.lower()


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or any(isinstance(a, State) for a in (*args, *kwargs.values())):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def reparameterize(mean: Tensor, logvar: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return mean + exp(logvar / 2) * noise in one pass, differentiable in both; shapes equal, logvar clamped to
    -30..20."""
    noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
    return torch.addcmul(mean, torch.exp(0.5 * logvar.clamp(-30.0, 20.0)), noise)


def data_loader(
    dataset: Dataset, batch_size: int, shuffle: bool, num_workers: int | None, pin_memory: bool | None
) -> DataLoader:
    """Return a DataLoader whose workers stay alive between epochs.

    Args:
        num_workers: None: two at most, and at most one per core but one; on Windows a number above two is reduced to
            two, with a line in the log.
        pin_memory: None: where there is a GPU.
    """
    workers = min(2, (os.cpu_count() or 1) - 1) if num_workers is None else num_workers
    if sys.platform == "win32" and workers > WINDOWS_WORKERS:
        log.warn(f"num_workers={workers}: {WINDOWS_WORKERS} are used, more make start-up slow on Windows")
        workers = WINDOWS_WORKERS
    gpu = torch.cuda.is_available()
    if pin_memory and not gpu:
        log.warn("pin_memory is off: there is no GPU to copy to")
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=workers,
        pin_memory=gpu if pin_memory is None else pin_memory and gpu,
        persistent_workers=workers > 0,
    )
