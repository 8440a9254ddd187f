"""Plans of a network that tiles itself: the number of tiles at a time, and of layers whose weights stay on the device.

Neither changes a bit of the results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .... import log
from ....errors import InputError
from ....network.products import KINDS, wide_of
from ....network.steps import Steps
from ....network.tiles import Grid
from ....planning import refusals
from ....planning.ask import Ask
from ....planning.cost import GRAPH_BYTES
from ....planning.plan import Plan, why_none
from ....planning.plans import Known
from ....report import Report
from ....runtime.memory import RESERVE_BYTES
from ..program import TiledProgram
from ..tiles import NativeTiles, Span
from ..tokens import Tokens
from .transformer import BUFFERS, planned, tiles_together, tokens_of

#: Number of tiles whose products take longer than the copy of a layer's weights: 0.4 ms for each tile on an H200,
#: against 2.7 ms at 50 GB/s, by arithmetic.
MANY = 32
#: Copies of a tile of pixels on its way in: as it arrives, in float32, minus the mean, in the network's units, padded,
#: in 16 bit.
COPIES = 6
#: Frames at full size at once, from most memory to least; 0: all.
STEPS = (0, 8, 4, 2, 1)


@dataclass(frozen=True)
class Own:
    """Plan of a network that tiles itself.

    tiles: computed at a time. grid: rows and columns of tiles in a frame. resident: layers whose weights are on the
    device, of all `layers`; 0, 0 if no weights could be elsewhere. blend: how a decode blends tiles
    (`request.NATIVE_BLENDS`). trained: in the tiles that its weights were trained with, not in those of its family."""

    tiles: int
    grid: tuple[int, int]
    resident: int = 0
    layers: int = 0
    blend: str = "separate"
    trained: bool = False

    def describe(self) -> str:
        rows, columns = self.grid
        kind = ", as it was trained" if self.trained else ""
        of = f"the model's own {columns} x {rows} tiles ({self.blend} blend{kind}), {self.tiles} at a time"
        hosted = self.layers - self.resident
        return of + (f", weights of {hosted} of {self.layers} layers streamed from host memory" if hosted else "")

    @property
    def way(self) -> tuple[str, ...]:
        return self.blend, *("trained",) * self.trained

    @property
    def kept(self) -> bool:
        """Return True for a decode: an encoder takes its memory for each tile."""
        return bool(self.layers)

    @property
    def unrecorded(self) -> str | None:
        return "weights come from host memory in every chunk" if self.resident < self.layers else None

    def report(self, report: Report, kind: str, off: dict[str, str], graphs: bool) -> None:
        if not self.layers:
            off.setdefault("cuda_graphs", "an encoder of tiles runs without them")
            return
        report.mode = f"a transformer, its products in {kind}"
        if graphs:
            off.pop("cuda_graphs", None)  # its products are the libraries', with fused kernels or without


class Plans:
    """Plans of one model that tiles itself."""

    def __init__(self, known: Known) -> None:
        self._model, self._walk, self._plain, self._kind = known.model, known.walk, known.plain, known.kind
        self._how, self._besides, self._fuses = known.how, known.besides, known.fuses
        self._dtype = known.walk.dtype

    def check(self, ask: Ask) -> str:
        trained = getattr(getattr(self._model, ask.half).program, "trained", None)
        if trained is None and (refusal := ask.request.native_refusal(trained=True)):
            raise InputError(refusal)
        if ask.request.tile or ask.chunk or ask.request.tiling in ("exact", "blended"):
            log.once("this network tiles itself, in space and time, which is part of the model: tiles and chunks that "
                     "are asked for are not used")  # fmt: skip
        return refusals.OWN_TILES

    def of(self, ask: Ask, tiles: Grid, target: int | None) -> Iterator[Plan]:
        if ask.half == "decoder":
            return self._decodes(ask, tiles, self._besides(ask.half, False), target)
        return self._encodes(ask, tiles, self._fuses(ask.half))

    def least(self, ask: Ask, tiles: Grid, target: int | None = None) -> int | None:
        if target is not None:
            return None
        *_, plan = self.of(ask, tiles, None)
        return self._besides(ask.half, plan.fused) + plan.peak_bytes

    def _decodes(self, ask: Ask, whole: Grid, fixed: int, target: int | None) -> Iterator[Plan]:
        """Yield the plan with all layers on the device, then one with as many tiles, and then layers, as have room."""
        program: TiledProgram = self._model.decoder.program
        blend, trained = ask.request.native_blend, ask.request.trained
        own, step = program.tiles(trained), next(s for s in program.steps if isinstance(s, Tokens))
        rows, columns = own.decoded_spans(own.unit * ask.height, own.unit * ask.width)
        section = own.sections(ask.latents)[0]
        frames = section.last - section.first
        tokens = tokens_of(step, frames, *(s[0].end // own.unit for s in (rows, columns)))
        # On a CPU the host limit is 0: there is no other memory to park in.
        device = torch.device("cpu" if ask.host == 0 else "cuda")
        frame = len(rows) * len(columns)
        together = tiles_together(tokens, frame, device, self._kind)
        total = frame * len(own.sections(ask.latents))
        layer = layer_bytes(step, self._dtype, self._kind)
        besides = group_bytes(step, together * tokens, self._dtype, self._kind)
        if self._walk.lacks("decoder") is not None:
            besides += torch_bytes(step, together * tokens, self._dtype)
        besides += 0 if ask.host == 0 else RESERVE_BYTES
        besides += blend_bytes(own, rows, columns, frames, self._dtype, ask.output)

        def plan(tiles: int, resident: int) -> Plan:
            tiles = -(-tiles // together) * together
            x = tiles * tokens * step.width * self._dtype.itemsize
            peak = besides + x + (resident + (BUFFERS if resident < step.layers else 0)) * layer
            how = Own(tiles, (len(rows), len(columns)), resident, step.layers, blend, trained)
            host = (step.layers - resident) * layer if self._kind else 0
            rates, group = self._walk.rates, tiles * tokens * layer_work(step)
            waits = max(group / rates.work, layer / rates.link)  # of a layer whose weights come while it computes
            seconds = -(-total // tiles) * (resident * group / rates.work + (step.layers - resident) * waits)
            made = Plan(Steps(own.latents), whole, peak, host_bytes=host, seconds=seconds, own=how)
            recorded = ask.host != 0 and why_none(self._walk.options.cuda_graphs, made) is None
            # A graph has its own copy of the tokens.
            return replace(made, peak_bytes=peak + x + GRAPH_BYTES) if recorded else made

        yield plan(together, step.layers)
        if ask.host == 0:
            return
        tiles = min(max(MANY, together), -(-total // together) * together)
        most = math.inf if target is None else target
        while tiles > together and plan(tiles, 0).peak_bytes + fixed > most:
            tiles = max(together, tiles // 2)
        bare = plan(tiles, 0).peak_bytes + fixed
        yield plan(tiles, max(0, min(step.layers - 1, int((most - bare) // layer))) if most < math.inf else 0)

    def _encodes(self, ask: Ask, whole: Grid, fused: bool) -> Iterator[Plan]:
        """Yield plans of one tile at a time, which fills a GPU at full size, with fewer and fewer frames per step."""
        program: TiledProgram = self._model.encoder.program
        own, size = program.own, (ask.height, ask.width)
        frames = 1 if ask.latents == 1 else own.frames
        latents = 1 if ask.latents == 1 else own.latents
        spans = [own.spans(own.unit * n + r) for n, r in zip(size, ask.rest, strict=True)]
        height, width = (max(s.end - s.start for s in axis) for axis in spans)
        how = Own(1, (len(spans[0]), len(spans[1])))
        besides = 4 * COPIES * frames * height * width * program.takes
        besides += 3 * 4 * latents * math.prod(size) * 2 * self._model.config.latent_channels
        for count in STEPS:
            steps = Steps(own.latents, count)
            if fused:
                peak = self._walk.tile_bytes(frames, height, width, count)
            else:
                tile = (height // own.unit, width // own.unit)
                over = (height % own.unit, width % own.unit)
                peak = self._plain.peak("encoder", latents, steps, tile, tile, over, self._how())
            yield Plan(steps, whole, peak + besides, fused, own=how, reference=fused and ask.cpu)


def layer_work(step: Tokens) -> int:
    """Return the operations of one layer's products for a token."""
    return 2 * step.width * (4 * step.width + 3 * step.gates)


