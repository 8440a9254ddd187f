"""The functions of the original documents, on top of the engine: the same arguments, and log lines where they are true.

Functions that optimise take a VideoVAE, the path of a VAE file, a ComfyUI VAE of this pack, or any torch module. A
VideoVAE is changed through its `options`, which its own runs obey. Another module gets only changes that are safe for
any: weights in channels_last_3d, and switches of the whole process, which `restore_settings` undoes. The methods of a
VideoVAE under old names are in engine/face.py.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import log
from ...checkpoints import Checkpoint
from ...errors import InputError, PlanError
from ...face import summary
from ...families import detect
from ...families.seedvr2 import ARCHITECTURE as SEEDVR2
from ...loader import PRECISIONS, auto_precision, load
from ...options import DEFAULTS, TOGGLES
from ...planning.budget import Limits
from ...planning.fusable import availability
from ...request import Request
from ...system.hardware import survey
from ...system.memory import GIB
from ...vae import VideoVAE
from ..bench.subject import noise_latent
from . import modules
from .modules import checkpoint_blocks, own_engine, torch_module

#: Tile sizes are chosen in these steps and up to this size (pixels).
TILE_STEP, LARGEST_TILE = 64, 4096
#: Clip that `benchmark` decodes if it is given no latent: frames, height and width in pixels.
BENCHMARK_GPU, BENCHMARK_CPU = (21, 720, 1280), (5, 64, 64)


class BlackwellIntegratedVAE:
    """A VAE with a memory target: `target_vram_usage` of `vram_gb` GB (2^30 bytes), weights included.

    vae: a VideoVAE, the path of a VAE file, or a module with the keys of a known VAE. Raises InputError for others.
    """

    def __init__(self, vae: object, vram_gb: float = 16.0, target_vram_usage: float = 0.8125) -> None:
        self.vae = engine_vae(vae)
        self.target_gb = _target(self.vae, vram_gb, target_vram_usage)
        summary(self.vae)

    def decode(self, latent: Tensor, use_tiling: bool = True, **options: Any) -> Tensor:
        """Decode a host-scaled latent [B, C, T, h, w] to frames [B, F, H, W, 3] in 0..1.

        Args:
            use_tiling: allow blended tiles, which are approximate, where whole frames do not fit the target.
            options: of VideoVAE.decode.
        Raises:
            PlanError: nothing fits.
        """
        options = {"vram_gb": self.target_gb, **options}
        return self.vae.decode(latent, tiling="auto" if use_tiling else "untiled", **options)

    def benchmark(self, num_runs: int = 10, warmup_runs: int = 3, latent: Tensor | None = None) -> dict[str, Any]:
        """Time `decode`, host memory to host memory; print and return seconds, ms per frame, frames/s, last report.

        latent: None: noise, 21 frames of 1280x720 on a GPU, 5 of 64x64 on a CPU.
        """
        if num_runs < 1 or warmup_runs < 0:
            raise InputError(f"num_runs={num_runs}, warmup_runs={warmup_runs}: at least 1 run and 0 for warming up")
        vae, seconds = self.vae, []
        if latent is None:
            frames, height, width = BENCHMARK_GPU if vae.device.type == "cuda" else BENCHMARK_CPU
            latents = (frames - 1) // vae.temporal + 1
            latent = noise_latent(vae.latent_channels, latents, height // vae.spatial, width // vae.spatial)
        for _ in range(warmup_runs + num_runs):
            start = time.perf_counter()
            shape = self.decode(latent).shape
            seconds.append(time.perf_counter() - start)
        seconds, count = seconds[warmup_runs:], shape[0] * shape[1]
        mean, low, high = (1e3 * t / count for t in (statistics.mean(seconds), min(seconds), max(seconds)))
        print(f"{count} frames of {shape[3]}x{shape[2]}, {vae.precision} on {vae.device}, {num_runs} runs")
        print(f"Average decode time: {mean:.2f} ms per frame ({low:.2f} to {high:.2f})")
        print(f"Throughput: {1e3 / mean:.2f} frames/sec")
        return {"seconds": seconds, "ms_per_frame": mean, "frames_per_second": 1e3 / mean,
                "report": vae.last_report.as_dict()}  # fmt: skip


class BlackwellSM120Optimizer:
    """Flags, one per optimisation; `optimize` applies them to a VAE, and its report says which of them run."""

    def __init__(
        self, enable_fp8: bool = True, enable_cuda_graphs: bool = True, enable_triton_fusion: bool = True,
        use_temporal_slicing: bool = True,
    ) -> None:  # fmt: skip
        flags = {"fp8": enable_fp8, "cuda_graphs": enable_cuda_graphs, "triton_fusion": enable_triton_fusion}
        self.options = replace(DEFAULTS, **{name: bool(on) for name, on in flags.items()})
        self.use_temporal_slicing = use_temporal_slicing

    def optimize(self, vae: object) -> VideoVAE:
        """Return the VAE under these options; those that this machine cannot serve are logged with the reason."""
        engine = engine_vae(vae)
        engine.options = self.options
        summary(engine)
        return engine

    def decode(self, vae: VideoVAE, latent: Tensor, **options: Any) -> Tensor:
        """Return vae.decode(latent); without `use_temporal_slicing` all latents in one step, which takes more memory
        and gives the same frames."""
        if not self.use_temporal_slicing and latent.dim() > 3:
            options["chunk"] = latent.shape[-3]
        return vae.decode(latent, **options)


def optimize_vae_for_blackwell_sm120(
    vae: object, vram_gb: float = 16.0, target_vram_usage: float = 0.8125
) -> tuple[VideoVAE, int]:
    """Return the VAE, and the side in pixels of the largest square frame (or tile) that it decodes whole below the
    target. Raises PlanError where nothing fits."""
    engine = engine_vae(vae)
    tile = largest_tile(engine, _target(engine, vram_gb, target_vram_usage))
    log.info(f"Optimized Tile Size: {tile}x{tile} based on {vram_gb:g}GB {_memory(engine)}.")
    summary(engine)
    return engine, tile


class TiledDecoder:
    """A decoder of frames larger than `tile_size` pixels in exact tiles, which equal the untiled result."""

    def __init__(self, vae: VideoVAE, tile_size: int, temporal_chunk_size: int) -> None:
        self.vae, self.tile_size, self.temporal_chunk_size = vae, tile_size, temporal_chunk_size

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
        raise InputError(f"tile_size={tile_size}, temporal_chunk_size={temporal_chunk_size}: neither can be below 0")
    return TiledDecoder(engine_vae(decoder), tile_size, temporal_chunk_size)


def optimize_vae_for_inference(
    vae: Any, device: torch.device | str = "cuda", enable_channels_last_3d: bool = True,
    enable_flash_attention: bool = True, enable_tf32: bool = True, enable_cudnn_benchmark: bool = True,
) -> Any:  # fmt: skip
    """Move the VAE to `device` (the CPU where there is no GPU), apply these optimisations and return it.

    A VideoVAE's channels-last is that of the fused kernels: plain torch would get slower (`apply_channels_last_3d`
    gives it that all the same). TF32 rounds fp32 runs to ten bits of mantissa.
    """
    where = _device(device)
    vae = engine_vae(vae) if isinstance(vae, (str, os.PathLike)) else vae
    engine = own_engine(vae)
    if engine is not None:
        engine.to(where)
        engine.options = replace(engine.options, cudnn_benchmark=bool(enable_cudnn_benchmark))
        engine.enable_3d_blackwell_optimizations(enable_channels_last_3d, enable_flash_attention, enable_tf32)
        return vae
    module = torch_module(vae).to(where).eval()
    if enable_channels_last_3d:
        modules.apply_channels_last_3d(module)
    if enable_flash_attention:
        modules.enable_flash_attention_for_attention_blocks(module)
    if enable_tf32:
        modules.enable_tf32_for_blackwell()
    if enable_cudnn_benchmark:
        modules.enable_cudnn_benchmark()
    return module


def optimize_3d_vae_for_blackwell(
    model: Any, enable_channels_last_3d: bool = True, enable_flash_attention: bool = True, enable_tf32: bool = True,
    device: torch.device | str = "cuda",
) -> Any:  # fmt: skip
    """Do the same as `optimize_vae_for_inference`, without cuDNN's trials."""
    return optimize_vae_for_inference(
        model, device, enable_channels_last_3d, enable_flash_attention, enable_tf32, enable_cudnn_benchmark=False
    )


