"""The functions of the original documents, on top of the engine: same arguments, and log lines only where they are
true.

Functions that optimise take a VideoVAE, the path of a VAE file, a ComfyUI VAE of this pack, or any torch module. A
VideoVAE is changed through its `options`, scoped to its own runs. Other modules get only the changes that are safe for
any: weights in channels_last_3d, and switches of the whole process where their name says so; `restore_settings` undoes
those.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .. import log
from ..archs import detect
from ..archs.seedvr2 import ARCHITECTURE as SEEDVR2
from ..bench.subject import noise_latent
from ..documented import summary
from ..errors import InputError, PlanError
from ..files.checkpoint import Checkpoint
from ..hardware import survey
from ..loader import PRECISIONS, auto_precision, load
from ..memory import GIB
from ..options import DEFAULTS, TOGGLES
from ..planning.budget import Limits
from ..planning.fusable import availability
from ..request import Request
from ..vae import VideoVAE
from .passes import (
    apply_channels_last_3d,
    configure_amp_context,
    enable_cudnn_benchmark,
    enable_flash_attention_for_attention_blocks,
    enable_tf32_for_blackwell,
    own_engine,
    restore_settings,
    torch_module,
)
from .training import checkpoint_blocks, data_loader, reparameterize, trainable

__all__ = [
    "BlackwellIntegratedVAE",
    "BlackwellSM120Optimizer",
    "apply_channels_last_3d",
    "configure_amp_context",
    "create_optimized_dataloader",
    "create_tiled_decoder",
    "enable_cudnn_benchmark",
    "enable_flash_attention_for_attention_blocks",
    "enable_tf32_for_blackwell",
    "get_optimization_info",
    "optimize_3d_vae_for_blackwell",
    "optimize_for_windows_blackwell",
    "optimize_vae_for_blackwell_sm120",
    "optimize_vae_for_inference",
    "optimize_vae_for_training",
    "reparameterize",
    "restore_settings",
]

#: Tile sizes are chosen in these steps and up to this size (pixels).
TILE_STEP, LARGEST_TILE = 64, 4096
#: The clip that `benchmark` decodes when it is given no latent: frames, height, width in pixels.
BENCHMARK_GPU, BENCHMARK_CPU = (21, 720, 1280), (5, 64, 64)

# -- whole VAEs -------------------------------------------------------------------------------------------------------


class BlackwellIntegratedVAE:
    """A VAE with a memory target: `target_vram_usage` of `vram_gb` GB (2^30 bytes), weights included.

    vae: a VideoVAE, the path of a VAE file, or a module with the keys of a known VAE. Raises InputError for others.
    """

    def __init__(self, vae: object, vram_gb: float = 16.0, target_vram_usage: float = 0.8125) -> None:
        self.vae = engine_vae(vae)
        self.target_gb = _target(self.vae, vram_gb, target_vram_usage)
        summary(self.vae)

    def decode(self, latent: Tensor, use_tiling: bool = True, **options: Any) -> Tensor:
        """Decode a host-scaled latent [B, C, T, h, w] to frames [B, F, H, W, 3] in 0..1; `options`: of VideoVAE.decode.

        use_tiling allows blended tiles, which are approximate, where whole frames do not fit the target; without it
        such a latent raises PlanError.
        """
        options = {"vram_gb": self.target_gb, **options}
        return self.vae.decode(latent, tiling="auto" if use_tiling else "untiled", **options)

    def benchmark(self, num_runs: int = 10, warmup_runs: int = 3, latent: Tensor | None = None) -> dict[str, Any]:
        """Time `decode`, host memory to host memory; print and return seconds, ms per frame, frames/s and the last
        report.

        latent: None: noise, 21 frames of 1280x720 on a GPU, 5 of 64x64 on a CPU.
        """
        if num_runs < 1 or warmup_runs < 0:
            raise InputError(f"num_runs={num_runs}, warmup_runs={warmup_runs}: at least 1 run and 0 for warming up")
        z = self._noise() if latent is None else latent
        seconds = []
        for _ in range(warmup_runs + num_runs):
            start = time.perf_counter()
            frames = self.decode(z)
            seconds.append(time.perf_counter() - start)
        seconds = seconds[warmup_runs:]
        batch, count, height, width, _ = frames.shape
        average, count = statistics.mean(seconds), batch * count
        low, high = (1e3 * t / count for t in (min(seconds), max(seconds)))
        print(f"{count} frames of {width}x{height}, {self.vae.precision} on {self.vae.device}, {num_runs} runs")
        print(f"Average decode time: {1e3 * average / count:.2f} ms per frame ({low:.2f} to {high:.2f})")
        print(f"Throughput: {count / average:.2f} frames/sec")
        return {
            "seconds": seconds,
            "ms_per_frame": 1e3 * average / count,
            "frames_per_second": count / average,
            "report": self.vae.last_report.as_dict(),
        }

    def _noise(self) -> Tensor:
        vae = self.vae
        frames, height, width = BENCHMARK_GPU if vae.device.type == "cuda" else BENCHMARK_CPU
        latents = (frames - 1) // vae.temporal + 1
        return noise_latent(vae.latent_channels, latents, height // vae.spatial, width // vae.spatial)


class BlackwellSM120Optimizer:
    """Flags, one per optimisation; `optimize` applies them to a VAE, and its report says which of them run."""

    def __init__(
        self,
        enable_fp8: bool = True,
        enable_cuda_graphs: bool = True,
        enable_triton_fusion: bool = True,
        use_temporal_slicing: bool = True,
    ) -> None:
        flags = {"fp8": enable_fp8, "cuda_graphs": enable_cuda_graphs, "triton_fusion": enable_triton_fusion}
        self.options = replace(DEFAULTS, **{name: bool(on) for name, on in flags.items()})
        self.use_temporal_slicing = use_temporal_slicing

    def optimize(self, vae: object) -> VideoVAE:
        """Return the VAE under these options. Options that this machine cannot serve are logged with the reason, and
        left out."""
        engine = engine_vae(vae)
        engine.options = self.options
        summary(engine)
        return engine

    def decode(self, vae: VideoVAE, latent: Tensor, **options: Any) -> Tensor:
        """Return vae.decode(latent), step by step in time, or without `use_temporal_slicing` the whole clip at once:
        the same frames, more memory."""
        if not self.use_temporal_slicing and latent.dim() > 3:
            options["chunk"] = latent.shape[-3]
        return vae.decode(latent, **options)


def optimize_vae_for_blackwell_sm120(
    vae: object, vram_gb: float = 16.0, target_vram_usage: float = 0.8125
) -> tuple[VideoVAE, int]:
    """Return the VAE on its fast path, and the side in pixels of the largest square frame (or tile) that it decodes
    whole below the target. Raises PlanError where nothing fits."""
    engine = engine_vae(vae)
    gb = _target(engine, vram_gb, target_vram_usage)
    tile = largest_tile(engine, gb)
    log.info(f"Optimized Tile Size: {tile}x{tile} based on {vram_gb:g}GB {_memory(engine)}.")
    summary(engine)
    return engine, tile


class TiledDecoder:
    """A decoder of frames larger than `tile_size` pixels in exact tiles, which equal the untiled result."""

    def __init__(self, vae: VideoVAE, tile_size: int, temporal_chunk_size: int) -> None:
        self.vae = vae
        self.tile_size = tile_size
        self.temporal_chunk_size = temporal_chunk_size

    def decode(self, latent: Tensor, **options: Any) -> Tensor:
        """Decode a host-scaled latent [B, C, T, h, w] to frames [B, F, H, W, 3] in 0..1; `options`: of VideoVAE.decode,
        so tiling="blended" gives soft tiles of that size instead."""
        given = {"chunk": self.temporal_chunk_size}
        if options.get("tiling") or max(latent.shape[-2:], default=0) * self.vae.spatial > self.tile_size:
            given.update(tiling="exact", tile=self.tile_size)
        return self.vae.decode(latent, **{**given, **options})

    __call__ = decode


def create_tiled_decoder(decoder: object, tile_size: int = 1536, temporal_chunk_size: int = 12) -> TiledDecoder:
    """Return a tiled decoder of a VAE: tile_size in pixels, temporal_chunk_size in latents per step (0: planned)."""
    if tile_size < 0 or temporal_chunk_size < 0:
        raise InputError(f"tile_size={tile_size}, temporal_chunk_size={temporal_chunk_size}: sizes are not negative")
    return TiledDecoder(engine_vae(decoder), tile_size, temporal_chunk_size)


def optimize_vae_for_inference(
    vae: Any,
    device: torch.device | str = "cuda",
    enable_channels_last_3d: bool = True,
    enable_flash_attention: bool = True,
    enable_tf32: bool = True,
    enable_cudnn_benchmark: bool = True,
) -> Any:
    """Move the VAE to `device` (the CPU where there is no GPU), apply these optimisations and return it.

    A VideoVAE's channels-last is that of the fused kernels: plain torch would get slower (`apply_channels_last_3d`
    gives it that all the same). TF32 rounds fp32 runs to ten bits of mantissa.
    """
    where = _device(device)
    vae = engine_vae(vae) if isinstance(vae, (str, os.PathLike)) else vae
    engine = own_engine(vae)
    if engine is None:
        return _optimize_module(
            vae, where, enable_channels_last_3d, enable_flash_attention, enable_tf32, enable_cudnn_benchmark
        )
    engine.to(where)
    engine.options = replace(engine.options, cudnn_benchmark=bool(enable_cudnn_benchmark))
    engine.enable_3d_blackwell_optimizations(enable_channels_last_3d, enable_flash_attention, enable_tf32)
    return vae


def optimize_3d_vae_for_blackwell(
    model: Any,
    enable_channels_last_3d: bool = True,
    enable_flash_attention: bool = True,
    enable_tf32: bool = True,
    device: torch.device | str = "cuda",
) -> Any:
    """Do the same as `optimize_vae_for_inference`, without cuDNN's trials."""
    return optimize_vae_for_inference(
        model, device, enable_channels_last_3d, enable_flash_attention, enable_tf32, enable_cudnn_benchmark=False
    )