def layer_bytes(step: Tokens, dtype: torch.dtype, kind: str | None) -> int:
    """Return the bytes of one layer's weights on the device.

    Args:
        step: the transformer.
        dtype: of activations.
        kind: type of products, None: that of activations.
    """
    w, g = step.width, step.gates
    outputs = 3 * w + w + 2 * g + w
    products = layer_work(step) // 2  # one weight each
    if kind is None:
        return (products + outputs + 4 * w) * dtype.itemsize
    return products * KINDS[kind].itemsize + outputs * (4 + wide_of(kind, dtype).itemsize) + 4 * w * dtype.itemsize


def group_bytes(step: Tokens, rows: int, dtype: torch.dtype, kind: str | None) -> int:
    """Return the bytes that one group of tiles needs in a layer in addition to its tokens.

    These are scratch and the results of attention or of the last sum. rows: tokens of the group."""
    run = planned(rows, step, dtype, kind, torch.device("cpu"))
    return run.nbytes + rows * (2 * step.width * wide_of(kind, dtype).itemsize + 4 * step.width // step.head)


def torch_bytes(step: Tokens, rows: int, dtype: torch.dtype) -> int:
    """Return the bytes that torch's own operators need between products, where no kernels run them.

    Most are those of the gate or of the rotation (engine/kernels/tokens/reference.py): in fp32, whatever the type of
    activations. 8-bit products are refused where there are no kernels.

    Args:
        step, rows, dtype: as for `group_bytes`.
    """
    copied = 0 if dtype == torch.float32 else 4
    gated = step.gates * (2 * copied + 4 + 4)  # gates and values, SiLU, and the result
    rotated = step.width * (3 * 4 + 3 * 4)  # queries and keys, halves of the result, and the result
    return rows * max(gated, rotated)


def blend_bytes(
    own: NativeTiles, rows: list[Span], columns: list[Span], frames: int, dtype: torch.dtype, output: torch.dtype
) -> int:
    """Return the bytes of one tile's pixels and of the parts that others are blended with.

    The pixels exist as they are made, in order, and in fp32 until they leave; parts are kept for neighbouring tiles and
    for the next section.

    Args:
        own: sizes of the network's own tiles.
        rows, columns: tiles on each axis.
        frames: latents of a section.
        dtype: of activations.
        output: of results.
    """
    height, width, shown = rows[0].end, columns[0].end, own.frames + own.blended
    tile = 3 * height * width * (3 * own.rate * frames * dtype.itemsize + shown * (4 * 4 + 4 * output.itemsize))
    below, right = (max(s.shared for s in spans) for spans in (rows, columns))
    tails = 3 * shown * dtype.itemsize * (2 * below * width * len(columns) + 2 * right * height)
    return tile + tails + 3 * own.blended * rows[-1].end * columns[-1].end * dtype.itemsize
