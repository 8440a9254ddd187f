"""Execute a transformer layer by layer over the tokens of several tiles. As many layers' weights stay on the device as
there is room for; the others are copied from host memory while the layers before them compute.

A product takes the rows of one group of tiles, however many tiles there are; a group that is not full is padded. So a
tile's bits depend on no other tile, and the number of tiles at once only changes memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.observe import observed
from ....kernels.tokens import attended, attends, gated, normalised, rotated, rounded, sum_rows
from ....network.plain import Half
from ....network.products import KINDS, Product, product, product_rows, wide_of
from ....runtime.context import ExecutionContext
from ....runtime.pinned import staged
from ..tokens import EPS, Layer, Tokens, turns

#: through(walk, x) executes walk(x), the same function every time, by launches or by replaying a graph of them.
Through = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
#: Layers whose weights are being copied or in use.
BUFFERS = 2
#: Most rows of a group of tiles: they fill a GPU in one product. The int8 kernel makes two tiles of 128 x 128 at a time
#: on each of an H200's 132 SMs: seven tiles of MiniMax H3 leave none idle, four 14 % of them in two products.
ROWS = {None: 8192, "fp8": 8192, "int8": 12800}


@dataclass(frozen=True)
class LayerWeights:
    norm1: Tensor
    qkv: Product
    out: Product
    scale1: Tensor
    norm2: Tensor
    up: Product
    down: Product
    scale2: Tensor

    @classmethod
    def of(
        cls, layer: Layer, kind: str | None, dtype: torch.dtype, wide: torch.dtype, device: torch.device
    ) -> LayerWeights:
        """Pack a layer. `kind` is the operand type of its products, None: all in `dtype`; `wide` is the result type of
        8-bit products."""
        norm1, scale1, norm2, scale2 = (
            t.to(device, dtype) for t in (layer.norm1.weight, layer.scale1, layer.norm2.weight, layer.scale2)
        )
        qkv, out, up, down = (
            Product.of(p, kind, wide, device) for p in (layer.attn.to_qkv, layer.attn.to_out, layer.ff.w1, layer.ff.w2)
        )
        return cls(norm1, qkv, out, scale1, norm2, up.paired() if kind == "int8" else up, down, scale2)

    def tensors(self) -> Iterator[Tensor]:
        for f in fields(self):
            value = getattr(self, f.name)
            values = (value.weight, value.bias, value.scales) if isinstance(value, Product) else (value,)
            yield from (v for v in values if v is not None)

    def mapped(self, tensors: Iterator[Tensor]) -> LayerWeights:
        """Return the same structure with other tensors, in the order of `tensors`."""

        def one(value: Tensor | Product) -> Tensor | Product:
            if not isinstance(value, Product):
                return next(tensors)
            scales = None if value.scales is None else next
            return replace(value, weight=next(tensors), bias=next(tensors), scales=scales and scales(tensors))

        return replace(self, **{f.name: one(getattr(self, f.name)) for f in fields(self)})

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())


@observed
def attended_by_torch(qkv: Tensor, head: int) -> Tensor:
    """Return the attention among all tokens of one tile, [S, 3 * width] -> [S, width]. It takes one tile at a time
    because a library's division of the work may depend on its amount."""
    q, k, v = qkv.view(1, qkv.shape[0], -1, 3, head).permute(3, 0, 2, 1, 4)
    return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


def tokens_of(step: Tokens, frames: int, height: int, width: int) -> int:
    return frames * height * width + step.behind