def optimize_for_windows_blackwell(
    vae: Any, enable_channels_last: bool = True, enable_fp8: bool = False, enable_amp: bool = True,
    device: torch.device | str = "cuda",
) -> Any:  # fmt: skip
    """Do the same as `optimize_vae_for_inference`, without TF32 and cuDNN's trials.

    enable_amp: modules run in a 16-bit autocast on a GPU; a VideoVAE has its own precision and needs none.
    """
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
        vae.forward = modules.configure_amp_context()(vae.forward)
        log.info(f"{type(vae).__name__}: forward runs in a float16 autocast")
    elif enable_amp:
        log.info("AMP is off: it pays on a GPU only")
    return vae


def optimize_vae_for_training(vae: Any, device: torch.device | str = "cuda") -> Any:
    """Return a VAE to train on `device` (the CPU where there is no GPU), its blocks checkpointed.

    A VideoVAE gives a copy with fp32 weights, and stays as it is. Call the copy's `model.decoder(z)` and
    `model.encoder(x)`; its `decode` and `encode` track no gradients, and run the plain modules with the weights as
    they are. Another module is changed in place. Use `configure_amp_context` and `reparameterize` in the training step.
    """
    where, engine = _device(device), own_engine(vae)
    if engine is None:
        count = checkpoint_blocks(torch_module(vae))
        log.info(f"{type(vae).__name__}: {count} blocks checkpointed")
        return vae.to(where).requires_grad_(True).train()
    log.info("training copy: fp32 weights, plain torch modules, blocks checkpointed")
    model = copy.deepcopy(engine.model).to(where, torch.float32).requires_grad_(True).train()
    checkpoint_blocks(model)
    other = VideoVAE(model, engine.architecture, "fp32", torch.float32, where, engine.path)
    other.options = DEFAULTS.switched(off=["triton_fusion"])  # fused kernels would pack the weights once
    return other


def get_optimization_info() -> dict[str, Any]:
    """Return a JSON-able description of this machine, with each optimisation that a SeedVR2 VAE can use here, or the
    reason why not."""
    here = survey()
    device = torch.device("cuda" if any(gpu.runnable for gpu in here.gpus) else "cpu")
    reasons = availability(device, SEEDVR2.name, None, PRECISIONS[auto_precision(device, SEEDVR2)])
    gpus = [
        {"name": gpu.name, "sm": f"sm_{gpu.sm}", "vram_gb": gpu.total / GIB, "usable": gpu.runnable,
         "free_gb": None if gpu.free is None else gpu.free / GIB}
        for gpu in here.gpus
    ]  # fmt: skip
    return {
        "system": here.system, "torch": here.torch, "cuda": here.cuda, "cudnn": here.cudnn,
        "packages": dict(here.packages), "gpus": gpus, "gpu_problem": here.gpu_problem, "device": str(device),
        "optimizations": {name: {"available": not reasons[name], "reason": reasons[name]} for name in TOGGLES},
    }  # fmt: skip


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
