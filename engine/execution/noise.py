"""Normal noise that decoders begin with or that is part of their latents."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..network.state import drawn
from ..network.steps import Latents
from ..runtime.allowance import reuses_blocks
from ..runtime.pinned import staging
from ..system.devices import beside, empty_device_cache, uploaded
from ..system.memory import GIB


def with_noise(latent: Tensor, share: float, seed: int) -> Tensor:
    """Return latents [B, C, T, h, w] with a `share` of noise, drawn for each clip and each frame in it."""
    return torch.stack([_noisy(z, share, seed, clip, 0) for clip, z in enumerate(latent)])


def _noisy(part: Tensor, share: float, seed: int, clip: int, first: int) -> Tensor:
    """Add noise to part [C, n, h, w] of a clip, from its latent `first` on; float32, whatever type the latents have."""
    noisy = torch.empty_like(part, dtype=torch.float32)
    for frame in range(part.shape[1]):
        here = part[:, frame].float()
        noise = drawn(seed, f"latent {clip} {first + frame}", *here.shape).to(here)
        noisy[:, frame] = here * (1.0 - share) + noise * share
    return noisy


class Noisy:
    """Latents that are read when they are needed, with noise as from `with_noise`."""

    def __init__(self, latents: Latents, share: float, seed: int) -> None:
        self._latents, self._share, self._seed = latents, share, seed
        self.shape = latents.shape

    def __getitem__(self, place: tuple[int, slice, slice]) -> Tensor:
        clip, _, frames = place
        return _noisy(self._latents[place], self._share, self._seed, clip, frames.indices(self.shape[2])[0])


#: Frames of noise that are copied to host memory at once.
PART = 8
#: Such parts that may be laid out on the device at once.
PARTS = 2


class FrameNoise:
    """The noise that a decoder begins with, frame by frame of a whole clip, the same for every clip of a batch.

    Without a seed it is what ComfyUI draws for a whole clip: one draw with seed 0, on the device and in the type of the
    VAE. It waits in host memory, and is copied to a GPU while that works. A seed's noise goes by the place of a frame
    alone, however long the clip is.

    Where the device has room for the draw until a frame is asked for, the copy to host memory has a stream of its own,
    and neither the host nor the GPU's work before that waits for it.

    Attributes:
        corner: the first row and column, in pixels, of the tile that the noise is for.
        first: the clip's frame that frames are counted from.
    """

    def __init__(
        self, seed: int | None, frames: int, height: int, width: int, dtype: torch.dtype, device: torch.device,
        clips: int = 1, room: int = 0,
    ) -> None:  # fmt: skip
        """Draw the noise of `clips` clips at once. room: bytes that the device has for it until it is asked for."""
        self.corner, self.first = (0, 0), 0
        self._seed, self._size, self._device = seed, (3, height, width), device
        #: The draw on the device, and the end of its copy, until that is known to be reached.
        self._copying: tuple[Tensor, torch.cuda.Event] | None = None
        if seed is None:
            generator = torch.Generator(device).manual_seed(0)
            made = torch.randn(clips, 3, frames, height, width, generator=generator, device=device, dtype=dtype)
            shape = clips, frames, 3, height, width
            locked = staging(shape, dtype) if device.type == "cuda" else None
            self._drawn = torch.empty(shape, dtype=dtype, device="cpu") if locked is None else locked
            part = made[:1, :, :PART].nbytes  # in parts: each is laid out anew on the device
            goes_on = locked is not None and made.nbytes + PARTS * part <= room
            with beside(device) if goes_on else nullcontext():
                for ours, theirs in zip(self._drawn, made, strict=True):
                    for a in range(0, frames, PART):
                        ours[a : a + PART].copy_(theirs[:, a : a + PART].transpose(0, 1), non_blocking=goes_on)
                if goes_on:
                    self._copying = made, torch.cuda.current_stream(device).record_event()

    @property
    def copying(self) -> bool:
        """Return True from a draw for which the host did not wait until its first frame is asked for."""
        return self._copying is not None

    def settle(self) -> None:
        """Wait until all noise is in host memory, and free the GPU memory that it was drawn in."""
        if self._copying is not None:
            self._copying[1].synchronize()
            self._copying = None
            if not reuses_blocks():
                empty_device_cache()

    def __call__(self, frame: int, clip: int = 0) -> Tensor:
        """Return a frame's noise from the corner on, [3, H, W], on the device."""
        self.settle()
        frame += self.first
        whole = self._drawn[clip, frame] if self._seed is None else drawn(self._seed, f"frame {frame}", *self._size)
        part = whole[:, self.corner[0] :, self.corner[1] :]
        if self._device.type != "cuda":
            return part.to(self._device)
        return uploaded(part, self._device)


def words_of_noise(seed: int | None, frames: int, height: int, width: int, dtype: torch.dtype) -> str:
    """Return what the report says of `FrameNoise`."""
    if seed is not None:
        return f"of seed {seed}, by the place of each frame"
    size = 3 * frames * height * width * dtype.itemsize / GIB
    return f"one draw of the whole clip with seed 0, as ComfyUI's; {size:.2f} GB of host memory"


def noised(
    latents: Tensor | Latents, seed: int | None, noise: float | None, config: Any, name: str
) -> tuple[Tensor | Latents, int | None]:
    """Return latents with the noise that a decoder expects, and the seed of the noise it adds itself or None.

    Args:
        latents: [B, C, T, h, w].
        seed: of the noise; None for 0.
        noise: share of noise in the latents' values; None for `usual`.
        config: of the file's networks: `noise` is the share that it states, none if the decoder takes no noise;
            `begins_with_noise` if there is noise beside the latents.
        name: name of the family.

    Raises: InputError if the decoder takes no noise, or for a share outside 0 to 1.
    """
    usual = getattr(config, "noise", 0.0)
    if getattr(config, "begins_with_noise", False):
        if noise:
            raise InputError(f"the latents of {name} take no share of noise: leave noise out")
        return latents, seed
    if not usual and (seed is not None or noise):
        raise InputError(f"the decoder of {name} takes no noise: leave seed and noise out")
    share = usual if noise is None else noise
    if not 0.0 <= share <= 1.0:
        raise InputError(f"noise={noise} is not a share: give 0 to 1")
    if not share:
        return latents, None
    made = with_noise if isinstance(latents, Tensor) else Noisy
    return made(latents, share, seed or 0), seed or 0