def optimize_for_windows_blackwell(
    vae: Any,
    enable_channels_last: bool = True,
    enable_fp8: bool = False,
    enable_amp: bool = True,
    device: torch.device | str = "cuda",
) -> Any:
    """Do the same as `optimize_vae_for_inference`, without TF32 and cuDNN's trials. enable_amp: modules run in a 16-bit
    autocast on a GPU; a VideoVAE has its own precision and needs none."""
    where = _device(device)
    vae = optimize_vae_for_inference(vae, where, enable_channels_last, True, False, False)
    engine = own_engine(vae)
    if engine is not None:
        engine.options = engine.options.switched(**{"on" if enable_fp8 else "off": ["fp8"]})
        if enable_fp8 and "fp8" in engine.unused():
            log.warn(f"fp8 is off: {engine.unused()['fp8']}")
        return vae
    if enable_fp8:
        log.warn(f"fp8 is off: {type(vae).__name__} is no VAE the engine runs")
    if enable_amp and where.type == "cuda":
        vae.forward = configure_amp_context()(vae.forward)
        log.info(f"{type(vae).__name__}: forward runs in a float16 autocast")
    elif enable_amp:
        log.info("AMP is off: it pays on a GPU only")
    return vae


def optimize_vae_for_training(vae: Any, device: torch.device | str = "cuda") -> Any:
    """Return a copy of a VideoVAE to train, or another module itself: on `device` (the CPU where there is no GPU), with
    gradients, its blocks checkpointed. Use `configure_amp_context` and `reparameterize` in the training step."""
    where = _device(device)
    engine = own_engine(vae)
    if engine is not None:
        log.info("training copy: fp32 weights, plain torch modules, blocks checkpointed")
        return trainable(engine, where)
    count = checkpoint_blocks(torch_module(vae))
    log.info(f"{type(vae).__name__}: {count} blocks checkpointed")
    return vae.to(where).requires_grad_(True).train()


