"""Passes over any module or VideoVAE, switches of the whole process, and parts for training."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from ... import log
from ...errors import InputError
from ...kernels.precision import set_fp32_math
from ...network.ops.attention import FrameAttention
from ...network.ops.resnet import Resnet
from ...network.state import State
from ...vae import VideoVAE

#: Most workers of a data loader on Windows, where each is a new process that imports everything again.
WINDOWS_WORKERS = 2
#: Process-wide switches that are on, with the functions that undo them.
_restore: dict[str, Callable[[], None]] = {}


# -- single passes over any module or VideoVAE, and switches of the whole process -------------------------------------


def apply_channels_last_3d(model: Any, verbose: bool = True) -> int:
    """Put the Conv3d weights of a module, or of a VideoVAE's plain modules, into channels_last_3d; return their number.

    A VideoVAE's fused kernels compute in that layout in any case; its plain modules were 1.8 times slower in it on an
    H200. `vae.options` undoes it.
    """
    module, _ = _switched(model, "channels_last_3d")
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv3d)]
    for convolution in convolutions:
        convolution.to(memory_format=torch.channels_last_3d)
    if verbose:
        log.info(f"Converted {len(convolutions)} Conv3d layers to channels_last_3d.")
        if convolutions:
            log.info("Channels_Last_3D Memory Format Applied.")
    return len(convolutions)


def enable_flash_attention_for_attention_blocks(model: Any, verbose: bool = True) -> int:
    """Let attention run on kernels that need no score matrix; return the number of attention layers that then do.

    These are a VideoVAE's own, and torch's MultiheadAttention. Others are left as they are and named in the log.
    torch's kernels are switched on for the process if they had been switched off (`restore_settings`).
    """
    module, engine = _switched(model, "flash_attention")
    known = [m for m in module.modules() if isinstance(m, (FrameAttention, nn.MultiheadAttention))]
    if engine is None:
        _enable_sdpa()
    names = {type(m).__name__ for m in module.modules() if m not in known}
    foreign = sorted(name for name in names if "attention" in name.lower())
    if verbose:
        log.info(f"attention without a score matrix: {len(known)} layers")
        if foreign:
            log.info(f"left as they are, they choose their kernels themselves: {', '.join(foreign)}")
    return len(known)


def enable_tf32_for_blackwell() -> Callable[[], None]:
    """Switch TF32 on for fp32 products and convolutions of the whole process; return a function that undoes it.

    A VideoVAE does not follow: its own runs obey `options.tf32`.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 8:
        log.warn("TF32 is left as it is: it needs an NVIDIA GPU from sm_80 on")
        return lambda: None
    return _process_wide("tf32", lambda: set_fp32_math(tf32=True))


def enable_cudnn_benchmark() -> Callable[[], None]:
    """Let cuDNN try out its algorithms in the whole process; return a function that undoes it.

    A VideoVAE does not follow: its own runs obey `options.cudnn_benchmark`.
    """
    if not torch.cuda.is_available():
        log.warn("cudnn.benchmark is left as it is: there is no CUDA GPU")
        return lambda: None

    def switch() -> Callable[[], None]:
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
        return functools.partial(setattr, torch.backends.cudnn, "benchmark", before)

    return _process_wide("cudnn_benchmark", switch)


def restore_settings() -> None:
    """Undo every process-wide switch that these functions have made."""
    for name in list(_restore):
        _restore.pop(name)()


def configure_amp_context(enabled: bool = True, dtype: torch.dtype = torch.float16) -> AbstractContextManager:
    """Return torch.autocast for the GPU, or for the CPU where there is none."""
    return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=dtype, enabled=enabled)


def _process_wide(name: str, switch: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Make a change once, however often it is requested; the returned function undoes it, once."""
    if name not in _restore:
        _restore[name] = switch()
        log.info(f"{name} is on for the whole process; call the returned function or restore_settings() to undo it")
    return lambda: _restore.pop(name, lambda: None)()


def _enable_sdpa() -> None:
    cuda = torch.backends.cuda
    flash, efficient = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    if flash and efficient:
        return

    def switch() -> Callable[[], None]:
        cuda.enable_flash_sdp(True)
        cuda.enable_mem_efficient_sdp(True)
        return lambda: (cuda.enable_flash_sdp(flash), cuda.enable_mem_efficient_sdp(efficient))

    _process_wide("flash_attention", switch)


def own_engine(vae: object) -> VideoVAE | None:
    """Return a VideoVAE, or the one in a ComfyUI VAE of this pack; None for anything else."""
    return next((v for v in (vae, getattr(vae, "engine", None)) if isinstance(v, VideoVAE)), None)


def _switched(model: Any, option: str) -> tuple[nn.Module, VideoVAE | None]:
    """Return the module of a VAE or the module itself, and the VideoVAE with the option on, None for other modules."""
    engine = own_engine(model)
    if engine is not None:
        engine.options = engine.options.switched(on=[option])
    return torch_module(model if engine is None else engine.model), engine


def torch_module(model: object) -> nn.Module:
    """Return `model`; raises InputError if it is no module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{type(model).__name__} is neither a torch module nor a VAE of this pack")
    return model


# -- training ---------------------------------------------------------------------------------------------------------


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


def create_optimized_dataloader(
    dataset: Dataset, batch_size: int = 1, shuffle: bool = False, num_workers: int | None = None,
    pin_memory: bool | None = None,
) -> DataLoader:  # fmt: skip
    """Return a DataLoader whose workers stay alive between epochs.

    Args:
        num_workers: None: two at most, and one less than there are cores; on Windows never more than two.
        pin_memory: None: where there is a GPU.
    """
    workers = min(2, (os.cpu_count() or 1) - 1) if num_workers is None else num_workers
    if sys.platform == "win32" and workers > WINDOWS_WORKERS:
        log.warn(f"num_workers={workers}: {WINDOWS_WORKERS} are used, more make start-up slow on Windows")
        workers = WINDOWS_WORKERS
    gpu = torch.cuda.is_available()
    if pin_memory and not gpu:
        log.warn("pin_memory is off: there is no GPU to copy to")
    pinned = gpu and pin_memory is not False
    return DataLoader(dataset, batch_size, shuffle, num_workers=workers, pin_memory=pinned,
                      persistent_workers=workers > 0)  # fmt: skip
