"""The outward face of a VAE object: its form in a terminal, for completion, under copy and pickle, and old names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import torch

from . import log
from .options import TOGGLES, Options

#: The documented attributes and methods of a VideoVAE.
SHOWN = (
    "arch", "can_decode", "can_encode", "decode", "decode_raw", "device", "dtype", "encode", "encode_raw",
    "encode_stream", "frames", "last_report", "latent_channels", "options", "path", "plan_decode", "plan_encode",
    "precision", "release", "scale", "spatial", "stream", "temporal",
)  # fmt: skip
T = TypeVar("T")


class Shown(type):
    """The class of VideoVAE: shells complete an object by the names of its class and that class's bases, too."""

    __bases__ = property(lambda cls: ())

    def __dir__(cls) -> list[str]:
        """Return the documented names only."""
        return list(SHOWN)


class Face(metaclass=Shown):
    """The answers of a loaded VAE to `repr`, `dir`, `copy` and `pickle`."""

    arch: str
    precision: str
    device: torch.device
    path: Path | None

    def __repr__(self) -> str:
        """Return its family, precision, device and file."""
        return f"<VideoVAE {self.arch}, {self.precision} on {self.device}{f', {self.path}' if self.path else ''}>"

    def __dir__(self) -> list[str]:
        """Return the documented names only, for completion."""
        return list(SHOWN)

    def __copy__(self: T) -> T:
        """Return a view with the same weights, as `copy.copy` makes it; pickling is refused below."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled."""
        raise TypeError("a VideoVAE cannot be pickled: give other processes the file's path and `load` it there")


class OldNames:
    """Methods of a VideoVAE under the names of the original documents; each changes its `options`.

    They are here and not in engine/compat, which needs the VideoVAE.
    """

    options: Options

    @property
    def triton_fusion(self) -> bool:
        """Return `options.triton_fusion`; off runs the plain torch modules instead of the fused kernels."""
        return self.options.triton_fusion

    @triton_fusion.setter
    def triton_fusion(self, on: bool) -> None:
        self.options = replace(self.options, triton_fusion=on)

    def enable_3d_blackwell_optimizations(
        self, enable_channels_last_3d: bool = True, enable_flash_attention: bool = True, enable_tf32: bool = True,
        verbose: bool = True,
    ) -> None:  # fmt: skip
        """Set the options as compat.optimize_3d_vae_for_blackwell does, on the VAE's present device.

        verbose: log the optimisations that runs use, and the others with the reason.
        """
        off = [] if enable_channels_last_3d else ["channels_last_3d"]
        flags = {"flash_attention": bool(enable_flash_attention), "tf32": bool(enable_tf32)}
        self.options = replace(self.options.switched(off=off), **flags)
        if verbose:
            summary(self)

    def enable_windows_blackwell_optimizations(self, enable_channels_last: bool = True) -> None:
        """Set the options as compat.optimize_for_windows_blackwell does, on the VAE's present device."""
        self.enable_3d_blackwell_optimizations(enable_channels_last, enable_tf32=False)

    def enable_slicing(self) -> None:
        """Log that nothing is left to do: every run goes step by step in time, in steps that the planner chooses."""
        log.info("temporal slicing is always on; `chunk` sets the latents per step")


class Summed(Protocol):
    """The part of a VAE that `summary` reads."""

    arch: str
    precision: str
    device: object

    def unused(self) -> dict[str, str]: ...


def summary(vae: Summed) -> None:
    """Log the optimisations that the VAE's runs use, and each one they do not use with the reason."""
    off = vae.unused()
    log.info(f"{vae.arch}, {vae.precision} on {vae.device}: {', '.join(n for n in TOGGLES if n not in off) or 'none'}")
    for name, reason in off.items():
        log.info(f"{name} off: {reason}")
