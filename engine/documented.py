"""Methods that the original documents give the VAE object."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from . import log
from .options import TOGGLES, Options


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


class DocumentedMethods:
    """Documented methods of a VideoVAE; each changes its `options`."""

    options: Options

    @property
    def triton_fusion(self) -> bool:
        """Return `options.triton_fusion`; off runs the plain torch modules instead of the fused kernels."""
        return self.options.triton_fusion

    @triton_fusion.setter
    def triton_fusion(self, on: bool) -> None:
        self.options = self.options.switched(**{"on" if on else "off": ["triton_fusion"]})

    def enable_3d_blackwell_optimizations(
        self,
        enable_channels_last_3d: bool = True,
        enable_flash_attention: bool = True,
        enable_tf32: bool = True,
        verbose: bool = True,
    ) -> None:
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
