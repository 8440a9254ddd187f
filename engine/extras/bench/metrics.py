"""Differences of two clips: PSNR, SSIM, steps across tile seams, jumps between frames, colour shift.

All figures are gathered frame by frame, so memory does not grow with the clip. The seam and jump figures use the
difference A - B averaged over small blocks, which keeps visible offsets and averages noise away. They are ratios to the
median of the same figure elsewhere: 1 is ordinary, more is a seam or a jump. Equal clips have ratio 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ...network.tiles import check_tile, grid

#: Pixels over which the difference is averaged before steps and jumps are taken.
BLOCK = 16
#: Pixels on either side of a place that are averaged for the step there.
REACH = 4
#: Smallest usual step (a fortieth of a grey level of 255) that ratios divide by: rounding makes smaller ones.
FLOOR = 1e-4
#: Smallest ratios that are reported as seams and jumps. Clean clips (noise, rounding, H.264) stay below 1.5.
SEAM_RATIO = JUMP_RATIO = 2.0
#: Smallest mean difference of a channel that is reported as a shift: half a grey level of 255.
SHIFT = 0.5 / 255
_WINDOW, _SIGMA = 11, 1.5  # as in the publication of SSIM


def psnr(mse: float, peak: float = 1.0) -> float:
    """Return the dB of a mean squared error; infinite for 0."""
    return math.inf if mse == 0 else 10 * math.log10(peak**2 / mse)


def ssim(a: Tensor, b: Tensor) -> float | None:
    """Return the mean SSIM of two frames [H, W, C] in 0..1; None for frames smaller than the window.

    The mean is over all full Gaussian windows (11 x 11, sigma 1.5) and channels."""
    if min(a.shape[:2]) < _WINDOW:
        return None
    x, y = (f.permute(2, 0, 1)[:, None].double() for f in (a, b))
    rows = _gaussian().to(x)[None, None, :, None]

    def mean(values: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(values, rows), rows.transpose(2, 3))

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    score = (2 * mx * my + c1) * (2 * cov + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return score.mean().item()


@lru_cache(maxsize=1)
def _gaussian() -> Tensor:
    x = torch.arange(_WINDOW, dtype=torch.float64, device="cpu") - _WINDOW // 2
    weights = torch.exp(-0.5 * (x / _SIGMA) ** 2)
    return weights / weights.sum()


def chunk_starts(frames: int, chunk: int, temporal: int) -> list[int]:
    """Return the first frames of every chunk but the first.

    Args:
        frames: of the clip.
        chunk: latents per chunk.
        temporal: frames per latent; the clip's first latent has one.
    """
    return list(range(temporal * (chunk - 1) + 1, frames, temporal * chunk))


def tile_edges(height: int, width: int, tile: int, overlap: int, scale: int = 8) -> tuple[list[int], list[int]]:
    """Return the rows and columns of pixels at which this pack's blended tiles of a frame begin or end.

    Without overlap the edge is the middle of what evenly spread neighbours share.

    Args:
        height, width: of the frame in pixels.
        tile, overlap: in pixels.
        scale: pixels per side of a latent pixel (Wan 2.2: 16).
    """
    check_tile(tile, overlap, scale)
    tiles = grid(height // scale, width // scale, tile, overlap, scale)
    edges = []
    for axis in (tiles.rows, tiles.cols):
        if overlap:
            edges.append(sorted({scale * e for span in axis.spans() for e in span if 0 < e < axis.length}))
        else:
            edges.append([scale * (a + axis.size + b) // 2 for a, b in zip(axis.starts, axis.starts[1:], strict=False)])
    return edges[0], edges[1]


@dataclass(frozen=True)
class Ratio:
    """The largest step at the given places over the median of the others, and the pixel or frame that it leads to."""

    ratio: float
    at: int


@dataclass
class Comparison:
    """Differences between clips A and B of `frames` frames [height, width, 3] in 0..1.

    psnr in dB with peak 1 (equal to peak 2 in -1..1), of the whole clip and of its worst frame; max_error and shift (A
    - B, mean per channel) in 0..1. seam_rows and seam_columns: steps of A - B across the given edges (None: none
    given). jump: the largest change of A - B from one frame to the next; chunk_jump: the same at chunk starts only."""

    frames: int
    height: int
    width: int
    psnr: float
    worst_psnr: float
    worst_frame: int
    ssim: float | None
    max_error: float
    shift: tuple[float, float, float]
    seam_rows: Ratio | None = None
    seam_columns: Ratio | None = None
    jump: Ratio | None = None
    chunk_jump: Ratio | None = None
    findings: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return the figures for JSON, which has no infinity: an infinite figure is the text "inf"."""
        return _finite(asdict(self))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def compare(
    a: Iterable[Tensor],
    b: Iterable[Tensor],
    rows: Sequence[int] = (),
    columns: Sequence[int] = (),
    starts: Sequence[int] | Callable[[int], Sequence[int]] = (),
) -> Comparison:
    """Compare two clips given as frames [H, W, 3] in 0..1.

    Args:
        a, b: frames of the clips.
        rows, columns: pixels at which a tile begins or ends.
        starts: first frames of chunks, or a function that returns them for a number of frames.

    Raises: InputError when the clips differ in size or length, hold nothing, NaN or infinite values, or an edge lies
    outside.
    """
    errors, scores, largest = [], [], 0.0
    shift = torch.zeros(3, dtype=torch.float64, device="cpu")
    steps: tuple[Tensor, Tensor] | None = None
    changes, before = [], None
    for index, (x, y) in enumerate(_pairs(a, b)):
        if steps is None:
            height, width = x.shape[:2]
            _check("row", rows, height)
            _check("column", columns, width)
            steps = tuple(torch.zeros(n - 1, dtype=torch.float64, device="cpu") for n in (height, width))
        elif x.shape[:2] != (height, width):
            raise InputError(f"frame {index} is {x.shape[1]}x{x.shape[0]}, the first one {width}x{height}")
        difference = x.double() - y.double()
        errors.append(difference.square().mean().item())
        if not math.isfinite(errors[-1]):
            raise InputError(f"frame {index} holds NaN or infinite values")
        largest = max(largest, difference.abs().max().item())
        scores.append(ssim(x, y))
        shift += difference.mean((0, 1))
        steps[0].add_(_step(_blocks(difference, 1), 0))
        steps[1].add_(_step(_blocks(difference, 0), 1))
        small = _blocks(_blocks(difference, 0), 1)
        if before is not None:
            changes.append((small - before).square().mean().sqrt().item())
        before = small
    if steps is None:
        raise InputError("the clips hold no frames")
    count = len(errors)
    starts = starts(count) if callable(starts) else starts
    _check("chunk start", starts, count)
    worst = max(range(count), key=errors.__getitem__)
    known = [s for s in scores if s is not None]
    moves = torch.tensor(changes, dtype=torch.float32, device="cpu")
    result = Comparison(
        frames=count, height=height, width=width,
        psnr=psnr(math.fsum(errors) / count), worst_psnr=psnr(errors[worst]), worst_frame=worst,
        ssim=math.fsum(known) / len(known) if known else None,
        max_error=largest, shift=tuple((shift / count).tolist()),
        seam_rows=_stands_out(steps[0].div(count).sqrt(), rows),
        seam_columns=_stands_out(steps[1].div(count).sqrt(), columns),
        jump=_largest_jump(moves), chunk_jump=_stands_out(moves, starts),
    )  # fmt: skip
    result.findings = list(_findings(result))
    return result


