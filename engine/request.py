"""The user's request: how a clip is to be run, and the checks of latents and videos."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import log
from .errors import InputError
from .network.tiles import check_tile
from .runtime.pixels import OUTPUTS
from .system.finite import all_finite

if TYPE_CHECKING:
    from PIL.Image import Image

    from .network.program import Program

#: Frames as they may be given: a tensor, a numpy array or a picture, or a list of these. Latents: one of the first two.
FramesLike: TypeAlias = "Tensor | np.ndarray[Any, Any] | Image | Sequence[FramesLike]"
LatentLike: TypeAlias = "Tensor | np.ndarray[Any, Any]"


class Group(Protocol):
    """Processes that share a call (extras/distributed/ranks.Ranks). rank: of this one."""

    rank: int
    count: int


#: Names of devices (also as one string with commas), "all", None or "auto" for the VAE's own alone; or a group.
Devices: TypeAlias = Group | Sequence[str | torch.device] | str | None
#: Attribute of a latent that holds the note of the VAE which made it. Operations that make a new tensor drop it.
NOTE = "vae_note"
#: Values of options, for type checkers.
Tiling = Literal["auto", "untiled", "exact", "blended"]
Output = Literal["float32", "float16", "uint8"]
NativeBlend = Literal["assembled", "separate"]
NativeTiles = Literal["family", "trained"]
Range = Literal["unit", "signed"]
#: 2^63 bytes.
MOST_GB = 2**33
#: Frames are clearly of another range than 0..1 with a value above MOST, or more than LEAST_SHARE of them below LEAST.
#: Sharpening and scaling go less far beyond 0 and 1.
MOST, LEAST, LEAST_SHARE = 2.0, -0.1, 0.01
#: Pixels that blended tiles share by default.
OVERLAP = 64
TILINGS = ("auto", "untiled", "exact", "blended")
#: Ranges of frames: 0..1, clamped in results; or -1..1 as networks have them, not clamped.
RANGES = ("unit", "signed")
#: How a decoder that tiles itself blends a tile: with its neighbours as they already are in the picture, or as they
#: came. ComfyUI does the first after 0.33.0, and did the second up to it.
NATIVE_BLENDS = ("assembled", "separate")
#: The tiles of a decoder that tiles itself: its family's, or those that its weights were trained with.
NATIVE_TILES = ("family", "trained")
#: Refusals of the two by VAEs that have no such tiles.
NO_NATIVE_BLEND = "native_blend is for VAEs that tile themselves (MiniMax H3): leave it out"
NO_TRAINED_TILES = (
    "native_tiles='trained' is for decoders that were trained in other tiles than their family's (LynnReal): leave it "
    "out"
)


@dataclass(frozen=True)
class Request:
    """The way a decode or encode is to be run; 0 and None leave the choice to the planner.

    Args:
        tiling: "untiled" runs whole frames, "exact" equals them (fused on a GPU in bands of `tile` rows, where that is
            given), "blended" uses tiles of `tile` pixels (0: chosen for the target) sharing `overlap` pixels (None:
            `usual_overlap`); "auto" runs whole frames, or else whatever fits, and says so.
        chunk: latents per step.
        vram_gb, ram_gb: memory targets in GB (2^30 bytes) for the device and for parked histories.
        output: type of a decode's frames: "float32", "float16" or "uint8" (0..255).
        native_blend: one of `NATIVE_BLENDS`, for decoders that tile themselves.
        range: "unit" for frames in 0..1; "signed" for frames in -1..1 as the network takes and makes them: a decode's
            are not clamped, and an encode takes any values.
        native_tiles: one of `NATIVE_TILES`; "trained" is for decoders that were trained with other tiles than their
            family's.

    Raises:
        InputError: a value that no VAE can serve.
    """

    tiling: str = "auto"
    tile: int = 0
    overlap: int | None = None
    chunk: int = 0
    vram_gb: float | None = None
    ram_gb: float | None = None
    output: str = "float32"
    native_blend: str = NATIVE_BLENDS[0]
    range: str = RANGES[0]
    native_tiles: str = NATIVE_TILES[0]

    def __post_init__(self) -> None:
        choices = {"tiling": TILINGS, "output": OUTPUTS, "range": RANGES, "native_blend": NATIVE_BLENDS,
                   "native_tiles": NATIVE_TILES}  # fmt: skip
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise InputError(f"{name}={value!r} is not one of {', '.join(known)}")
        if self.signed and self.output == "uint8":
            raise InputError("range='signed' is not clamped, and bytes are: use output='float32' or 'float16'")
        check_whole(tile=self.tile, overlap=self.overlap, chunk=self.chunk)
        if self.overlap is None:
            object.__setattr__(self, "overlap", usual_overlap(self.tile))
        for name in ("tile", "overlap"):  # also where the tiling takes none
            if (value := getattr(self, name)) < 0:
                raise InputError(f"{name}={value} is below 0: give pixels")
        if self.chunk < 0:
            raise InputError(f"chunk={self.chunk} is below 0: give latents per chunk, or 0 for automatic")
        check_sizes(self.vram_gb, self.ram_gb)

    @property
    def signed(self) -> bool:
        """Return whether frames are in -1..1."""
        return self.range == "signed"

    @property
    def trained(self) -> bool:
        """Return whether a decoder that tiles itself takes the tiles that its weights were trained with."""
        return self.native_tiles == "trained"

    @property
    def way(self) -> tuple[str, ...]:
        """Return how a decoder that tiles itself divides and blends."""
        return self.native_blend, *(self.native_tiles,) * self.trained

    def native_refusal(self, trained: bool = False) -> str:
        """Return why a VAE cannot run it that does not tile itself, or (`trained`) was trained in its family's tiles;
        "": it can."""
        if not trained and self.native_blend != NATIVE_BLENDS[0]:
            return NO_NATIVE_BLEND
        return NO_TRAINED_TILES if self.trained else ""

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the frames."""
        return OUTPUTS[self.output]

    def check(self, spatial: int) -> None:
        """Refuse tiles that a VAE with `spatial` pixels per latent pixel cannot have. Raises InputError."""
        if self.tiling in ("exact", "blended"):
            check_tile(self.tile, self.overlap if self.tiling == "blended" else 0, spatial)
        elif self.tile:
            log.once(f"tile={self.tile} is not used with tiling {self.tiling}: it is for exact and blended")


