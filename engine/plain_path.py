"""The plain torch modules on whole clips: chunk by chunk or tile by tile, into the same outputs as the fused path."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor, nn

from .archs import Architecture
from .network.stream import Steps, decode_features, decode_frames, encode_features, encode_moments, frame_spans
from .options import Options
from .planning.planner import Plan
from .run.guard import Guard
from .run.pixels import PixelSink, to_network


class PlainPath:
    """Both halves of one model. All clips of a batch go through together."""

    def __init__(self, model: nn.Module, architecture: Architecture, dtype: torch.dtype) -> None:
        self._model = model
        self._architecture = architecture
        self._dtype = dtype

    def frames(
        self, z: Tensor, scale: float, steps: Steps, device: torch.device, check: Callable[[], None]
    ) -> Iterator[list[Tensor]]:
        """Latents [B, C, T, h, w], divided by `scale` -> per chunk, the list of its frames [B, 3, f, H, W]."""
        features = decode_features(self._model.decoder, self._latents(z, scale, steps, device), check)
        return decode_frames(self._model.decoder, features, steps, check)

    def moments(
        self, video: Iterator[Tensor], steps: Steps, device: torch.device, check: Callable[[], None]
    ) -> Iterator[Tensor]:
        """Frame chunks [B, 3, f, H, W] in -1..1 -> moments [B, 2C, n, h, w], chunk by chunk."""
        parts = (part.to(device, self._dtype) for part in video)
        return encode_moments(self._model.encoder, encode_features(self._model.encoder, parts, steps, check), check)

    def set_layout(self, options: Options) -> str:
        """Give the convolutions' weights the layout that the options ask for; theirs decides their inputs'."""
        last = options.channels_last_3d is True
        layout = torch.channels_last_3d if last else torch.contiguous_format
        for module in self._model.modules():
            if isinstance(module, nn.Conv3d) and not module.weight.is_contiguous(memory_format=layout):
                module.to(memory_format=layout)
        return "NDHWC" if last else "NCDHW"

    # -- decode ---------------------------------------------------------------------------------------------------

    def decode(
        self, z: Tensor, scale: float, plan: Plan, sink: PixelSink, guard: Guard, device: torch.device
    ) -> None:
        """Latents [B, C, T, h, w], divided by `scale`, into the sink's frames."""
        batch, _, latents, _, _ = z.shape
        first = 0
        ends = _ends(latents, plan.steps.latents)
        for end, pieces in zip(ends, self.frames(z, scale, plan.steps, device, guard.tick.check), strict=True):
            for piece in pieces:
                for clip, start, frames in _new(guard, range(batch), first, piece):
                    sink.write(clip, start, frames)
                first += piece.shape[2]
            guard.reach(end)

    def decode_tiles(
        self, z: Tensor, scale: float, plan: Plan, sink: PixelSink, guard: Guard, device: torch.device
    ) -> None:
        """As `decode` in blended tiles: the front runs untiled, its features wait in host memory; then tile by tile."""
        decoder, s, check = self._model.decoder, self._architecture.spatial, guard.tick.check
        batch, _, latents, _, _ = z.shape
        ends = _ends(latents, plan.steps.latents)
        features = []
        front = decode_features(decoder, self._latents(z, scale, plan.steps, device), check)
        for end, part in zip(ends, front, strict=True):
            features.append(part.cpu())
            guard.reach(end)
        rows, cols = plan.grid.rows, plan.grid.cols
        for index, (i, j) in enumerate(plan.grid.indices(), 1):
            (y0, y1), (x0, x1) = rows.spans()[i], cols.spans()[j]
            weight = (rows.weights(i, s)[:, None] * cols.weights(j, s)[None, :]).to(device)
            crops = (f[..., y0:y1, x0:x1].to(device) for f in features)
            first = 0
            for end, pieces in zip(ends, decode_frames(decoder, crops, plan.steps, check), strict=True):
                for piece in pieces:
                    for clip, start, frames in _new(guard, [(b, i, j) for b in range(batch)], first, piece):
                        sink.add(clip, start, y0 * s, x0 * s, frames, weight)
                    first += piece.shape[2]
                guard.reach(index * latents + end)

    def _latents(self, z: Tensor, scale: float, steps: Steps, device: torch.device) -> Iterator[Tensor]:
        for part in z.split(steps.latents or z.shape[2], 2):
            yield (part.to(device, torch.float32) / scale).to(self._dtype)

    # -- encode ---------------------------------------------------------------------------------------------------

    def encode(self, video: Tensor, plan: Plan, out: Tensor, guard: Guard, device: torch.device) -> None:
        """Frames [B, F, H, W, 3] in 0..1 (or bytes) into moments out [B, 2C, T, h, w]; plan.grid says in what tiles."""
        encoder, check = self._model.encoder, guard.tick.check
        batch, latents = out.shape[0], out.shape[2]
        ends = _ends(latents, plan.steps.latents)
        if plan.tiled:
            features = self._encode_tiles(video, plan, latents, guard, device)
        else:
            h, w = plan.grid.rows.length, plan.grid.cols.length
            features = self._tile_features(video, plan, (0, h), (0, w), guard, device)
        before = latents * len(plan.grid) if plan.tiled else 0
        first = 0
        for end, part in zip(ends, encode_moments(encoder, features, check), strict=True):
            for clip, start, moments in _new(guard, range(batch), first, part):
                out[clip, :, start : start + moments.shape[2]] = moments[0]
            first += part.shape[2]
            guard.reach(before + end)

    def _encode_tiles(
        self, video: Tensor, plan: Plan, latents: int, guard: Guard, device: torch.device
    ) -> Iterator[Tensor]:
        """Tiles down to latent resolution, their features blended in host memory; the low part sees whole frames."""
        rows, cols, batch = plan.grid.rows, plan.grid.cols, video.shape[0]
        blended = None
        for index, (i, j) in enumerate(plan.grid.indices()):
            (y0, y1), (x0, x1) = rows.spans()[i], cols.spans()[j]
            weight = (rows.weights(i)[:, None] * cols.weights(j)[None, :]).to(device)
            first = 0
            for part in self._tile_features(video, plan, (y0, y1), (x0, x1), guard, device):
                if blended is None:
                    blended = torch.zeros(batch, part.shape[1], latents, rows.length, cols.length)
                n = part.shape[2]
                blended[:, :, first : first + n, y0:y1, x0:x1] += (part.float() * weight).cpu()
                first += n
                guard.reach(index * latents + first)
        return (part.to(device, self._dtype) for part in blended.split(plan.steps.latents, 2))

    def _tile_features(
        self, video: Tensor, plan: Plan, rows: tuple[int, int], cols: tuple[int, int], guard: Guard,
        device: torch.device,
    ) -> Iterator[Tensor]:
        """[B, F, H, W, 3] -> features [B, C, n, h, w] of these latent rows and columns, chunk by chunk.

        The last tile also takes the pixels that fill no latent pixel, as the untiled network does.
        """
        s, (height, width) = self._architecture.spatial, video.shape[2:4]
        bottom = height if rows[1] == plan.grid.rows.length else s * rows[1]
        right = width if cols[1] == plan.grid.cols.length else s * cols[1]
        spans = frame_spans(video.shape[1], plan.steps.latents, self._architecture.temporal)
        parts = (
            to_network(video[:, a:b, s * rows[0] : bottom, s * cols[0] : right], device, self._dtype) for a, b in spans
        )
        return encode_features(self._model.encoder, parts, plan.steps, guard.tick.check)


def _ends(latents: int, chunk: int) -> list[int]:
    """How many latents are through after each chunk."""
    return [*range(chunk, latents, chunk), latents]


def _new(
    guard: Guard, parts: range | list[Hashable], first: int, piece: Tensor
) -> Iterator[tuple[int, int, Tensor]]:
    """(clip, index, [1, C, f, ...]) for all of a piece [B, C, f, ...] at `first` that is not finished yet.

    Counts as finished when the caller asks for the next. Raises NonFinite before it hands out NaN or Inf.
    """
    count = piece.shape[2]
    for clip, (part, frames) in enumerate(zip(parts, piece.split(1), strict=True)):
        done = guard.skip(part, first, count)
        if done < count:
            guard.inspect(part, first, count, float(frames.sum(dtype=torch.float32)))
            yield clip, first + done, frames[:, :, done:]
            guard.finish(part, first, count)
