"""Chooses chunking and tiles so that a decode or encode stays below a memory target.

Each candidate's peak comes from a dry run of the network itself on the meta device (runtime/dryrun.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import log
from ..errors import InputError, PlanError
from ..fused.parking import Parking
from ..fused.placement import Sizes, cost, leanest, lightest
from .dryrun import peak_bytes
from .memory import GIB
from .scope import attention_scope
from .stream import Steps, decode_features, decode_frames, encode_features, encode_moments, frame_spans
from .tiles import Grid, check_tile, grid

if TYPE_CHECKING:
    from ..fused.path import FusedPath

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
    #: Histories that wait in host memory, if any, and the bytes they take there.
    parking: Parking | None = None
    host_bytes: int = 0

    @property
    def tiled(self) -> bool:
        return len(self.grid) > 1

    def describe(self) -> str:
        tiles = f"{len(self.grid)} blended tiles" if self.tiled else "untiled"
        frames = f", {self.steps.frames} frame(s) per step at full size" if self.steps.frames else ""
        kernels = "fused kernels" if self.fused else "plain torch"
        parked = f", {_gb(self.host_bytes)} of histories parked in host memory" if self.parking else ""
        size = f"about {self.peak_bytes / GIB:.2f} GB"
        return f"{kernels}, {tiles}, {self.steps.latents} latent(s) per chunk{frames}{parked}, {size}"


class Planner:
    """Plans for one model. Dry runs are remembered, so the same question costs nothing the second time."""

    def __init__(
        self, build: Callable[[], nn.Module], dtype: torch.dtype, weights: int, fused: Callable[[], FusedPath | None],
        spatial: int = 8, temporal: int = 4, flash_attention: bool = True,
    ) -> None:  # fmt: skip
        """`build` makes the module on the meta device, `weights` are its bytes, `fused` gives the fused path if any.

        spatial, temporal: pixels per side and frames of a latent. flash_attention: as in `Options`; without it, plain
        torch's attention takes memory of its own.
        """
        self._build = build
        self._spatial, self._temporal = spatial, temporal
        self._dtype = dtype
        self._weights = weights
        self._fused = fused
        self._flash_attention = flash_attention
        self._peak = functools.lru_cache(maxsize=1024)(self._dry_run)

    @functools.cached_property
    def _model(self) -> nn.Module:
        # Its tensors outlive a caller's inference mode, and dry runs are made outside of it.
        with torch.inference_mode(False), torch.device("meta"):
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
        host: int | None = 0,
        output: torch.dtype = torch.float32,
    ) -> Plan:
        """Plan `half` ("decoder" or "encoder") for T `latents` of `height` x `width` latent pixels.

        tile and overlap in pixels; target: bytes on the device, host: bytes of histories that may wait in host memory
        (None: no limit; 0: none may, as on a CPU). Raises InputError on impossible options and PlanError, naming what
        would fit, when nothing stays below the target.
        """
        if tiling not in TILINGS:
            raise InputError(f"tiling={tiling!r} is not one of {', '.join(TILINGS)}")
        if chunk < 0:
            raise InputError(f"chunk={chunk} is negative: give latents per chunk, or 0 for automatic")
        if tiling in ("exact", "blended"):
            check_tile(tile, overlap if tiling == "blended" else 0, self._spatial)
        s = self._spatial
        size = f"{s * width}x{s * height}"
        band = tile if tiling == "exact" else 0
        ask = _Ask(half, batch, latents, height, width, chunk, output, band, host)
        if tiling != "blended":
            whole = grid(height, width, s * max(height, width), 0, s)
            if band:
                plan, _ = self._first_fit(ask, [whole], target)
                if plan is not None and plan.parking is not None:
                    return plan
                why = self._why_no_bands(ask, whole, target)
                log.once(f"tile={tile} of exact tiles at {size} is not used: {why}; other plans give the same frames")
                ask = replace(ask, band=0)
            plan, least = self._first_fit(ask, [whole], target)
            refusal = f"{size} untiled needs {_gb(least)} and the target is {_gb(target)}: raise vram_gb, "
            refusal += f"{self._parked(ask, target)}or use tiling='blended' (approximate; tile=0 picks the size)"
        elif tile:
            plan, least = self._first_fit(ask, [grid(height, width, tile, overlap, s)], target)
            refusal = f"tile={tile} at {size} needs {_gb(least)} and the target is {_gb(target)}: use a smaller tile, "
            refusal += "tile=0 for automatic, or raise vram_gb"
        else:
            plan, least = self._first_fit(ask, _shrinking(height, width, overlap, s), target)
            refusal = f"{size} needs {_gb(least)} even in the smallest tiles and the target is {_gb(target)}: raise "
            refusal += "vram_gb or lower the overlap"
        if plan is None:
            raise PlanError(refusal)
        return plan

    def _first_fit(self, ask: _Ask, grids: Iterable[Grid], target: int | None) -> tuple[Plan | None, int]:
        """The first plan below the target, and its peak; else None and the least peak that was tried."""
        least = None
        for tiles in grids:
            for option in self._options(ask, tiles, target):
                plan = replace(option, peak_bytes=option.peak_bytes + LIBRARY_BYTES + self._weights)
                if target is None or plan.peak_bytes <= target:
                    return plan, plan.peak_bytes
                least = plan.peak_bytes if least is None else min(least, plan.peak_bytes)
        return None, least or 0

    def _options(self, ask: _Ask, tiles: Grid, target: int | None) -> Iterator[Plan]:
        """Plans without the weights in their peak, from roomy to lean."""
        rows, cols = tiles.rows.size, tiles.cols.size
        if self._fused() is not None and (len(tiles) == 1 or ask.half == "decoder"):
            if not ask.band:
                for steps in self._fused_steps(ask, rows, cols):
                    yield self._fused_plan(ask, tiles, steps, None)
            if len(tiles) == 1 and ask.host != 0:
                yield from self._parking_plans(ask, tiles, target)
            return
        for steps in _steps(ask.latents, ask.chunk):
            latents = min(ask.latents, 2 * steps.latents)
            peak = self._peak(ask.half, ask.batch, latents, steps, ask.height, ask.width, rows, cols)
            yield Plan(steps, tiles, peak)

    def _fused_steps(self, ask: _Ask, rows: int, cols: int) -> Iterator[Steps]:
        """From what fills the GPU down to one frame per step."""
        frames = self._fused().frames_per_step(self._spatial * rows, self._spatial * cols)
        while frames:
            yield self._step(ask, -(-frames // self._temporal), frames)
            frames //= 2

    def _step(self, ask: _Ask, latents: int, frames: int) -> Steps:
        latents = min(ask.chunk or min(latents, MAX_LATENTS), ask.latents)
        return Steps(latents, min(frames, self._temporal * latents))

    def _fused_plan(self, ask: _Ask, tiles: Grid, steps: Steps, parking: Parking | None) -> Plan:
        sizes = self._sizes(ask, tiles, steps, parking)
        return Plan(steps, tiles, sizes.device, True, parking, sizes.host)

    def _sizes(self, ask: _Ask, tiles: Grid, steps: Steps, parking: Parking | None) -> Sizes:
        frame = None if len(tiles) == 1 else (ask.height, ask.width)
        size = tiles.rows.size, tiles.cols.size
        return self._fused().sizes(ask.half, steps.latents, steps.frames, *size, ask.output, frame, parking)

    def _parking_plans(self, ask: _Ask, tiles: Grid, target: int | None) -> Iterator[Plan]:
        """With histories in host memory: the plan below the target that moves least per frame, then the leanest."""
        # Histories travel once per step, so more frames per step mean less traffic, as far as the target allows.
        sizes = ((4, 8), (2, 8), (2, 4), (1, 4), (2, 2), (1, 2), (1, 1))
        options = list(dict.fromkeys(self._step(ask, *size) for size in sizes))
        if ask.band:
            for steps in options:
                plan = self._fused_plan(ask, tiles, steps, Parking(None, 0, rows=ask.band))
                if ask.host is None or plan.host_bytes <= ask.host:
                    yield plan
            return
        room = None if target is None else target - LIBRARY_BYTES - self._weights
        best: tuple[float, Steps, Parking] | None = None
        for steps in options if room is not None else ():
            found = lightest(functools.partial(self._sizes, ask, tiles, steps), room, ask.host)
            if found is not None and (best is None or cost(*found) / steps.latents < best[0]):
                best = cost(*found) / steps.latents, steps, found[0]
        if best is not None:
            yield self._fused_plan(ask, tiles, *best[1:])
        elif ask.host is None or leanest(functools.partial(self._sizes, ask, tiles, options[-1])).host <= ask.host:
            yield self._fused_plan(ask, tiles, options[-1], Parking(None, 0))

    def _parked(self, ask: _Ask, target: int | None) -> str:
        """What parking would take, where that is more than the host may give; for refusals."""
        if self._fused() is None:
            leaner = self._dtype == torch.float32 and ask.host != 0
            return "or use fp16 or bf16, which need less, " if leaner else ""
        if ask.host is None:
            return ""
        tiles = grid(ask.height, ask.width, self._spatial * max(ask.height, ask.width), 0, self._spatial)
        *_, steps = self._fused_steps(ask, tiles.rows.size, tiles.cols.size)
        least = leanest(functools.partial(self._sizes, ask, tiles, steps))
        if ask.host == 0 or least.host <= ask.host:
            return ""
        needed = least.device + LIBRARY_BYTES + self._weights
        if target is not None and needed > target:
            return f"or vram_gb to {_gb(needed)} and ram_gb to {_gb(least.host)} (it is {_gb(ask.host)}), "
        return f"or ram_gb to {_gb(least.host)} (it is {_gb(ask.host)}; {_gb(needed)} of GPU memory then do), "

    def _why_no_bands(self, ask: _Ask, tiles: Grid, target: int | None) -> str:
        if ask.host == 0 or self._fused() is None:
            return "bands need parked histories, which only the fused kernels on a GPU have"
        least = self._sizes(ask, tiles, self._step(ask, 1, 1), Parking(None, 0, rows=ask.band))
        needs = f"{_gb(least.device + LIBRARY_BYTES + self._weights)}, and the target is {_gb(target)}"
        if ask.host is not None:
            needs += f"; {_gb(least.host)} of host memory, and ram_gb allows {_gb(ask.host)}"
        return f"its bands need {needs}"

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
            s, t = self._spatial, self._temporal
            spans = frame_spans(t * (latents - 1) + 1, steps.latents, t)
            video = (meta(batch, 3, b - a, s * rows, s * cols) for a, b in spans)
            features = encode_features(part, video, steps, _nothing)
            if tiled:
                shapes = [f.shape for f in features]
                features = (meta(*s[:3], height, width) for s in shapes)
            for _ in encode_moments(part, features, _nothing):
                pass

        def program() -> None:
            with attention_scope(self._flash_attention):
                (decode if half == "decoder" else encode)()

        return peak_bytes(program)


@dataclass(frozen=True)
class _Ask:
    """What is to be planned; sizes in latents and latent pixels."""

    half: str
    batch: int
    latents: int
    height: int
    width: int
    chunk: int
    output: torch.dtype
    band: int
    host: int | None


def _steps(latents: int, chunk: int) -> Iterator[Steps]:
    """Schedules from roomy to lean; a chunk the user chose is kept, only its frames per step shrink."""
    sizes = [chunk] if chunk else [n for n in (MAX_LATENTS, 2, 1) if n == 1 or n <= latents]
    for n in sizes:
        yield Steps(min(n, latents), 0)
    for frames in (2, 1):
        yield Steps(min(sizes[-1], latents), frames)


def _shrinking(height: int, width: int, overlap: int, scale: int) -> Iterator[Grid]:
    """Grids from the whole frame down to the smallest tiles that still leave something besides the overlap."""
    yield grid(height, width, scale * max(height, width), overlap, scale)
    tile = max(height, width)
    smallest = max(2, 2 * (-(-overlap // scale)))
    while tile > smallest:
        tile = max(smallest, tile * 3 // 4)
        yield grid(height, width, scale * tile, overlap, scale)


def _gb(size: int | None) -> str:
    return f"{(size or 0) / GIB:.2f} GB"


def _nothing() -> None:
    """Dry runs are not cancelled."""
