"""Methods that the original documents give the VAE object."""

from __future__ import annotations

from .. import log
from ..options import Options


class DocumentedMethods:
    """For a VideoVAE; each changes its `options`."""

    options: Options

    def enable_3d_blackwell_optimizations(
        self,
        enable_channels_last_3d: bool = True,
        enable_flash_attention: bool = True,
        enable_tf32: bool = True,
        verbose: bool = True,
    ) -> None:
        """As compat.optimize_3d_vae_for_blackwell, where the VAE is; verbose logs what its runs use, and what not and
        why."""
        flags = {"flash_attention": enable_flash_attention, "tf32": enable_tf32}
        off = [name for name, on in flags.items() if not on]
        off += [] if enable_channels_last_3d else ["channels_last_3d"]
        self.options = self.options.switched([name for name, on in flags.items() if on], off)
        if verbose:
            from .passes import summary

            summary(self)

    def enable_windows_blackwell_optimizations(self, enable_channels_last: bool = True) -> None:
        """As compat.optimize_for_windows_blackwell, where the VAE is."""
        self.enable_3d_blackwell_optimizations(enable_channels_last, enable_tf32=False)

    def enable_slicing(self) -> None:
        """Nothing is left to do: every run goes step by step in time, in steps the planner chooses."""
        log.info("temporal slicing is always on; `chunk` sets the latents per step")
