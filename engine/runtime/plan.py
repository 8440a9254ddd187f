"""Chooses chunking and tiles so that a decode or encode stays below a memory target.

Each candidate's peak comes from a dry run of the network itself on the meta device (runtime/dryrun.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import InputError, PlanError
from .dryrun import peak_bytes
from .stream import Steps, decode_features, decode_frames, encode_features, encode_moments, frame_spans
from .tiles import Grid, check_tile, grid

if TYPE_CHECKING:
    from ..fused.path import FusedPath

GIB = 1 << 30
TILINGS = ("auto", "untiled", "exact", "blended")
#: What cuBLAS and cuDNN hold besides (40 to 60 MiB measured on an H200).
LIBRARY_BYTES = 96 << 20
#: Chunks longer than this gain nothing but need more memory.
MAX_LATENTS = 4


@dataclass(frozen=True)
class Plan:
    """How a clip goes through the network.

    `peak_bytes` counts weights, history, activations and library workspaces on the device: torch's allocated bytes.
    Its caching allocator may reserve more while the card has room, and gives that back before it runs out.
    """

    steps: Steps
    grid: Grid
    peak_bytes: int
    fused: bool = False

    @property
    def tiled(self) -> bool:
        return len(self.grid) > 1

    def describe(self) -> str:
        tiles = f"{len(self.grid)} blended tiles" if self.tiled else "untiled"
        frames = f", {self.steps.frames} frame(s) per step at full size" if self.steps.frames else ""
        kernels = "fused kernels" if self.fused else "plain torch"
        size = f"about {self.peak_bytes / GIB:.2f} GB"
        return f"{kernels}, {tiles}, {self.steps.latents} latent(s) per chunk{frames}, {size}"


class Planner:
    """Plans for one model. Dry runs are remembered, so the same question costs nothing the second time."""

    def __init__(
        self, build: Callable[[], nn.Module], dtype: torch.dtype, weights: int, fused: Callable[[], FusedPath | None]
    ) -> None:
        """`build` makes the module on the meta device, `weights` are its bytes, `fused` gives the fused path if any."""
        self._build = build
        self._dtype = dtype
        self._weights = weights
        self._fused = fused
        self._peak = functools.lru_cache(maxsize=1024)(self._dry_run)

    @functools.cached_property
    def _model(self) -> nn.Module:
        with torch.device("meta"):
            return self._build().to(self._dtype).requires_grad_(False)

    def plan(
        self,
        half: str,
        batch: int,
        latents: int,
        height: int,
        width: int,
        *,
        tiling: str = "auto",
        tile: int = 0,
        overlap: int = 64,
        chunk: int = 0,
        target: int | None = None,
        output: torch.dtype = torch.float32,
    ) -> Plan:
        """Plan `half` ("decoder" or "encoder") for T `latents` of `height` x `width` latent pixels.

        tile and overlap in pixels, target in bytes (None: no limit). Raises InputError on impossible options and
        PlanError, naming what would fit, when nothing stays below the target.
        """
        if tiling not in TILINGS:
            raise InputError(f"tiling={tiling!r} is not one of {', '.join(TILINGS)}")
        if chunk < 0:
            raise InputError(f"chunk={chunk} is negative: give latents per chunk, or 0 for automatic")
        if tiling == "blended":
            check_tile(tile, overlap)
        ask = functools.partial(self._first_fit, half, batch, latents, height, width, chunk, target)
        whole = grid(height, width, 8 * max(height, width), 0, 8)
        fused = self._fused()
        if tiling != "blended":
            if fused is None:
                plan, least = ask([whole])
            else:
                plan, least = self._fused_fit(fused, half, latents, whole, chunk, target, output)
            if plan is None:
                raise PlanError(
                    f"{8 * width}x{8 * height} untiled needs {_gb(least)} and the target is {_gb(target)}: raise "
                    "vram_gb, or use tiling='blended' (approximate; tile=0 picks the size)"
                )
            return plan
        if tile:
            plan, least = ask([grid(height, width, tile, overlap, 8)])
            if plan is None:
                raise PlanError(
                    f"tile={tile} at {8 * width}x{8 * height} needs {_gb(least)} and the target is {_gb(target)}: "
                    "use a smaller tile, tile=0 for automatic, or raise vram_gb"
                )
            return plan
        plan, least = ask(_shrinking(height, width, overlap))
        if plan is None:
            raise PlanError(
                f"{8 * width}x{8 * height} needs {_gb(least)} even in the smallest tiles and the target is "
                f"{_gb(target)}: raise vram_gb or lower the overlap"
            )
        return plan

    def _fused_fit(
        self, fused: FusedPath, half: str, latents: int, whole: Grid, chunk: int, target: int | None,
        output: torch.dtype,
    ) -> tuple[Plan | None, int]:
        height, width = 8 * whole.rows.length, 8 * whole.cols.length
        peak = 0
        frames = fused.frames_per_step(height, width)
        while frames:
            size = min(chunk or min(-(-frames // 4), MAX_LATENTS), latents)
            steps = Steps(size, min(frames, 4 * size))
            peak = LIBRARY_BYTES + self._weights + fused.peak(half, size, steps.frames, height, width, output)
            if target is None or peak <= target:
                return Plan(steps, whole, peak, fused=True), peak
            frames //= 2
        return None, peak

    def _first_fit(
        self,
        half: str,
        batch: int,
        latents: int,
        height: int,
        width: int,
        chunk: int,
        target: int | None,
        grids: Iterator[Grid] | list[Grid],
    ) -> tuple[Plan | None, int]:
        least = None
        for tiles in grids:
            for steps in _steps(latents, chunk):
                peak = LIBRARY_BYTES + self._weights + self._peak(
                    half, batch, min(latents, 2 * steps.latents), steps, height, width, tiles.rows.size, tiles.cols.size
                )
                if target is None or peak <= target:
                    return Plan(steps, tiles, peak), peak
                least = peak if least is None else min(least, peak)
        return None, least or 0

    def _dry_run(
        self, half: str, batch: int, latents: int, steps: Steps, height: int, width: int, rows: int, cols: int
    ) -> int:
        """Bytes of two chunks (the second one meets a full history) through the parts, tile after the front."""
        meta = functools.partial(torch.empty, device="meta", dtype=self._dtype)
        part = getattr(self._model, half)
        tiled = (rows, cols) != (height, width)

        def decode() -> None:
            chunks = meta(batch, self._model.config.latent_channels, latents, height, width).split(steps.latents, 2)
            features = decode_features(part, chunks, _nothing)
            if tiled:
                shapes = [f.shape for f in features]
                features = (meta(*s[:3], rows, cols) for s in shapes)
            for _ in decode_frames(part, features, steps, _nothing):
                pass

        def encode() -> None:
            spans = frame_spans(4 * (latents - 1) + 1, steps.latents, 4)
            video = (meta(batch, 3, b - a, 8 * rows, 8 * cols) for a, b in spans)
            features = encode_features(part, video, steps, _nothing)
            if tiled:
                shapes = [f.shape for f in features]
                features = (meta(*s[:3], height, width) for s in shapes)
            for _ in encode_moments(part, features, _nothing):
                pass

        return peak_bytes(decode if half == "decoder" else encode)


def _steps(latents: int, chunk: int) -> Iterator[Steps]:
    """Schedules from roomy to lean; a chunk the user chose is kept, only its frames per step shrink."""
    sizes = [chunk] if chunk else [n for n in (MAX_LATENTS, 2, 1) if n == 1 or n <= latents]
    for n in sizes:
        yield Steps(min(n, latents), 0)
    for frames in (2, 1):
        yield Steps(min(sizes[-1], latents), frames)


def _shrinking(height: int, width: int, overlap: int) -> Iterator[Grid]:
    """Grids from the whole frame down to the smallest tiles that still leave something besides the overlap."""
    yield grid(height, width, 8 * max(height, width), overlap, 8)
    tile = max(height, width)
    smallest = max(2, 2 * (-(-overlap // 8)))
    while tile > smallest:
        tile = max(smallest, tile * 3 // 4)
        yield grid(height, width, 8 * tile, overlap, 8)


def _gb(size: int | None) -> str:
    return f"{(size or 0) / GIB:.2f} GB"


def _nothing() -> None:
    """Dry runs are not cancelled."""