def usual_overlap(tile: int) -> int:
    """Return the default overlap of tiles of this size in pixels: OVERLAP, or half of a tile that is no larger; 0 is a
    planned size."""
    return tile // 2 if 0 < tile <= OVERLAP else OVERLAP


def check_whole(**values: object) -> None:
    """Refuse values that are given and are no whole numbers. Raises InputError."""
    for name, value in values.items():
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
            raise InputError(f"{name}={value!r} is no whole number: give one")


def check_sizes(vram_gb: float | None, ram_gb: float | None) -> None:
    """Refuse sizes that are below 0, no number or beyond the addressable. Raises InputError."""
    for name, value in (("vram_gb", vram_gb), ("ram_gb", ram_gb)):
        if isinstance(value, Real) and value < 0:
            raise InputError(f"{name}={value!r} is below 0: give GB (2^30 bytes), or 0 for automatic")
        if value is not None and not (isinstance(value, Real) and 0 <= value <= MOST_GB):
            raise InputError(f"{name}={value!r} is not a size: give GB (2^30 bytes), or 0 for automatic")


def check_seed(seed: int | None) -> None:
    """Refuse a seed that torch does not take. Raises InputError."""
    check_whole(seed=seed)
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise InputError(f"seed={seed} is too large: give a number of at most 64 bits")


def check_part(start: int, frames: int | None, count: int) -> range:
    """Return frames [start, start + frames) of `count`; None: up to the end. Raises InputError where there are none."""
    check_whole(start=start, frames=frames)
    if not 0 <= start < count:
        raise InputError(f"start={start} is no frame of this clip: it has {count}, numbered from 0")
    if frames is not None and frames < 1:
        raise InputError(f"frames={frames} is too few: give at least 1, or none for all")
    return range(start, count if frames is None else min(start + frames, count))


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse an `out` that cannot hold frames of this shape and type. Raises InputError."""
    check_dense(out, "out")
    if (tuple(out.shape), out.dtype, out.device.type) != (shape, dtype, "cpu"):
        given = f"{out.dtype} {list(out.shape)} on {out.device}"
        raise InputError(f"out is {given}: the frames need {dtype} {list(shape)} on cpu")


def check_latent(latent: LatentLike, channels: int, still: bool = False) -> Tensor:
    """Check a latent and return it as [B, C, T, h, w].

    Args:
        latent: [C, T, h, w], or if `still` [B, C, h, w], or [B, C, T, h, w]; floats, in a tensor or a numpy array.

    Raises:
        InputError: another shape or type, no values, or NaN or Inf.
    """
    latent = as_tensor(latent, "a latent")
    if not latent.is_floating_point():
        raise InputError(f"a latent is a tensor of floats, not {_kind(latent)}")
    check_dense(latent, "a latent")
    z = latent.unsqueeze(2 if still else 0) if latent.ndim == 4 else latent
    c = channels
    if z.ndim != 5 or z.shape[1] != c:
        short = f"[B, {c}, h, w]" if still else f"[{c}, T, h, w]"
        raise InputError(f"a latent of this VAE is [B, {c}, T, h, w] or {short}, not {list(latent.shape)}")
    if min(z.shape) < 1:
        raise InputError(f"the latent {list(latent.shape)} is empty: it needs at least one frame and pixel")
    if z.dtype.itemsize == 1:  # torch knows little of such floats
        z = z.float()
    if not all_finite(z):
        raise InputError("the latent holds NaN or Inf: the step that made it failed")
    return z


def check_frame(program: Program, height: int, width: int) -> None:
    """Refuse latents of fewer rows or columns than the network's border handling needs. Raises InputError."""
    least = program.style.least
    if min(height, width) < least:
        raise InputError(f"this VAE's borders reflect the frame: it takes at least {least}x{least} latent pixels, not "
                         f"{width}x{height}")  # fmt: skip