def tiles_together(tokens: int, tiles: int, device: torch.device, kind: str | None = None) -> int:
    """Return the tiles per group, given those of a frame: single tiles would leave a part of a GPU idle. Groups have
    equal numbers of them."""
    groups = -(-tiles // max(1, ROWS[kind] // tokens))
    return 1 if device.type == "cpu" else -(-tiles // groups)


class Scratch:
    """Memory of a run for one group of tiles in a layer, at the same place every time. Operands of products share
    theirs, and so do results: of neither are two needed at a time."""

    def __init__(self, run: ExecutionContext, rows: int, step: Tokens, kind: str | None) -> None:
        rows, take, w, i = product_rows(rows, kind), run.arena.take, step.width, step.gates

        def shared(dtype: torch.dtype, *columns: int) -> Iterator[Tensor]:
            memory = take((rows * max(columns),), dtype)
            return (memory[: rows * n].view(rows, n) for n in columns)

        wide = wide_of(kind, run.dtype)
        # Results of attention in 16 bit lie behind the room of their codes.
        whole = 3 * w if kind is not None and wide.itemsize == 2 else w
        self.narrow, self.gate, found = shared(KINDS.get(kind or "", run.dtype), w, i, whole)
        self.found = self.narrow if whole == w else found.flatten()[rows * w :].view(wide).view(rows, w)
        ups = i if kind == "int8" else 2 * i  # those products have multiplied gates and values
        self.qkv, self.up, self.made = shared(wide, 3 * w, ups, w)
        self.scales = None if kind is None else take((rows,), torch.float32)
        self.sums = take((sum_rows(rows) * max(3 * w, 2 * i),), torch.int32) if kind == "int8" else None


def planned(rows: int, step: Tokens, dtype: torch.dtype, kind: str | None, device: torch.device) -> ExecutionContext:
    """Return a dry ExecutionContext for groups of `rows` tokens."""
    run = ExecutionContext(dtype, device)
    with run.arena.scope():
        Scratch(run, rows, step, kind)
    return run


class TokenNetwork:
    """The Tokens step of a component, in activations of `dtype`; products are of `kind`: "fp8", "int8", or None for
    `dtype`."""

    def __init__(
        self, half: Half, dtype: torch.dtype, device: torch.device, kind: str | None = None,
        resident: int | None = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        """Pack the weights.

        Args:
            resident: layers whose weights stay on the device; None: all.
            backend: of the kernels between products.
        """
        self.step: Tokens = next(s for s in half.program.steps if isinstance(s, Tokens))
        self.dtype, self.device, self.kind, s = dtype, device, kind, self.step
        self.wide, self._how = wide_of(kind, dtype), {"backend": backend}
        self.resident = s.layers if resident is None else resident

        def here(name: str, of: torch.dtype = dtype) -> tuple[Tensor, Tensor]:
            return half.part(name).weight.to(device, of), half.part(name).bias.to(device, of)

        mean, deviation, self._learned = (half.part(name) for name in (s.mean, s.deviation, s.learned))
        self._units = mean.to(device).float(), deviation.to(device).float()
        weight, bias = here(s.first, torch.float32)  # the latent's few channels, where rounding would be amplified
        self._first = weight.flatten(1), bias
        self._enter, self._norm, self._leave = here(s.enters), here(s.norm), Product(*here(s.leaves))
        #: Bytes of the above, where the parameters are on another device.
        lent = (*self._first, *self._enter, *self._norm, self._leave.weight, self._leave.bias, self._learned)
        self._lent_bytes = 0 if self._learned.device == device else sum(t.nbytes for t in lent)
        self._learned = self._learned[0].to(device, dtype)
        self.layers = [self._packed(half.part(f"{s.name}.{i}"), i) for i in range(s.layers)]
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._turns: tuple[tuple[int, ...], Tensor] | None = None

    def _packed(self, layer: Layer, index: int) -> LayerWeights:
        """Return a layer's weights on the device, or page-locked on the host."""
        if self.device.type != "cuda" or index < self.resident:
            return LayerWeights.of(layer, self.kind, self.dtype, self.wide, self.device)
        if self.kind is None:
            _lock(layer)
            return LayerWeights.of(layer, None, self.dtype, self.wide, torch.device("cpu"))
        made = LayerWeights.of(layer, self.kind, self.dtype, self.wide, self.device)
        hosted = [t.cpu() for t in made.tensors()]
        return made.mapped(t if (locked := staged(t)) is None else locked for t in hosted)

    @property
    def nbytes(self) -> int:
        """Return the device bytes of resident layers and of other weights that are not the parameters themselves."""
        return self._lent_bytes + sum(layer.nbytes for layer in self.layers[: self.resident])

    @property
    def host_bytes(self) -> int:
        """Return the bytes of streamed layers."""
        return sum(layer.nbytes for layer in self.layers[self.resident :])

    def memory(self, size: tuple[int, ...], tiles: int) -> ExecutionContext:
        """Return a dry ExecutionContext for tiles of `size` (T, h, w), given the tiles of a frame."""
        tokens = tokens_of(self.step, *size)
        together = tiles_together(tokens, tiles, self.device, self.kind)
        return planned(together * tokens, self.step, self.dtype, self.kind, self.device)

    @torch.no_grad()
    def decode(
        self, z: Sequence[Tensor], tiles: int, check: Callable[[], None], run: ExecutionContext,
        through: Through | None = None
    ) -> Iterator[Tensor]:
        """Decode tiles of one size.

        Args:
            z: the tiles' latents [C, T, h, w] on the device.
            tiles: of a frame.
            check: called between layers, may raise.
            run: as from `memory`, allocated.
            through: launches all layers or replays them.

        Yields:
            Each tile's pixels in order, as the last product gives them: [3, rate * T, patch * h, patch * w].
        """
        size, s = tuple(z[0].shape[1:]), self.step
        tokens = tokens_of(s, *size)
        real, together = tokens - s.behind, tiles_together(tokens, tiles, self.device, self.kind)
        x = torch.zeros(-(-len(z) // together), together * tokens, s.width, dtype=self.dtype, device=self.device)
        rows = x.view(-1, tokens, s.width)
        for latents, own in zip(z, rows, strict=False):
            own[:real] = self._entered(latents.flatten(1).t().float())
        rows[:, real : tokens - 1] = self._learned
        if self._turns is None or self._turns[0] != size:
            with torch.inference_mode(False):  # later calls outside inference mode may use it
                self._turns = size, turns(*size, s.head, s.behind, self.device)
        walk = functools.partial(self._walk, run, tokens, check)
        x = walk(x) if through is None else through(walk, x)
        rows = x.view(-1, tokens, s.width)
        for own in rows[: len(z)]:
            own = F.layer_norm(own[:real], (s.width,), *self._norm, EPS)
            made = own.new_empty(real, len(self._leave.bias))
            product(self._leave, own, made)
            yield self._pixels(made, *size)

    def _walk(self, run: ExecutionContext, tokens: int, check: Callable[[], None], x: Tensor) -> Tensor:
        """Execute all layers on x [groups, R, width], in place."""
        with run.arena.scope():
            scratch = Scratch(run, x.shape[1], self.step, self.kind)
            for layer in self.streamed():
                if not run.recording:
                    check()
                for group in x:
                    self._layer(layer, group, tokens, self._turns[1], scratch)
        return x

    def _entered(self, latents: Tensor) -> Tensor:
        """Turn latents, float32 [n, C], into tokens [n, width]."""
        latents = torch.addcmul(self._units[0], latents, self._units[1])
        latents = torch.addmm(self._first[1], latents, self._first[0].t()).to(self.dtype)
        return torch.addmm(self._enter[1], latents, self._enter[0].t())

    def _pixels(self, made: Tensor, frames: int, height: int, width: int) -> Tensor:
        """Reorder [tokens, (colour, frame, row, column)] to [3, F, H, W]."""
        s = self.step
        parts = made.view(frames, height, width, s.channels(0), s.rate, s.patch, s.patch)
        return parts.permute(3, 0, 4, 1, 5, 2, 6).reshape(
            s.channels(0), frames * s.rate, height * s.patch, width * s.patch
        )

    # -- one layer -------------------------------------------------------------------------------------------------

    def _layer(self, w: LayerWeights, x: Tensor, tokens: int, table: Tensor, s: Scratch) -> None:
        """Execute one layer on x [R, width] in place; R is a multiple of `tokens`."""
        how, rows = self._how, x.shape[0]
        narrow, scales = s.narrow[:rows], None if s.scales is None else s.scales[:rows]
        normalised(x, w.norm1, EPS, narrow, scales, turn=w.qkv.turn, **how)
        product(w.qkv, s.narrow, s.qkv, s.scales, s.sums, **how)
        rotated(s.qkv[:rows], table, self.step.head, EPS, **how)
        self._attended(w, tokens, s, narrow, scales)
        more = self._added(w.out, s.narrow, w.scale1, x, s)
        normalised(x, w.norm2, EPS, narrow, scales, turn=w.up.turn, **more, **how)
        product(w.up, s.narrow, s.up, s.scales, s.sums, **how)
        close = rounded if w.up.pairs else gated
        close(s.up[:rows], s.gate[:rows], scales, turn=w.down.turn, **how)
        if more := self._added(w.down, s.gate, w.scale2, x, s):
            x.addcmul_(more["y"].to(x.dtype), w.scale2)

    def _attended(self, w: LayerWeights, tokens: int, s: Scratch, narrow: Tensor, scales: Tensor | None) -> None:
        """Write the attention within each tile into the operand of the next product."""
        head, rows, how = self.step.head, len(narrow), {"turn": w.out.turn, **self._how}
        if attends(s.qkv, head, self._how["backend"]):
            attended(s.qkv[:rows], tokens, head, s.found[:rows], **self._how)
            if scales is not None:
                rounded(s.found[:rows], narrow, scales, **how)
            return
        for i in range(0, rows, tokens):
            tile = slice(i, i + tokens)
            found = attended_by_torch(s.qkv[tile], head)
            rounded(found, narrow[tile], None if scales is None else scales[tile], zeroed=True, **how)

    def _added(self, p: Product, operand: Tensor, scale: Tensor, x: Tensor, s: Scratch) -> dict[str, Tensor]:
        """Add a product times `scale` to x, or return what is left to add, as `normalised` takes it: int8 products
        alone add their results themselves."""
        if p.weight.dtype == torch.int8:
            product(p, operand, x, s.scales, s.sums, scale=scale, **self._how)
            return {}
        product(p, operand, s.made, s.scales, s.sums, **self._how)
        return {"y": s.made[: len(x)], "scale": scale}

    # -- weights ---------------------------------------------------------------------------------------------------

    def streamed(self) -> Iterator[LayerWeights]:
        """Yield every layer's weights on the device, in order. Weights in host memory are copied at most two layers
        ahead, each into the memory of a layer that has been computed."""
        if self._copies is None or self.resident == self.step.layers:
            yield from self.layers
            return
        current = torch.cuda.current_stream(self.device)
        first = self.layers[self.resident]
        rooms = [[torch.empty_like(t, device=self.device) for t in first.tensors()] for _ in range(BUFFERS)]
        copied = [torch.cuda.Event() for _ in rooms]
        free = [torch.cuda.Event() for _ in rooms]
        for event in free:
            event.record(current)
        hosted = list(range(self.resident, self.step.layers))

        def fetch(order: int) -> None:
            if order < len(hosted):
                at = order % BUFFERS
                with torch.cuda.stream(self._copies):
                    self._copies.wait_event(free[at])
                    for room, t in zip(rooms[at], self.layers[hosted[order]].tensors(), strict=True):
                        room.copy_(t, non_blocking=True)
                    copied[at].record(self._copies)

        try:
            for order in range(BUFFERS):
                fetch(order)
            yield from self.layers[: self.resident]
            for order, index in enumerate(hosted):
                at = order % BUFFERS
                current.wait_event(copied[at])
                yield self.layers[index].mapped(iter(rooms[at]))
                free[at].record(current)
                fetch(order + BUFFERS)
        finally:  # no copy may reach memory after it is reused
            current.wait_stream(self._copies)


def _lock(layer: Layer) -> None:
    """Page-lock a layer's parameters, where the system allows it, so that copies of them overlap with the GPU's
    work."""
    for parameter in layer.parameters():
        with torch.inference_mode(parameter.is_inference()):  # its new data must be of the parameter's mode
            if not parameter.is_pinned() and (locked := staged(parameter.data)) is not None:
                parameter.data = locked