def _pairs(a: Iterable[Tensor], b: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    left, right = iter(a), iter(b)
    for index, x in enumerate(left):
        y = next(right, None)
        if y is None:
            raise InputError(f"the second clip ends after {index} frames, the first goes on; compare equal lengths")
        if x.shape != y.shape or x.ndim != 3 or x.shape[2] != 3 or not x.numel():
            sizes = " and ".join("x".join(map(str, f.shape)) for f in (x, y))
            raise InputError(f"frame {index}: frames of one size [height, width, 3] are compared, not {sizes}")
        yield x, y
        length = index + 1
    if next(right, None) is not None:
        raise InputError(f"the first clip ends after {length} frames, the second goes on; compare equal lengths")


def _check(what: str, places: Sequence[int], size: int) -> None:
    for place in places:
        if not 0 < place < size:
            raise InputError(f"{what} {place} is outside: it must be 1 to {size - 1}")


def _blocks(difference: Tensor, dim: int) -> Tensor:
    """Average over BLOCK neighbours along `dim`; a rest that fills no block is a block of its own."""
    return torch.stack([part.mean(dim) for part in difference.split(BLOCK, dim)], dim)


def _step(values: Tensor, dim: int) -> Tensor:
    """Return the mean square of the step at each place along `dim` (REACH neighbours after it against those before)."""
    values = values.movedim(dim, 0).flatten(1)
    count = len(values)
    sums = torch.cat((values.new_zeros(1, values.shape[1]), values.cumsum(0)))
    place = torch.arange(1, count, device="cpu")
    low, high = (place - REACH).clamp(min=0), (place + REACH).clamp(max=count)
    before = (sums[place] - sums[low]) / (place - low)[:, None]
    after = (sums[high] - sums[place]) / (high - place)[:, None]
    return (after - before).square().mean(1)


def _stands_out(steps: Tensor, places: Sequence[int]) -> Ratio | None:
    """Return the largest step that leads to one of `places`, over the median of the others; steps[i] leads to i + 1."""
    at = torch.tensor(sorted(set(places)), dtype=torch.long, device="cpu") - 1
    if not len(at):
        return None
    away = torch.ones(len(steps), dtype=torch.bool, device="cpu")
    away[at] = False
    top = int(steps[at].argmax())
    usual = steps[away].median().item() if away.any() else 0.0
    return Ratio(_ratio(steps[at][top].item(), usual), int(at[top]) + 1)


def _largest_jump(changes: Tensor) -> Ratio | None:
    if not len(changes):
        return None
    top = int(changes.argmax())
    return Ratio(_ratio(changes[top].item(), changes.median().item()), top + 1)


def _ratio(value: float, usual: float) -> float:
    return value / max(usual, FLOOR)


def _findings(c: Comparison) -> Iterator[str]:
    for name, seam in (("row", c.seam_rows), ("column", c.seam_columns)):
        if seam is not None and seam.ratio >= SEAM_RATIO:
            yield f"seam at {name} {seam.at}: the step there is {seam.ratio:.1f} times the usual one"
    if c.jump is not None and c.jump.ratio >= JUMP_RATIO:
        yield f"jump at frame {c.jump.at}: the change there is {c.jump.ratio:.1f} times the usual one"
    if c.chunk_jump is not None and c.chunk_jump.ratio >= JUMP_RATIO and c.chunk_jump.at != c.jump.at:
        yield f"jump at chunk start {c.chunk_jump.at}: {c.chunk_jump.ratio:.1f} times the usual change"
    if max(map(abs, c.shift)) >= SHIFT:
        levels = ", ".join(f"{255 * s:+.2f}" for s in c.shift)
        yield f"colour shift of {levels} (red, green, blue; of 255)"