# -- around them ------------------------------------------------------------------------------------------------------


def create_optimized_dataloader(
    dataset: Dataset,
    batch_size: int = 1,
    shuffle: bool = False,
    num_workers: int | None = None,
    pin_memory: bool | None = None,
) -> DataLoader:
    """Return a DataLoader with persistent workers (at most two on Windows) and pinned memory where there is a GPU."""
    return data_loader(dataset, batch_size, shuffle, num_workers, pin_memory)


def get_optimization_info() -> dict[str, Any]:
    """Describe this machine, and say for each optimisation if a SeedVR2 VAE can use it here and if not why;
    JSON-able."""
    here = survey()
    device = torch.device("cuda" if any(gpu.runnable for gpu in here.gpus) else "cpu")
    reasons = availability(device, SEEDVR2.name, None, PRECISIONS[auto_precision(device, SEEDVR2)])
    return {
        "system": here.system,
        "torch": here.torch,
        "cuda": here.cuda,
        "cudnn": here.cudnn,
        "packages": dict(here.packages),
        "gpus": [
            {
                "name": gpu.name,
                "sm": f"sm_{gpu.sm}",
                "vram_gb": gpu.total / GIB,
                "free_gb": None if gpu.free is None else gpu.free / GIB,
                "usable": gpu.runnable,
            }
            for gpu in here.gpus
        ],
        "gpu_problem": here.gpu_problem,
        "device": str(device),
        "optimizations": {name: {"available": not reasons[name], "reason": reasons[name]} for name in TOGGLES},
    }


