"""The noise that the decoder begins with."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ....network.state import drawn
from ....runtime.allowance import reuses_blocks
from ....runtime.pinned import staging
from ....system.devices import beside, empty_device_cache, uploaded
from ....system.memory import GIB

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
