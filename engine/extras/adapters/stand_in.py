"""What all stand-ins share: runs of the engine on frames in -1..1, and the calls that programs make to any module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import log
from ...errors import InputError
from ...vae import VideoVAE

#: Values of `tiles`: whole frames under the memory limit, or the tiles that the caller asks for.
TILES = ("whole", "theirs")
TILES_UNUSED = "the caller's tiles are not used: whole frames keep to the memory limit (tiles='theirs' uses them)"


class StandIn(nn.Module):
    """A module without weights of its own, which runs a VAE of this engine.

    Its one parameter tells callers where it is and which type it takes; `to` moves nothing, and gives up the packed
    weights when the caller moves it away.
    """

    def __init__(self, vae: VideoVAE, dtype: torch.dtype, tiles: str, **options: Any) -> None:
        """Wrap a VAE.

        Args:
            vae: a loaded VAE, which may be used in other ways as well.
            dtype: the type that it says it has.
            tiles: one of `TILES`.
            options: those of `VideoVAE.decode` and `encode`: vram_gb, ram_gb, progress, cancel and devices.

        Raises:
            InputError: another value of `tiles`.
        """
        super().__init__()
        if tiles not in TILES:
            raise InputError(f"tiles={tiles!r} is not one of {', '.join(TILES)}")
        #: The engine's VAE; its `last_report` says how the latest call ran.
        object.__setattr__(self, "vae", vae)
        self._options, self._theirs = options, tiles == "theirs"
        self.place = nn.Parameter(torch.zeros(1, dtype=dtype, device=vae.device), requires_grad=False)

    @property
    def device(self) -> torch.device:
        """Return the device of its runs."""
        return self.vae.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that it says it has."""
        return self.place.dtype

    def to(self, *args: Any, **kwargs: Any) -> StandIn:
        """Move nothing: a run takes what it needs to its device. Towards the CPU or another GPU, free what runs have
        left there."""
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        here = self.device
        if device is not None and (device.type != here.type or device.index not in (None, here.index)):
            self.vae.release()
        return self

    def cpu(self) -> StandIn:
        """Do as `to("cpu")` does."""
        return self.to("cpu")

    def _apply(self, fn: Any, recurse: bool = True) -> StandIn:
        """Leave the parameter as it is: it tells the place of the runs."""
        return self

    def frames_of(self, z: Tensor, **options: Any) -> Tensor:
        """Decode raw latents [B, C, T, h, w] to frames [B, 3, F, H, W] in -1..1 and beyond, on the CPU.

        options: others of `VideoVAE.decode`, such as output="float16" (default: float32)."""
        scaled = z.detach().float() * self.vae.scale
        return self.vae.decode(scaled, range="signed", any_vae=True, **options, **self._options).movedim(-1, 1)

    def moments_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode frames [B, 3, F, H, W] in -1..1 to mean and log of the variance [B, C, T, h, w], float32, on the
        CPU."""
        x = x.detach().movedim(1, -1)
        moments = self.vae.encode(x, range="signed", moments=True, **self._options)
        mean, logvar = moments.chunk(2, 1)
        return mean, logvar.clamp(-30.0, 20.0)

    def follows(self, tiled: bool) -> bool:
        """Return whether a call runs in the caller's tiles."""
        if tiled and not self._theirs:
            log.once(TILES_UNUSED, log.info)
        return tiled and self._theirs