# -- parts ------------------------------------------------------------------------------------------------------------


def engine_vae(vae: object) -> VideoVAE:
    """Return the VideoVAE of `vae` (see BlackwellIntegratedVAE). Raises InputError where there is none."""
    if isinstance(vae, (str, os.PathLike)):
        return load(vae)
    engine = own_engine(vae)
    if engine is not None:
        return engine
    if not isinstance(vae, nn.Module) or detect(vae.state_dict()) is None:
        raise InputError(f"{type(vae).__name__} is no VAE the engine runs: give a VAE of zerowaste_vae.load, or a file")
    tensors = {key: tensor.detach() for key, tensor in vae.state_dict().items()}
    first = next(iter(tensors.values()))
    names = {dtype: name for name, dtype in PRECISIONS.items()}
    groups = getattr(getattr(vae, "config", None), "norm_groups", None)
    return load(Checkpoint(tensors), names.get(first.dtype, "auto"), first.device, groups)


def largest_tile(vae: VideoVAE, gb: float) -> int:
    """Return the side in pixels, a multiple of 64, of the largest square that `vae` decodes whole below `gb` GB (2^30
    bytes). Raises PlanError."""

    def plan(steps: int) -> None:
        side = steps * TILE_STEP // vae.spatial
        # 8 latents: a longer clip takes no more. Nothing parked: that would fit frames of any size.
        vae.planner.plan("decoder", (8, side, side), Request("untiled"), Limits(int(gb * GIB)))

    fits, most = 1, LARGEST_TILE // TILE_STEP
    plan(fits)
    while fits < most:
        middle = (fits + most + 1) // 2
        try:
            plan(middle)
            fits = middle
        except PlanError:
            most = middle - 1
    return fits * TILE_STEP


def _optimize_module(
    module: object, device: torch.device, channels_last: bool, flash: bool, tf32: bool, benchmark: bool
) -> nn.Module:
    """Apply the passes that are safe for any module."""
    module = torch_module(module).to(device).eval()
    if channels_last:
        apply_channels_last_3d(module)
    if flash:
        enable_flash_attention_for_attention_blocks(module)
    if tf32:
        enable_tf32_for_blackwell()
    if benchmark:
        enable_cudnn_benchmark()
    return module


def _device(device: torch.device | str) -> torch.device:
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={device!r} is not a device torch knows: use cpu, cuda or cuda:N") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        log.once(f"device {device}: there is no CUDA GPU, the CPU is used")
        return torch.device("cpu")
    return where


def _target(vae: VideoVAE, vram_gb: float, usage: float) -> float:
    if not 0 < vram_gb < math.inf or not 0 < usage <= 1:
        raise InputError(f"vram_gb={vram_gb}, target_vram_usage={usage}: give GB above 0 and a share of 0 to 1")
    log.info(f"Target {_memory(vae)} usage: {usage:.1%} ({vram_gb * usage:.1f}GB)")
    return vram_gb * usage


def _memory(vae: VideoVAE) -> str:
    return "VRAM" if vae.device.type == "cuda" else "RAM"
