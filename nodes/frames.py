"""The shapes in which ComfyUI carries clips and latents, and the padding its SeedVR2 nodes use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine import InputError, log
from ..engine.memory import available_ram, in_gb

#: The host's SeedVR2 sampler works on 2x2 patches of 8x8-pixel latents.
SIZE_MULTIPLE = 16
#: Key in a LATENT that keeps (frames, height, width) from before padding.
CLIP_SIZE = "zerowaste_clip_size"


def as_clip(images: Tensor) -> Tensor:
    """IMAGE [F, H, W, C] or [B, F, H, W, C] -> [B, F, H, W, 3]: one batch of frames is one clip, alpha is dropped."""
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
    return clip[..., :3]


def pad_clip(clip: Tensor, temporal: int) -> Tensor:
    """Clip [B, F, H, W, 3] clamped to 0..1, black at the bottom and right up to multiples of 16, last frame repeated
    up to temporal * n + 1 frames: what the host's SeedVR2Preprocess does."""
    _, frames, height, width, _ = clip.shape
    low, high = torch.aminmax(clip)
    if not (low >= 0 and high <= 1):  # looking costs less than the copy, which nearly no clip needs
        clip = clip.clamp(0, 1)
    if width % SIZE_MULTIPLE or height % SIZE_MULTIPLE:
        clip = F.pad(clip, (0, 0, 0, -width % SIZE_MULTIPLE, 0, -height % SIZE_MULTIPLE))
    missing = -(frames - 1) % temporal
    return torch.cat([clip, clip[:, -1:].expand(-1, missing, -1, -1, -1)], 1) if missing else clip


def too_many(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """What to say before a decode whose frames [B, F, H, W, 3] are larger than the free host memory, else nothing. It
    is in the log, too: the run may end the process."""
    size, free = math.prod(shape) * dtype.itemsize, available_ram()
    if free is None or size <= free:
        return ""
    text = (f"its {shape[0] * shape[1]} frames take {in_gb(size)} of host memory and {in_gb(free)} are free: Zero-Waste "
            "Decode to Video writes them to a file as they are made")  # fmt: skip
    log.warn(f"decode: {text}")
    return text


def padded(frames: Iterable[Tensor], temporal: int) -> Iterator[Tensor]:
    """Frames [H, W, 3] one by one as `pad_clip` has them, bytes or floats."""
    count, frame = 0, None
    for frame in frames:
        height, width, _ = frame.shape
        if frame.dtype != torch.uint8:
            frame = frame.clamp(0, 1)
        if width % SIZE_MULTIPLE or height % SIZE_MULTIPLE:
            frame = F.pad(frame, (0, 0, 0, -width % SIZE_MULTIPLE, 0, -height % SIZE_MULTIPLE))
        count += 1
        yield frame
    for _ in range(-(count - 1) % temporal if count else 0):
        yield frame


def crop_clip(clip: Tensor, size: tuple[int, int, int] | None, temporal: int) -> Tensor:
    """Undo `pad_clip`: clip [B, F, H, W, 3] -> the first of each of `size` = (frames, height, width).

    A size that does not pad to this clip belongs to another latent (one resized on its way) and is ignored.
    """
    if size is None:
        return clip
    frames, height, width = size
    padded = (frames + -(frames - 1) % temporal, height + -height % SIZE_MULTIPLE, width + -width % SIZE_MULTIPLE)
    return clip[:, :frames, :height, :width] if tuple(clip.shape[1:4]) == padded else clip


def as_latent(samples: Tensor, channels: int) -> Tensor:
    """LATENT samples [B, C, T, h, w], or with channels and time in one axis [B, C*T, h, w] -> [B, C, T, h, w]."""
    if getattr(samples, "is_nested", False):
        samples = samples.unbind()[0]
    if 0 in samples.shape:
        raise InputError(f"The latent is empty ({list(samples.shape)}): connect one with at least one frame")
    if samples.ndim == 5 and samples.shape[1] == channels:
        return samples
    if samples.ndim == 4 and samples.shape[1] % channels == 0:
        batch, _, height, width = samples.shape
        return samples.reshape(batch, channels, -1, height, width)
    raise InputError(
        "The latent comes from another kind of model than this VAE: connect the VAE of that model. This one "
        f"decodes latents [B, {channels}, T, h, w] (or [B, {channels}*T, h, w]), not {list(samples.shape)}"
    )