def check_dense(value: Tensor, what: str) -> None:
    """Refuse what is no tensor, and a tensor that is no plain array of values: sparse, nested and meta ones. Raises
    InputError."""
    if not isinstance(value, Tensor):
        raise InputError(f"{what} is a tensor, not {_kind(value)}")
    if value.is_nested:
        raise InputError(f"{what} is one tensor, not a nested one: give its parts one by one (unbind)")
    if value.is_meta:
        raise InputError(f"{what} is on the meta device, which holds no values: give one that was computed")
    if value.layout != torch.strided:
        raise InputError(f"{what} is a dense tensor, not a sparse one: give to_dense() of it")


def as_tensor(given: object, what: str) -> Tensor:
    """Return a tensor or a numpy array as a tensor, which may share its memory.

    Args:
        given: what the caller gave.
        what: its name in errors: "a latent", "a video".

    Raises:
        InputError: it is something else, or an array of a type that no latents or frames have.
    """
    if isinstance(given, Tensor):
        return given
    if isinstance(given, np.ndarray):
        if given.dtype != np.uint8 and not (given.dtype.kind == "f" and given.dtype.itemsize <= 8):
            raise InputError(f"{what} of {given.dtype} is none: give floats, of frames in 0..1, or frames as bytes "
                             "(uint8)")  # fmt: skip
        # torch takes neither the other order of bytes nor rows that run backwards, and warns of read-only memory.
        return torch.from_numpy(np.require(given, given.dtype.newbyteorder("="), "CW"))
    if isinstance(given, dict) and "samples" in given:
        raise InputError(f"{what} is a tensor, not ComfyUI's dict of one: give its [\"samples\"]")
    if isinstance(given, (str, os.PathLike)):
        raise InputError(f"{what} is a tensor, not a path: read the file first (read_latent, read_video)")
    raise InputError(f"{what} is a tensor or a numpy array, not {_kind(given)}")


def as_frames(given: object, colours: int = 3, what: str = "a video") -> Tensor:
    """Return frames as a tensor, which may share their memory.

    Args:
        given: a tensor or numpy array; a PIL picture, which becomes [H, W, colours] bytes; or a list of these, all of
            one size and type, which get one more axis.
        colours: channels that pictures get.
        what: its name in errors.

    Raises:
        InputError: it is something else, or the parts of a list differ.
    """
    pillow = sys.modules.get("PIL.Image")  # a picture's own program has imported it
    if pillow is not None and isinstance(given, pillow.Image):
        if given.mode.startswith(("I", "F")):
            raise InputError(f"{what}: a picture of mode {given.mode} has no range of its own: give an array of floats "
                             "in 0..1")  # fmt: skip
        return torch.from_numpy(np.array(given.convert("RGBA" if colours == 4 else "RGB")))
    if isinstance(given, Iterator):
        raise InputError(f"{what} is a tensor or a list, not an iterator: encode_stream takes one; or give list(...)")
    if not isinstance(given, (list, tuple)):
        return as_tensor(given, what)
    if not given:
        raise InputError(f"{what} is an empty list: it needs at least one frame")
    parts = [as_frames(one, colours, what) for one in given]
    first, *rest = ((part.dtype, list(part.shape), part.device) for part in parts)
    for number, one in enumerate(rest, 1):
        if one != first:
            (kind, shape, _), (kind0, shape0, _) = one, first
            raise InputError(f"{what}: item {number} of the list is {kind} {shape}, item 0 {kind0} {shape0}: give all "
                             "in one size, type and device")  # fmt: skip
    return torch.stack(parts)


