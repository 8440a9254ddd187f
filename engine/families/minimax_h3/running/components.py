"""Encoder and decoder of a model with native tiles (one that tiles itself), ready for clips."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from ....execution.clip import Looped
from ....execution.components import FusedComponents, PlainComponents
from ....execution.guard import Guard
from ....execution.passes import Clips, Emit, Part, Pass
from ....execution.reuse import Runs, allocated
from ....execution.staging import StagedReader
from ....network.fused import FusedEncoder
from ....network.plain import Half, Network
from ....network.steps import Steps
from ....network.stream import encode_features, encode_moments
from ....options import Options
from ....planning.plan import Plan
from ....report import Report
from ....system.devices import empty_device_cache
from ..program import TiledProgram
from ..tiles import Blend
from .decoder import TokenComponent
from .transformer import TokenNetwork


class Components:
    """Encoder and decoder of a self-tiling model: packed when first used, dropped by `release`."""

    def __init__(
        self, model: Network, dtype: torch.dtype, options: Options, kind: str | None, fused: FusedComponents,
        plain: PlainComponents,
    ) -> None:  # fmt: skip
        """kind: 8-bit type of the decoder's products, None: `dtype`. fused, plain: the encoder on these routes."""
        self._model, self._dtype, self._options, self._kind = model, dtype, options, kind
        self._fused, self._plain = fused, plain
        self._tokens: TokenNetwork | None = None
        #: Runs of the decoder.
        self.runs = Runs(options.cuda_graphs)

    def half(
        self, name: str, plan: Plan, device: torch.device, scale: float, seed: int | None
    ) -> TokenComponent | TileEncoder:
        """Return "encoder" or "decoder" for clips; their latents have no scale and no noise."""
        if name == "decoder":
            return self._decoder(plan, device)
        if plan.fused:
            return FusedTileEncoder(
                self._fused.encoder(), self._model.encoder.program, self._options, plan.steps.frames
            )
        return PlainTileEncoder(self._plain.there(name, device), self._dtype, plan.steps)

    def begin(self, report: Report, size: tuple[int, int, int], seed: int | None) -> None:
        """Note nothing: a decode begins with its latents alone."""

    def _decoder(self, plan: Plan, device: torch.device) -> TokenComponent:
        """Return the decoder with as many layers on the device as the plan says."""
        kept = self._tokens
        if kept is None or kept.device != device or kept.resident != plan.own.resident:
            self.release()
            del kept
            backend = "auto" if self._options.triton_fusion else "reference"
            with torch.inference_mode(False), torch.no_grad():  # whatever the caller's mode: it serves later calls
                self._tokens = TokenNetwork(
                    self._model.decoder, self._dtype, device, self._kind, plan.own.resident, backend
                )
            if device.type == "cuda":
                empty_device_cache()  # 8-bit weights are made from fp32 ones
        return TokenComponent(self._tokens, self._model.decoder.program, self._options, plan, self.runs)

    def release(self, keep: str = "") -> int:
        """Free graphs, and weights unless `keep` is "decoder"; return the weights' bytes on the device."""
        self.runs.forget()
        if keep == "decoder":
            return 0
        freed, self._tokens = self.packed_bytes("decoder"), None
        return freed

    def packed_bytes(self, half: str) -> int:
        """Return the bytes of layers on the device."""
        return 0 if self._tokens is None or half == "encoder" else self._tokens.nbytes


