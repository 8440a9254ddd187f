"""The only file that touches ComfyUI: its VAE type, memory management, folders, progress and interrupt."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import comfy.model_management as mm
import comfy.model_patcher
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import ComfyExtension, io
from torch import Tensor

from ..engine import Cancelled, Checkpoint, CheckpointError, InputError, load, log, read_checkpoint
from ..engine.checkpoint import restore_shapes
from ..engine.models import detect
from ..engine.runtime.memory import DEFAULT_SHARE, GIB
from ..engine.runtime.pixels import OUTPUTS
from .frames import as_clip, as_latent
from .saving import check_prefix
from .settings import Settings

__all__ = [
    "ComfyExtension",
    "EngineVAE",
    "checkpoint_of",
    "from_file",
    "from_host_vae",
    "io",
    "output_file",
    "progress",
    "vae_file",
    "vae_files",
    "with_precision",
]

#: Formats the engine reads; the host's own list leaves .gguf out and has pickled files, which are never opened.
SUFFIXES = (".safetensors", ".sft", ".gguf")


class EngineVAE(comfy.sd.VAE):
    """A ComfyUI VAE whose work is done by the engine.

    `settings` are the wishes of the nodes that made it; stock nodes run with them. `source()` gives the weights it was
    made from, as they are stored. Those it runs with stay in the host's hands: its patcher loads and offloads them.
    """

    def __init__(self, source: Callable[[], Checkpoint], precision: str, settings: Settings) -> None:
        # The smallest VAE of the host: whatever attributes this version of it gives a VAE are then there.
        super().__init__(sd={"pixel_space_vae": torch.tensor(1.0)})
        # The host moves the weights before a run; plans are made earlier, and depend on where the run will be.
        engine = load(source(), precision, self.device, weights_on=mm.vae_offload_device())
        self.engine = engine
        self.source = source
        self.settings = settings
        self.first_stage_model = engine.model
        self.patcher = comfy.model_patcher.ModelPatcher(
            engine.model, load_device=self.device, offload_device=mm.vae_offload_device()
        )
        self.size = None
        self.vae_dtype = engine.dtype
        self.working_dtypes = [engine.dtype]
        self.latent_channels = engine.latent_channels
        self.latent_dim = 3
        self.output_channels = 3
        t, s = engine.temporal, engine.spatial
        self.upscale_ratio = (lambda a: max(0, a * t - (t - 1)), s, s)
        self.downscale_ratio = (lambda a: max(0, (a + t - 1) // t), s, s)
        self.upscale_index_formula = self.downscale_index_formula = (t, s, s)
        self.crop_input = False
        # Otherwise a host short of memory loads only part of the weights, which plain modules cannot run with.
        self.disable_offload = True
        self.memory_used_decode = lambda shape, dtype: self._peak("decoder", self._latent_size(shape))
        self.memory_used_encode = lambda shape, dtype: self._peak("encoder", self._clip_size(shape[0], *shape[2:]))
        log.info(f"{engine.arch} VAE ready: {engine.precision}, runs on {self.device}")

    def with_settings(self, settings: Settings) -> EngineVAE:
        """The same VAE (weights shared) under other settings."""
        vae = copy.copy(self)
        vae.settings = settings
        return vae

    # -- what the host's nodes call -------------------------------------------------------------------------------

    def decode(self, samples_in: Tensor, vae_options: dict | None = None) -> Tensor:
        """LATENT samples -> frames [B, F, H, W, 3] in 0..1, in the host's intermediate type."""
        return self.run_decode(samples_in, self.settings)[0]

    def decode_tiled(self, samples: Tensor, tile_x: int | None = None, **_: object) -> Tensor:
        """As `decode`, in exact tiles of `tile_x` latent pixels: tiles along time would cut the causal history."""
        tile = (tile_x or 0) * self.engine.spatial
        return self.run_decode(samples, Settings("exact", tile).over(self.settings))[0]

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """IMAGE [F, H, W, C] or [B, F, H, W, C] -> samples [B, C, T, h, w], host-scaled."""
        return self.run_encode(as_clip(pixel_samples), self.settings)[0]

    def encode_tiled(self, pixel_samples: Tensor, tile_x: int | None = None, **_: object) -> Tensor:
        """As `encode`, in exact tiles of `tile_x` pixels."""
        return self.run_encode(as_clip(pixel_samples), Settings("exact", tile_x or 0).over(self.settings))[0]

    # -- what our nodes call --------------------------------------------------------------------------------------

    def run_decode(self, samples: Tensor, settings: Settings) -> tuple[Tensor, str]:
        """Decode under `settings`; also returns a line that says how and how long."""
        latent = as_latent(samples, self.latent_channels)
        size = self._latent_size(latent.shape)
        output = "float16" if self._output_dtype() is torch.float16 else "float32"
        options = {**settings.plan_options(), "chunk": settings.chunk, "vram_gb": settings.vram_gb or None}
        options["output"] = output
        with self._loaded("decoder", size, settings, chunk=settings.chunk, output=OUTPUTS[output]):
            plan = self.engine.plan_decode(*size, **options)
            started = time.perf_counter()
            images = self._interruptible(self.engine.decode, latent, **options)
            seconds = time.perf_counter() - started
        return images.to(self.output_device), self._line("decoded", images.shape, plan.describe(), seconds)

    def run_encode(self, clip: Tensor, settings: Settings) -> tuple[Tensor, str]:
        """Encode [B, F, H, W, 3] under `settings`; also returns a line that says how and how long."""
        if not self.engine.can_encode:
            raise InputError(f"{self.engine.path or 'this VAE'} holds a decoder only: encode with the whole VAE's file")
        size = self._clip_size(clip.shape[0], *clip.shape[1:4])
        options = {**settings.plan_options(), "vram_gb": settings.vram_gb or None}
        with self._loaded("encoder", size, settings):
            plan = self.engine.plan_encode(*size, **options)
            started = time.perf_counter()
            latent = self._interruptible(self.engine.encode, clip, **options)
            seconds = time.perf_counter() - started
        line = self._line("encoded", clip.shape, plan.describe(), seconds)
        return latent.to(self.output_device, self._output_dtype()), line

    # -- host services --------------------------------------------------------------------------------------------

    def _loaded(self, half: str, size: tuple[int, int, int, int], settings: Settings, **options: object) -> object:
        """Have the host make room for the plan and load the weights; a context in which to run."""
        memory = 0
        if self.device.type != "cpu":
            target = settings.vram_gb * GIB or DEFAULT_SHARE * mm.get_total_memory(self.device)
            memory = self._peak(half, size, target=int(target), **options, **settings.plan_options())
        mm.load_models_gpu([self.patcher], memory_required=memory, force_full_load=True)
        self.engine.to(self.device)
        context = getattr(mm, "cuda_device_context", None)
        return context(self.device) if context else nullcontext()

    def _interruptible(self, work: Callable[..., Tensor], *args: object, **options: object) -> Tensor:
        """Run `work` with the host's progress bar and stop button."""
        try:
            return work(*args, progress=progress(), cancel=mm.processing_interrupted, **options)
        except Cancelled:
            mm.throw_exception_if_processing_interrupted()
            raise
        finally:
            # The host does not see the packed weights, so they must not outlive the run it made room for.
            self.engine.release()

    def _peak(self, half: str, size: tuple[int, int, int, int], **options: object) -> int:
        return self.engine.planner.plan(half, *size, **options).peak_bytes

    def _latent_size(self, shape: torch.Size) -> tuple[int, int, int, int]:
        """(batch, latents, height, width) of samples [B, C, T, h, w] or [B, C*T, h, w]."""
        latents = shape[2] if len(shape) == 5 else shape[1] // self.latent_channels
        return shape[0], latents, shape[-2], shape[-1]

    def _clip_size(self, batch: int, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(batch, latents, height, width) of the latents that a clip becomes."""
        s = self.engine.spatial
        return batch, self.downscale_ratio[0](frames), height // s, width // s

    def _output_dtype(self) -> torch.dtype:
        choose = getattr(mm, "intermediate_dtype", None)
        return choose() if choose else torch.float32

    def _line(self, verb: str, clip: torch.Size, plan: str, seconds: float) -> str:
        batch, frames, height, width, _ = clip
        count = f"{batch} x {frames}" if batch > 1 else str(frames)
        engine = self.engine
        return (
            f"{verb} {count} frames of {width}x{height} in {seconds:.2f} s "
            f"({engine.arch}, {engine.precision} on {self.device}): {plan}"
        )


# -- making them ------------------------------------------------------------------------------------------------------


def from_file(path: Path, precision: str, norm_groups: int | None, settings: Settings) -> EngineVAE:
    """The VAE of a .safetensors or .gguf file."""

    stamp = _stamp(path)

    def source() -> Checkpoint:
        if _stamp(path) != stamp:
            raise CheckpointError(f"{path}: was changed or removed after it was loaded; run the graph again")
        checkpoint = read_checkpoint(path)
        if norm_groups:
            checkpoint.metadata["norm_num_groups"] = norm_groups
        return checkpoint

    return EngineVAE(source, precision, settings)


def from_host_vae(vae: comfy.sd.VAE, precision: str) -> EngineVAE | None:
    """An engine VAE with the weights of a host VAE, which is left as it is; None if its network is not known."""
    if not _known(vae):
        return None

    def source() -> Checkpoint:
        return Checkpoint({key: t.detach().to(mm.vae_offload_device()) for key, t in vae.get_sd().items()})

    return EngineVAE(source, precision, Settings())


def with_precision(vae: EngineVAE, precision: str) -> EngineVAE:
    """`vae` itself if it runs in `precision`, else a new one with its weights and settings."""
    if precision == "auto" or precision == vae.engine.precision:
        return vae
    return EngineVAE(vae.source, precision, vae.settings)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:  # reading it says what is wrong
        return None
    return stat.st_mtime_ns, stat.st_size


def _known(vae: comfy.sd.VAE) -> bool:
    return getattr(vae, "first_stage_model", None) is not None and detect(vae.get_sd()) is not None


# -- writing them -----------------------------------------------------------------------------------------------------


def checkpoint_of(vae: comfy.sd.VAE) -> Checkpoint:
    """The weights of ours, or of a host VAE whose network the engine knows, as a file that loads again needs them."""
    if isinstance(vae, EngineVAE):
        checkpoint, model = vae.source(), vae.engine.model
        shapes = {key: tuple(t.shape) for key, t in model.state_dict().items()}
        config = model.config
    elif _known(vae):
        checkpoint = Checkpoint(vae.get_sd())
        shapes = {key: tuple(t.shape) for key, t in checkpoint.tensors.items()}
        config = detect(shapes).configure(shapes, None)
    else:
        network = type(getattr(vae, "first_stage_model", vae)).__name__
        raise InputError(f"{network}: not a video VAE the engine knows; save it with ComfyUI's own VAE Save")
    tensors = restore_shapes(checkpoint, shapes).tensors
    groups = {} if config.norm_groups is None else {"norm_num_groups": config.norm_groups}
    return Checkpoint({key: tensors[key] for key in shapes}, {**checkpoint.metadata, **groups})


def output_file(prefix: str, suffix: str) -> Path:
    """A new file of the output folder, named and counted as the host's own saving nodes do."""
    output = folder_paths.get_output_directory()
    check_prefix(Path(output), prefix)
    try:
        folder, name, counter, _, _ = folder_paths.get_save_image_path(prefix, output)
    except OSError as error:
        raise InputError(f"filename_prefix={prefix!r}: no folder for it can be made ({error.strerror})") from error
    return Path(folder, f"{name}_{counter:05}_{suffix}")


# -- models/vae -------------------------------------------------------------------------------------------------------


def vae_files() -> list[str]:
    """Files of models/vae (all its configured folders) that the engine can read, as the host names them."""
    found: set[str] = set()
    for folder in folder_paths.get_folder_paths("vae"):
        files, _ = folder_paths.recursive_search(folder, excluded_dir_names=[".git"])
        found.update(name for name in files if os.path.splitext(name)[1].lower() in SUFFIXES)
    return sorted(found)


def vae_file(name: str) -> Path:
    """The path of one of `vae_files`."""
    return Path(folder_paths.get_full_path_or_raise("vae", name))


# -- progress ---------------------------------------------------------------------------------------------------------


def progress() -> Callable[[int, int], None]:
    """A progress(done, total) callback that moves the host's bar and ends the work when its stop button is pressed."""
    bars: list[comfy.utils.ProgressBar] = []

    def advance(done: int, total: int) -> None:
        mm.throw_exception_if_processing_interrupted()
        if not bars:
            bars.append(comfy.utils.ProgressBar(total))
        bars[0].update_absolute(done, total)

    return advance