def iter_frames(given: Iterable[FramesLike]) -> Iterator[FramesLike]:
    """Return an iterator over frames. Raises InputError where there is none."""
    try:
        return iter(given)
    except TypeError:
        raise InputError(f"frames come one after the other, and {_kind(given)} is not iterable: give one frame as "
                         "[frame]") from None  # fmt: skip


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def check_video(
    video: FramesLike, spatial: int, still: bool = False, colours: int = 3, any_range: bool = False,
    signed: bool = False,
) -> Tensor:  # fmt: skip
    """Check frames and return them as [B, F, H, W, colours].

    Args:
        video: [F, H, W, 3], or if `still` [B, H, W, 3], or [B, F, H, W, 3], or one picture [H, W, 3]; floats in 0..1
            or uint8, in any form that `as_frames` takes.
        spatial: the least height and width in pixels.
        colours: channels of a pixel; where RGB lacks one (alpha), it is filled with the full value.
        any_range: also take values of another range than 0..1.
        signed: values are in -1..1 and beyond.

    Raises:
        InputError: another shape, type or range, or NaN or Inf.
    """
    video = as_frames(video, colours)
    if not (video.is_floating_point() or video.dtype == torch.uint8):
        raise InputError(f"video frames are a tensor of floats in 0..1 or of bytes (uint8), not {_kind(video)}")
    check_dense(video, "a video")
    x = video[None] if video.ndim == 3 else video
    x = x.unsqueeze(1 if still else 0) if x.ndim == 4 else x
    if x.ndim == 5 and x.shape[-1] == 3 < colours:
        x = F.pad(x, (0, colours - 3), value=255 if x.dtype == torch.uint8 else 1)
    if x.ndim != 5 or x.shape[-1] != colours:
        cure = _colours_last(tuple(video.shape), colours)
        raise InputError(f"video frames are [B, F, H, W, {colours}] or [F, H, W, {colours}], not {list(video.shape)}"
                         f"{cure}")  # fmt: skip
    if x.shape[0] < 1 or x.shape[1] < 1:
        raise InputError(f"the video {list(video.shape)} has no frames")
    if min(x.shape[2:4]) < spatial:
        least = f"{spatial}x{spatial}"
        raise InputError(f"frames of {x.shape[3]}x{x.shape[2]} are too small: at least {least} pixels")
    if x.dtype != torch.uint8 and not all_finite(x):
        raise InputError("the video holds NaN or Inf")
    if signed and x.dtype == torch.uint8:
        raise InputError("range='signed' is for floats in -1..1, and bytes (uint8) are 0..255: leave the range out")
    if not (any_range or signed):
        check_range(x)
    return x


def _colours_last(shape: tuple[int, ...], colours: int) -> str:
    """Return how frames of a wrong shape become right, as the end of an error; empty where nothing is likely."""
    for axis in (-3, -4):
        if len(shape) in (3, 4, 5) and len(shape) >= -axis and shape[axis] == colours:
            return f": give movedim({axis}, -1) of them"
    if shape[-1:] == (4,):
        return ": give them without alpha, [..., :3]"
    if shape[-1:] == (1,):
        return f": give grey as expand({', '.join(['-1'] * (len(shape) - 1))}, {colours})"
    return ""


def check_range(frames: Tensor) -> None:
    """Refuse frames that are clearly not in 0..1; see `out_of_range`. Raises InputError."""
    if why := out_of_range(frames):
        raise InputError(why)


def out_of_range(frames: Tensor) -> str | None:
    """Return the fault of frames that are clearly not in 0..1; None for bytes, and for values a little outside.

    Args:
        frames: any shape, finite floats or uint8.
    """
    if frames.dtype == torch.uint8 or not frames.numel():
        return None
    low, high = torch.aminmax(frames)
    if high > MOST:
        return (f"the frames reach {float(high):g} and frames are in 0..1: divide those of 0..255 by 255, or give them "
                "as bytes (uint8)")  # fmt: skip
    if low < LEAST and (share := float((frames < LEAST).float().mean())) > LEAST_SHARE:
        return (f"{100 * share:.0f} % of the frames' values are below {LEAST} and frames are in 0..1: give those of "
                "-1..1 as (frames + 1) / 2")  # fmt: skip
    return None