class TileEncoder(Looped):
    """An encoder that takes one tile after another, ready to run on a device.

    Attributes: those of execution/passes.py's Half.
    """

    def __init__(self, program: TiledProgram, ahead: bool = False) -> None:
        self.program, self.ahead = program, ahead
        self.spatial, self.temporal = program.own.unit, program.own.rate

    def whole(self, clips: Clips) -> SectionPass:
        """Return the pass over clips in whole frames."""
        return SectionPass(self, clips)

    def memory(self, guard: Guard) -> AbstractContextManager[None]:
        """Hold the encoder's memory inside."""
        return nullcontext()

    def encode(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Return moments [T, h, w, 2C] float32 of a tile, and their health.

        frames: [F, H, W, 3] float32 in the network's units."""
        raise NotImplementedError


class SectionPass(Pass):
    """Takes clips through an encoder section by section: tile by tile, blended on the device."""

    def __init__(self, half: TileEncoder, clips: Clips) -> None:
        super().__init__(half.program, slice(None), clips.guard)
        self._half, self._clips, self._own = half, clips, half.program.own
        self._rows, self._columns = self._own.spans(clips.height), self._own.spans(clips.width)
        self._reader = StagedReader(clips.guard.device, half.ahead)

    def memory(self) -> AbstractContextManager[None]:
        return self._half.memory(self._guard)

    def begins(self, first: int) -> tuple[int]:
        return (first // self._own.latents * self._own.latents,)

    def begin(self, clip: int, first: int, left: object, corner: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        return self.begins(first)[0], 0

    def chunks(self, parts: Iterable[Part], emit: Emit) -> Iterator[None]:
        for part in parts:
            emit(*self._encode(part.data))
            yield

    def _encode(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Return moments [n, h, w, 2C] of a section's frames, and their health."""
        blend, moments = Blend(self._rows, self._columns, self._own.unit), None
        health = torch.zeros((), device=self._guard.device, dtype=torch.float32)
        for (i, row), (j, column) in itertools.product(enumerate(self._rows), enumerate(self._columns)):
            self._guard.tick.check()
            cut = frames[:, row.start : row.end, column.start : column.end].contiguous()
            tile, health_of = self._half.encode(self._filled(self._reader.read(cut)))
            part = blend.add(i, j, tile.permute(3, 0, 1, 2))
            if moments is None:
                size = blend.rows[-1].end, blend.columns[-1].end
                moments = torch.empty(*part.shape[:2], *size, device=self._guard.device, dtype=torch.float32)
            y, x = blend.rows[i].start, blend.columns[j].start
            moments[:, :, y : y + part.shape[2], x : x + part.shape[3]] = part
            health += health_of
        return moments.permute(1, 2, 3, 0), health

    def _filled(self, frames: Tensor) -> Tensor:
        """Return frames [f, H, W, 3] in 0..1, or bytes, as float32 in the network's units, with the last one repeated
        to a whole section. A clip of one frame stays one."""
        x = self._own.in_units(frames)
        missing = 0 if self._clips.latents == 1 else self._own.frames - len(x)
        return torch.cat((x, x[-1:].expand(missing, -1, -1, -1))) if missing else x


class FusedTileEncoder(TileEncoder):
    """An encoder on the fused operators, which takes one tile after another through one ExecutionContext."""

    def __init__(self, network: FusedEncoder, program: TiledProgram, options: Options, frames: int) -> None:
        """frames: per step at full size."""
        super().__init__(program, options.overlap)
        self._network, self._frames = network, frames

    @contextmanager
    def memory(self, guard: Guard) -> Iterator[None]:
        """Scope the memory, which is taken when the first tile is there, and again for a tile of another size."""
        self._guard, self._size = guard, None
        with ExitStack() as self._held:
            yield

    def encode(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        if tuple(frames.shape) != self._size:
            self._held.close()
            self._run = self._network.tile_run(*frames.shape[:3], self._frames, frames.device)
            self._held.enter_context(allocated(self._run, self._guard))
            self._size = tuple(frames.shape)
        self._run.restart()
        return self._network.chunk(self._run, frames, self._frames), self._run.health


class PlainTileEncoder(TileEncoder):
    """An encoder of plain modules."""

    def __init__(self, half: Half, dtype: torch.dtype, steps: Steps) -> None:
        super().__init__(half.program)
        self._half, self._type, self._steps = half, dtype, steps

    def encode(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        x = frames.permute(3, 0, 1, 2)[None].to(self._type)
        features = encode_features(self._half, [x], self._steps, _nothing)
        moments = torch.cat(list(encode_moments(self._half, features, _nothing)), 2)[0].float()
        return moments.permute(1, 2, 3, 0), moments.sum()


def _nothing() -> None:
    """Do nothing: the tile loop checks for cancellation between tiles."""
