"""The interface of diffusers' VAEs, for pipelines: pipe.vae = for_diffusers(pipe.vae)."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import log
from ...errors import InputError
from ...loader import load
from ...runtime.pinned import sent
from .stand_in import StandIn
from .tiles import in_pieces

#: Families whose numbers are diffusers', or can be.
FAMILIES = ("wan2.1", "wan2.2", "sd", "flux", "flux2", "svd", "hunyuanvideo", "cogvideox")
#: Families whose long clips diffusers runs in pieces along time, unless it is told otherwise: frames of a piece, and
#: frames from one to the next. A piece has one frame more, which it shares with the one before.
PIECES = {"hunyuanvideo": (16, 12)}
#: Classes of diffusers that clamp their frames to -1..1.
CLAMPED = ("AutoencoderKLWan", "AutoencoderKLQwenImage")
CONFIG = "config.json"


class Decoded(NamedTuple):
    """Result of a decode."""

    sample: Tensor


class Encoded(NamedTuple):
    """Result of an encode."""

    latent_dist: Gaussian


class Gaussian:
    """A diagonal Gaussian of latents, as diffusers' DiagonalGaussianDistribution.

    Attributes:
        parameters: mean and log of the variance, one behind the other on axis 1.
        mean, logvar, std, var: of the same shape as a latent.
    """

    def __init__(self, mean: Tensor, logvar: Tensor) -> None:
        self.parameters = torch.cat((mean, logvar), 1)
        self.mean, self.logvar = mean, logvar
        self.std, self.var = torch.exp(0.5 * logvar), torch.exp(logvar)

    def mode(self) -> Tensor:
        """Return the mean."""
        return self.mean

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Return a sample; the noise is drawn on the generator's device."""
        where = self.mean.device if generator is None else generator.device
        noise = torch.randn(self.mean.shape, generator=generator, device=where, dtype=self.mean.dtype)
        return self.mean + self.std * noise.to(self.mean.device)


