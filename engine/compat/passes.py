"""Single passes over any module or VideoVAE, and switches of the whole process, made only by name.

Every switch returns a function that undoes it; `restore_settings` undoes all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .. import log
from ..errors import InputError
from ..kernels.precision import set_fp32_math
from ..network.ops.attention import FrameAttention
from ..vae import VideoVAE

_restore: dict[str, Callable[[], None]] = {}


def apply_channels_last_3d(model: Any, verbose: bool = True) -> int:
    """Put the Conv3d weights of a module, or of a VideoVAE's plain modules, into channels_last_3d; return their number.

    A VideoVAE's fused kernels compute in that layout in any case; its plain modules were 1.8 times slower in it on an
    H200. `vae.options` undoes it.
    """
    engine = own_engine(model)
    if engine is not None:
        engine.options = engine.options.switched(on=["channels_last_3d"])
    module = torch_module(model if engine is None else engine.model)
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
    engine = own_engine(model)
    if engine is not None:
        engine.options = engine.options.switched(on=["flash_attention"])
    module = torch_module(model if engine is None else engine.model)
    known = [m for m in module.modules() if isinstance(m, (FrameAttention, nn.MultiheadAttention))]
    if engine is None:
        _enable_sdpa()
    foreign = {
        type(m).__name__ for m in module.modules()
        if "attention" in type(m).__name__.lower() and not isinstance(m, (FrameAttention, nn.MultiheadAttention))
    }  # fmt: skip
    if verbose:
        log.info(f"attention without a score matrix: {len(known)} layers")
        if foreign:
            log.info(f"left as they are, they choose their kernels themselves: {', '.join(sorted(foreign))}")
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
    return _process_wide("cudnn_benchmark", lambda: _set(torch.backends.cudnn, "benchmark", True))


def restore_settings() -> None:
    """Undo every process-wide switch that these functions have made."""
    for name in list(_restore):
        _restore.pop(name)()


def configure_amp_context(enabled: bool = True, dtype: torch.dtype = torch.float16) -> AbstractContextManager:
    """Return torch.autocast for the GPU, or for the CPU where there is none."""
    return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype=dtype, enabled=enabled)


def own_engine(vae: object) -> VideoVAE | None:
    """Return a VideoVAE, or the one in a ComfyUI VAE of this pack; None for anything else."""
    return next((v for v in (vae, getattr(vae, "engine", None)) if isinstance(v, VideoVAE)), None)


def torch_module(model: object) -> nn.Module:
    """Return `model`; raises InputError if it is no module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{type(model).__name__} is neither a torch module nor a VAE of this pack")
    return model


def _process_wide(name: str, switch: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Make a change once, however often it is requested; the returned function undoes it, once."""
    if name not in _restore:
        _restore[name] = switch()
        log.info(f"{name} is on for the whole process; call the returned function or restore_settings() to undo it")

    def restore() -> None:
        undo = _restore.pop(name, None)
        if undo is not None:
            undo()

    return restore


def _set(holder: object, name: str, value: object) -> Callable[[], None]:
    kept = getattr(holder, name)
    setattr(holder, name, value)
    return lambda: setattr(holder, name, kept)


def _enable_sdpa() -> None:
    cuda = torch.backends.cuda
    if cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled():
        return

    def switch() -> Callable[[], None]:
        flash, efficient = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
        cuda.enable_flash_sdp(True)
        cuda.enable_mem_efficient_sdp(True)
        return lambda: (cuda.enable_flash_sdp(flash), cuda.enable_mem_efficient_sdp(efficient))

    _process_wide("flash_attention", switch)
