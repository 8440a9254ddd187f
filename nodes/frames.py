"""Shapes of clips and latents in ComfyUI, and the padding that its SeedVR2 nodes use. No ComfyUI."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine import InputError, VideoVAE, log
from ..engine.extras.media import latent_note
from ..engine.network.architecture import Architecture
from ..engine.request import check_dense, out_of_range
from ..engine.system.memory import available_ram, in_gb

#: The host's SeedVR2 sampler works on 2x2 patches of 8x8-pixel latents.
SIZE_MULTIPLE = 16
#: Keys in a LATENT: (frames, height, width) from before padding, and the note of the VAE that made it.
CLIP_SIZE, VAE_NOTE = "zerowaste_clip_size", "zerowaste_vae_note"
#: Label of the widget that allows any VAE.
ANY_VAE = "Latents of any VAE"
_CURE = "connect the VAE that made it, or switch on Latents of any VAE on this node"


class Layout:
    """The host's forms of a VAE's inputs and outputs, padding, and sizes for plans, in which pictures are one clip and
    packed latents have the network's form."""

    def __init__(self, architecture: Architecture, latent_channels: int, colours: int) -> None:
        """colours: channels of the encoded images."""
        self._architecture, self._channels, self._colours = architecture, latent_channels, colours
        #: Images have no axis for time, and latents have none.
        self.still, self.flat = architecture.still, architecture.flat
        #: A batch of images, and of latents, is one clip.
        self.joined = architecture.joined
        #: Sides of encoded images are padded to multiples of so many pixels.
        least = 0 if self.still or self.joined else SIZE_MULTIPLE
        self.multiple = max(architecture.spatial * architecture.side, least)

    def latent(self, samples: Tensor) -> Tensor:
        """Return LATENT samples as [B, C, T, h, w].

        samples: [B, C, T, h, w], one in time as [B, C, h, w], or where the family has those (SeedVR2) with channels and
        time in one axis [B, C*T, h, w]; of pictures [B, C, h, w], and of several latents in time the first, as the host
        takes it; [T, C, h, w] where a batch is one clip. Raises InputError on other shapes.
        """
        samples, still, c = of_frames(samples), self.still, self._channels
        folded = self._architecture.folded
        if samples.ndim == 5 and samples.shape[1] == c:
            return samples[:, :, :1] if still else samples
        if self.joined and samples.ndim == 4 and samples.shape[1] == c:
            return samples.movedim(0, 1)[None]
        one = still or self.joined  # channels alone
        if samples.ndim == 4 and (samples.shape[1] == c or (folded and samples.shape[1] % c == 0)):
            batch, _, height, width = samples.shape
            return samples.reshape(batch, c, -1, height, width)
        shapes = f"[{'B' if still else 'T'}, {c}, h, w]" if one else f"[B, {c}, T, h, w]"
        if folded:
            shapes += f" (or [B, {c}*T, h, w])"
        raise InputError(
            "The latent comes from another kind of model than this VAE: connect the VAE of that model. This one "
            f"decodes latents {shapes}, not {list(samples.shape)}"
        )

    def samples(self, latent: Tensor) -> Tensor:
        """Return latents [B, C, T, h, w] in the form of the host's LATENT: the inverse of `latent`."""
        if self.joined:
            return latent.transpose(1, 2).flatten(0, 1)
        return latent[:, :, 0] if self.flat else latent

    def clip(self, images: Tensor, apart: bool = False) -> Tensor:
        """Return an IMAGE [F, H, W, C] or [B, F, H, W, C] as [B, F, H, W, colours], or 3 where it has no more.

        A batch of frames [F, H, W, C] is one clip, or clips of one frame each if `apart` and for an image VAE. Alpha is
        dropped where none is encoded. Raises InputError on other shapes.
        """
        check_dense(images, "a clip")
        if images.ndim not in (4, 5) or images.shape[-1] < 3:
            raise InputError(
                "These are no images with three colours: connect frames [F, H, W, 3] or [B, F, H, W, 3], "
                f"not {list(images.shape)}"
            )
        clip = images if images.ndim == 5 else images.unsqueeze(0)
        if min(clip.shape[:2]) < 1 or min(clip.shape[2:4]) < 8:
            raise InputError(
                f"These images are too small: a clip has at least one frame of 8x8 pixels, not {list(images.shape)}"
            )
        clip = clip[..., : self._colours]
        apart = apart and images.ndim == 4 and not self.joined
        return clip.flatten(0, 1).unsqueeze(1) if self.still or apart else clip

    def shown(self, images: Tensor) -> Tensor:
        """Return frames [B, F, H, W, 3] in the form of the host's own VAE of this kind."""
        if self.joined:
            return images.flatten(0, 1)
        return images[:, 0] if self.still else images

    def latent_size(self, shape: torch.Size) -> tuple[int, int, int, int]:
        """Return the size of samples [B, C, T, h, w], [B, C, h, w] or [B, C*T, h, w], or [T, C, h, w] of one clip."""
        if self.joined and len(shape) == 4:
            return self._size(1, shape[0], *shape[-2:])
        latents, side = shape[2] if len(shape) == 5 else shape[1] // self._channels, self._architecture.side
        return self._size(shape[0], latents, side * shape[-2], side * shape[-1])

    def clip_size(self, batch: int, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the size of the latents that a clip becomes."""
        s, latents = self._architecture.spatial, self._architecture.latents(frames) if frames else 0
        return self._size(batch, latents, height // s, width // s)

    def pixel_size(self, shape: torch.Size) -> tuple[int, int, int, int]:
        """Return the `clip_size` of pixels as the host encodes them: [B, 3, F, H, W], or pictures [B, 3, H, W], which
        may be frames of one clip."""
        if self.joined and len(shape) == 4:
            return self.clip_size(1, shape[0], *shape[-2:])
        return self.clip_size(shape[0], 1 if self.still else shape[2], shape[-2], shape[-1])

    def _size(self, batch: int, latents: int, *sides: int) -> tuple[int, int, int, int]:
        return (1, batch * latents, *sides) if self.still else (batch, latents, *sides)

    def padded_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return frames, height and width after padding: whole latents, and sides of `multiple` pixels."""
        return self._architecture.filled(frames), height + -height % self.multiple, width + -width % self.multiple

    def pad(self, clip: Tensor) -> Tensor:
        """Pad a clip [B, F, H, W, 3] of bytes or of floats, which are clamped to 0..1: black below and to the right,
        the last frame repeated."""
        if clip.dtype != torch.uint8:  # bytes are 0..255
            low, high = torch.aminmax(clip)
            if not (low >= 0 and high <= 1):  # looking costs less than the copy, which nearly no clip needs
                clip = clip.clamp(0, 1)
        frames = clip.shape[1]
        clip, missing = self._black(clip), self._architecture.filled(frames) - frames
        return torch.cat([clip, clip[:, -1:].expand(-1, missing, -1, -1, -1)], 1) if missing else clip

    def padded(self, frames: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield frames [H, W, 3] one by one, padded as `pad` does."""
        count, frame = 0, None
        for frame in frames:
            frame = self._black(frame if frame.dtype == torch.uint8 else frame.clamp(0, 1))
            count += 1
            yield frame
        for _ in range(self._architecture.filled(count) - count if count else 0):
            yield frame

    def _black(self, frames: Tensor) -> Tensor:
        height, width = (-n % self.multiple for n in frames.shape[-3:-1])
        return F.pad(frames, (0, 0, 0, width, 0, height)) if height or width else frames

    def unpadded(self, made: tuple[int, int, int], samples: dict) -> tuple[int, int, int]:
        """Return the frames, height and width that became `made` by padding, as a LATENT keeps them.

        A size that does not pad to `made` belongs to another latent (one resized on its way); then it is `made`.
        """
        size = samples.get(CLIP_SIZE)
        return made if size is None or self.padded_size(*size) != made else tuple(size)

    def crop(self, clip: Tensor, samples: dict) -> Tensor:
        """Undo `pad` on the clip [B, F, H, W, 3] that a LATENT was decoded to."""
        frames, height, width = self.unpadded(tuple(clip.shape[1:4]), samples)
        return clip[:, :frames, :height, :width]


def of_frames(samples: Tensor) -> Tensor:
    """Return LATENT samples; where they hold several kinds (frames, then sound), the first. Raises InputError."""
    if getattr(samples, "is_nested", False):
        samples = samples.unbind()[0]
    check_dense(samples, "a latent")
    if 0 in samples.shape:
        raise InputError(f"The latent is empty ({list(samples.shape)}): connect one with at least one frame")
    return samples


def check_maker(samples: dict, vae: VideoVAE, any_vae: bool) -> None:
    """Refuse a LATENT that another VAE has made, if it carries a note. Raises InputError."""
    note = samples.get(VAE_NOTE)
    latent_note.check(note if isinstance(note, dict) else {}, vae, any_vae, "The latent", _CURE)


def strange(images: Tensor) -> list[str]:
    """Return a note, which is logged too, for images that are clearly not in 0..1, else none."""
    check_dense(images, "a clip")
    why = out_of_range(images)
    if why is not None:
        log.once(f"encode: {why}")
    return [] if why is None else [why]


def crowded(count: int, size: int, free: int | None, clip: bool) -> str:
    """Return why a decode's frames or pictures do not fit into host memory, with the way out; "" if they do.

    size: their bytes; free: bytes of host memory, None if not known; clip: they are one clip, which a file can hold.
    """
    if free is None or size <= free:
        return ""
    if clip:
        return (f"{count} frames take {in_gb(size)} of host memory and {in_gb(free)} are free: use Zero-Waste Decode "
                "to Video, which writes them to a file as they are made")  # fmt: skip
    return f"{count} images take {in_gb(size)} of host memory and {in_gb(free)} are free: decode fewer at a time"


def too_many(shape: tuple[int, ...], dtype: torch.dtype, clip: bool) -> list[str]:
    """Return a warning for a decode whose frames [B, F, H, W, 3] are larger than the free host memory, else none. It is
    logged at once, because the system may end the process. clip: as for `crowded`."""
    text = crowded(shape[0] * shape[1], math.prod(shape) * dtype.itemsize, available_ram(), clip)
    if text:
        log.warn(f"decode: {text}")
    return [text] if text else []


def held(shape: tuple[int, ...], dtype: torch.dtype, clip: bool) -> Tensor:
    """Return host memory for a decode's frames [B, F, H, W, 3]. Raises InputError where the system grants none."""
    try:
        return torch.empty(shape, dtype=dtype, device="cpu")
    except (RuntimeError, MemoryError) as error:
        size = math.prod(shape) * dtype.itemsize
        # What the system counts as free it may still have promised to others.
        why = crowded(shape[0] * shape[1], size, min(available_ram() or 0, size - 1), clip)
        raise InputError(why) from error