class Config(dict[str, Any]):
    """Configuration read from a file: its values are items and attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the VAE's configuration has no {name!r}") from None


class DiffusersVAE(StandIn):
    """A stand-in for a VAE of diffusers. Latents are the network's own, frames about -1..1; results have the type and
    the device of the input.

    Attributes:
        config: as diffusers has it.
    """

    def __init__(self, given: nn.Module | str | os.PathLike[str], precision: str, dtype: torch.dtype | None,
                 device: torch.device | str | None, options: dict[str, Any]) -> None:  # fmt: skip
        """Args: those of `for_diffusers`."""
        if isinstance(given, nn.Module):
            config, source = given.config, given
            first = next(given.parameters())
            dtype = dtype or first.dtype
            # A pipeline that waits on the CPU moves to its GPU later, which moves nothing here.
            device = device or (first.device if first.device.type != "cpu" else None)
        else:
            config, source = _stored(Path(given))
        vae = load(source, precision, device, as_in_diffusers=True)
        if vae.arch not in FAMILIES:
            what = "this VAE" if isinstance(given, nn.Module) else given
            raise InputError(f"{what}: for_diffusers does not stand in for {vae.arch}: keep diffusers' own VAE")
        super().__init__(vae, dtype or torch.float32, "whole", **options)
        object.__setattr__(self, "config", config)
        self._clamped = config.get("_class_name", type(given).__name__) in CLAMPED
        self._still = vae.architecture.still
        #: Plain values that pipelines read from diffusers' object, such as its factors, without its weights.
        object.__setattr__(self, "_given", _hollow(given) if isinstance(given, nn.Module) else None)
        if vae.model.packing is not None:
            object.__setattr__(self, "bn", vae.model.packing)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        given = self.__dict__.get("_given")
        if given is not None and not name.startswith("_"):
            value = getattr(given, name, None)
            if isinstance(value, bool | int | float | str | list | tuple | Tensor):
                return value
        config = self.__dict__.get("config", {})
        if name in config:
            return config[name]
        raise AttributeError(f"DiffusersVAE has no attribute {name!r}")

    def decode(
        self, z: Tensor, *_: Any, return_dict: bool = True, num_frames: int | None = None, **__: Any
    ) -> Decoded | tuple[Tensor]:
        """Decode raw latents: [B, C, T, h, w] to [B, 3, F, H, W], or of pictures [B, C, h, w] to [B, 3, H, W].

        Args:
            num_frames: for Stable Video Diffusion, frames of a clip: latents are [B * F, C, h, w].
            return_dict: False gives a tuple.
        """
        self._about_to_run()
        # Frames go to host memory and, for a pipeline on a GPU, back: in 16 bit where the result has no more (fp16's 11
        # bits are more than bf16's 8).
        brief = {"output": "float16" if z.dtype.itemsize == 2 else "float32"}
        if num_frames is not None and not self._still and z.ndim == 4:
            y = self.frames_of(z.unflatten(0, (-1, num_frames)).transpose(1, 2), **brief).transpose(1, 2).flatten(0, 1)
        elif self._still:
            y = self.frames_of(self._packed(z), **brief)[:, :, 0]
        elif (pieces := self._pieces("decoding", 1 / self.vae.temporal)) is None:
            y = self.frames_of(z, **brief)
        else:
            y = in_pieces(z, self.frames_of, pieces, self._pieces("decoding", 1))
        y = sent(y, z.device).to(z.dtype)  # the GPU is the faster one for the second, and for the clamp
        y = y.clamp_(-1.0, 1.0) if self._clamped else y
        return Decoded(y) if return_dict else (y,)

    def encode(self, x: Tensor, return_dict: bool = True, **_: Any) -> Encoded | tuple[Gaussian]:
        """Encode frames [B, 3, F, H, W], or pictures [B, 3, H, W], in -1..1. Raises InputError for frames beyond 4n + 1
        of a family whose norms would see them in diffusers."""
        picture, rate = x.ndim == 4, self.vae.temporal
        if not picture and self.vae.architecture.in_diffusers is not None and x.shape[2] % rate != 1:
            raise InputError(f"{x.shape[2]} frames do not fill latents: {self.vae.arch} takes {rate}n + 1 here")
        self._about_to_run()
        moments = in_pieces(x[:, :, None] if picture else x, lambda x: torch.cat(self.moments_of(x), 1),
                            self._pieces("encoding", 1), self._pieces("encoding", 1 / rate))  # fmt: skip
        mean, logvar = (m[:, :, 0] if picture else m for m in moments.chunk(2, 1))
        found = Gaussian(mean.to(x), logvar.to(x))
        return Encoded(found) if return_dict else (found,)

    def forward(self, *_: Any, **__: Any) -> None:
        """Refuse to train: raises InputError."""
        raise InputError("this VAE decodes and encodes, and cannot be trained: train diffusers' own")

    def _packed(self, z: Tensor) -> Tensor:
        """Return latents of pictures in the form that `VideoVAE.decode` takes, before its scale."""
        packing = self.vae.model.packing
        return z if packing is None else packing.pack(z[:, :, None].float()).to(z.device)

    def _pieces(self, way: str, scale: float) -> tuple[int, int] | None:
        """Return the frames of a piece of a clip along time, and those from one to the next; None: clips are whole.

        way: "decoding" or "encoding". scale: samples per frame. Raises InputError where they are no whole latents."""
        usual, given = PIECES.get(self.vae.arch), self.__dict__.get("_given")
        if usual is None or not getattr(given, f"use_framewise_{way}", True):
            return None
        names = "tile_sample_min_num_frames", "tile_sample_stride_num_frames"
        frames = {name: getattr(given, name, n) for name, n in zip(names, usual, strict=True)}
        for name, count in frames.items():
            if count % self.vae.temporal:
                raise InputError(f"{name}={count}: frames beyond a latent are seen by norms in diffusers; give a "
                                 f"multiple of {self.vae.temporal}")  # fmt: skip
        return tuple(int(count * scale) for count in frames.values())

    def _about_to_run(self) -> None:
        """Tell accelerate's offloading that this model's turn has come, so that the one before it leaves the GPU."""
        hook = getattr(self, "_hf_hook", None)
        if hook is not None and hasattr(hook, "pre_forward"):
            hook.pre_forward(self)

    # -- switches of diffusers ------------------------------------------------------------------------------------

    def enable_tiling(self, *_: Any, **__: Any) -> None:
        """Log that nothing is left to do."""
        log.once("tiling and slicing are not used: whole frames keep to the memory limit (vram_gb)", log.info)

    enable_slicing = disable_tiling = disable_slicing = enable_tiling
    use_tiling = use_slicing = False


def for_diffusers(
    given: nn.Module | str | os.PathLike[str], *, precision: str = "auto", dtype: torch.dtype | None = None,
    device: torch.device | str | None = None, vram_gb: float | None = None, ram_gb: float | None = None, **options: Any,
) -> DiffusersVAE:  # fmt: skip
    """Return an object for `pipe.vae` of a diffusers pipeline.

    It runs Wan 2.1 and 2.2, Qwen-Image, Stable Diffusion's and Flux's AutoencoderKL, Flux.2, Stable Video Diffusion,
    HunyuanVideo and CogVideoX. The last two have diffusers' numbers here: plain torch runs them, and HunyuanVideo's
    long clips in diffusers' pieces along time.

    Args:
        given: a VAE of diffusers (its tensors are shared where the type fits); the folder of one, with its config.json;
            or a weight file beside a config.json.
        precision: as for `load`.
        dtype: the type that pipelines cast latents and frames to; None: the module's, else float32.
        device: of the runs; None: the module's GPU if it is on one, else CUDA if there is one.
        vram_gb, ram_gb: memory targets of each run in GB (2^30 bytes).
        options: others of `VideoVAE.decode` and `encode`: progress, cancel, devices.

    Raises:
        CheckpointError: unreadable files or no known VAE.
        InputError: no configuration, or a family whose numbers differ in diffusers.
    """
    return DiffusersVAE(given, precision, dtype, device, {"vram_gb": vram_gb, "ram_gb": ram_gb, **options})


def _hollow(given: nn.Module) -> nn.Module:
    """Return a copy of a module without its parameters and inner modules, which would keep the GPU's memory."""
    kept = copy.copy(given)
    kept._parameters, kept._modules = {}, {}
    return kept


def _stored(path: Path) -> tuple[Config, Path]:
    """Return the configuration and the weight file that a path names. Raises InputError."""
    folder = path if path.is_dir() else path.parent
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / CONFIG}: {error}; for_diffusers needs the VAE's configuration") from error
    if not isinstance(config, Mapping):
        raise InputError(f"{folder / CONFIG} is no configuration: it holds {type(config).__name__}")
    files = sorted(folder.glob("*.safetensors")) if path.is_dir() else [path]
    if len(files) != 1:
        raise InputError(f"{folder} holds {len(files)} .safetensors files: name one")
    return Config(config), files[0]
