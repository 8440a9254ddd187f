"""Methods that the original documents give the VAE object."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from . import log
from .options import TOGGLES, Options


class Summed(Protocol):
    """What `summary` asks a VAE."""

    arch: str
    precision: str
    device: object

    def unused(self) -> dict[str, str]: ...


def summary(vae: Summed) -> None:
    """Log what the VAE's runs use, and what they do not and why."""
    off = vae.unused()
    log.info(f"{vae.arch}, {vae.precision} on {vae.device}: {', '.join(n for n in TOGGLES if n not in off) or 'none'}")
    for name, reason in off.items():
        log.info(f"{name} off: {reason}")


class DocumentedMethods:
    """For a VideoVAE; each changes its `options`."""

    options: Options

    @property
    def triton_fusion(self) -> bool:
        """`options.triton_fusion`; off runs the plain torch modules instead of the fused kernels."""
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
        """As compat.optimize_3d_vae_for_blackwell, where the VAE is; verbose logs what its runs use, and what not and
        why."""
        off = [] if enable_channels_last_3d else ["channels_last_3d"]
        flags = {"flash_attention": bool(enable_flash_attention), "tf32": bool(enable_tf32)}
        self.options = replace(self.options.switched(off=off), **flags)
        if verbose:
            summary(self)

    def enable_windows_blackwell_optimizations(self, enable_channels_last: bool = True) -> None:
        """As compat.optimize_for_windows_blackwell, where the VAE is."""
        self.enable_3d_blackwell_optimizations(enable_channels_last, enable_tf32=False)

    def enable_slicing(self) -> None:
        """Nothing is left to do: every run goes step by step in time, in steps the planner chooses."""
        log.info("temporal slicing is always on; `chunk` sets the latents per step")
