"""One clip passing through a fused network: the operators that compute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.attention import attention, scratch_bytes
from ..kernels.conv3d import Epilogue, Geometry, Partials, Weight, conv3d, frames_of, padded_channels
from ..kernels.norm_act import Norm, Store, coefficients, norm_act, statistics
from ..kernels.to_pixels import Pixels, scratch_floats, to_pixels
from .buffers import Buffer
from .history import split_rows
from .memory import Call, Memory, Visit
from .parking import BAND_ROWS, Parked
from .rings import Plane, Ring
from .weights import Attention, Conv, Output

_PLAIN = Geometry()
COPY = Norm("none")
#: Bytes of a picture's rows as a convolution reads them, unless the plan sets them. 1024x1024 with 256 channels in 16
#: bit take 515 MiB.
BAND_BYTES = 640 << 20


@dataclass(frozen=True)
class Input:
    """Input of one call of a convolution (a buffer, from its slot `start` on) and the output rows that it is for."""

    data: Tensor
    start: int
    geometry: Geometry
    first: int
    last: int

    def rows(self, x: Tensor, factor: int = 1) -> Tensor:
        """Return these rows of x, which has `factor` rows for each of the input's."""
        return x[:, factor * self.first : factor * self.last]


class ExecutionContext(Memory):
    """Executes a network's steps at one frame size; before `allocate` it only records the memory that they take.

    `dtype` is the type of activations; operands have that of their convolution. One ExecutionContext has one clip at a
    time. `head` and `border`, as in Memory, are the input of convolutions before a clip and around a frame."""

    def conv(
        self, conv: Conv, x: Tensor, out: Tensor, norm: Norm = COPY, sums: Partials | None = None, groups: int = 0,
        residual: Tensor | None = None, geometry: Geometry = _PLAIN, skip: int = 0, pixels: Pixels | None = None,
        free: Callable[[Input], None] | None = None, frame: int = 2,
        pieces: Sequence[tuple[Weight, int, int, int]] | None = None,
    ) -> Partials | None:
        """Run x through a causal convolution into `out`.

        Args:
            conv: packed weight.
            x: [D, H, W, C], normalised and activated on the way, or as it is.
            out: the results; may have no frames with `skip`.
            norm: norm of x.
            sums: sums of x that the norm needs.
            groups: if not 0, the sums of `out` in so many groups are returned.
            residual: added to the results.
            skip: frames of history that this call does not read.
            pixels: an output format.
            free: called for each part of x's rows before `out` gets those rows: they may be overwritten, nothing else
                reads them.
            frame: x's first frame within the clip, if the weights of its first frames are in the weight itself.
            pieces: used instead of the weight's.
        """
        if groups and not out.shape[0]:
            groups = 0
        parts, behind = [], int(free is not None)
        # With zeros before the clip, its first frames would need other weights.
        first = self.done[conv.key] if self.head == "replicate" and not self.after else 2
        factor = conv.weight.phases[1]
        rows = out.shape[1] // factor
        for i in self.inputs(conv, x, norm, self.coefficients_of(x, norm, sums), rows, geometry, behind):
            if free is not None:
                free(i)
            target, added = i.rows(out, factor), None if residual is None else i.rows(residual, factor)
            frames = []
            for weight, a, b, later in pieces or conv.weight.pieces(first, out.shape[0]):
                frames.append(self.product(
                    conv, i.data, target[a:b], weight=weight, geometry=i.geometry, groups=groups, pixels=pixels,
                    residual=None if added is None else added[a:b], first=frame,
                    start=(i.start + a + skip + later) % i.data.shape[0],
                ))  # fmt: skip
            parts.append(self.joined(frames, 0))
        if self.walk.open:
            weight = pieces[0][0] if pieces else conv.weight
            self._called(conv, weight, out, geometry, groups, residual is not None)
            return self.walk.sums(out, groups, conv.weight.phases[1:], conv.weight)
        return self.joined(parts)

    def pointwise(
        self, conv: Conv, x: Tensor, out: Tensor, part: Input | None = None, weight: Weight | None = None
    ) -> None:
        """Run a convolution without history or border directly on a residual stream.

        Args:
            conv: packed weight.
            x: [D, H, W, C].
            out: the results.
            part: rows of x to take; None for all.
            weight: used instead of conv's own.
        """
        if self.dry:
            return
        geometry = Geometry(conv.stride)
        if part is not None:
            geometry = Geometry(origin=(part.first, 0), first_row=part.first, frame_rows=x.shape[1])
            out = part.rows(out)
        if self.watch is not None:
            self.watch(conv, x)
        self.product(conv, x, out, weight=weight, geometry=geometry)

    def buffered(self, conv: Conv, buffer: Tensor, inside: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Run a convolution of single frames that are already `inside` a bordered buffer [D, H + 2, W + 2, C]."""
        if self.walk.open:
            self._called(conv, conv.weight, out, _PLAIN, 0, residual is not None)
        if self.dry:
            return
        if self.watch is not None:
            self.watch(conv, inside)
        self.product(conv, buffer, out, residual=residual)

    def _called(self, conv: Conv, weight: Weight, out: Tensor, geometry: Geometry, groups: int, added: bool) -> None:
        """Note how a convolution is called; of calls of several sizes the last one's."""
        frames, rows, columns = (n // p for n, p in zip(out.shape[:3], weight.phases, strict=True))
        work = self.walk.repeats * frames * rows * columns * weight.flops_per_position
        before = self.calls.get(conv.key)
        self.calls[conv.key] = Call(
            weight, geometry, frames, (rows, columns), groups, added, conv.half_accumulate,
            0 if conv.bias is None else conv.bias.dim(), out.dtype, work + (before.work if before else 0),
        )  # fmt: skip

    def product(
        self, conv: Conv, data: Tensor, out: Tensor, *, weight: Weight | None = None, geometry: Geometry = _PLAIN,
        residual: Tensor | None = None, groups: int = 0, pixels: Pixels | None = None, start: int = 0, first: int = 2,
    ) -> Partials | None:
        """Compute a convolution; all do so here, except with `to_pixels`. weight: used instead of conv's own."""
        epilogue = Epilogue(conv.bias, residual, groups, conv.scale, half_accumulate=conv.half_accumulate,
                            pixels=pixels, health=self.health)  # fmt: skip
        return self.attempt(conv3d, data, weight or conv.weight, out, geometry=geometry, epilogue=epilogue,
                            start=start, first=first)  # fmt: skip

    def attend(self, block: Attention, x: Tensor, sums: Partials | None) -> Partials | None:
        """Add attention within each frame, or among all of x, to x in place; return the sums of the result.

        Products are frame by frame, so that their shapes (and with them their rounding) never depend on the chunk."""
        d, h, w, c = x.shape
        n, many = h * w, d if block.whole else 1
        with self.arena.scope():
            tokens = self.take(1, h, w, c)
            q, k, v = (self.take(1, many * n, c) for _ in range(3))
            # Our kernels write a result only when they are done with its query, so both can share memory.
            y = q if block.whole else self.take(1, n, c)
            size = scratch_bytes(many * n, self.dtype.itemsize, c, block.whole) if block.flash else 0
            scratch = self.arena.take((size,), torch.uint8)
            if self.dry:
                return None
            coefs = self.coefficients_of(x, block.norm, sums)

            def product(flat: Tensor, linear: tuple[Tensor, Tensor], out: Tensor) -> None:
                self.attempt(torch.addmm, linear[1], flat, linear[0], out=out)

            for first in range(0, d, many):
                for i in range(many):
                    own = None if coefs is None else coefs[first + i : first + i + 1]
                    options = {"border": 0, "store": Store(silu=False), "coefs": own, "health": self.health}
                    self.attempt(norm_act, x[first + i : first + i + 1], block.norm, tokens, **options)
                    for linear, out in zip((block.q, block.k, block.v), (q, k, v), strict=True):
                        product(tokens.view(n, c), linear, out[0, i * n : (i + 1) * n])
                for out in (q, k, v):
                    self.inspect(out)  # a softmax gives -Inf no weight
                backend = "auto" if block.flash else "reference"
                mixed = self.attempt(attention, q, k, v, out=y, scratch=scratch, clip=block.whole, backend=backend)
                for i in range(many):
                    product(mixed[0, i * n : (i + 1) * n], block.out, tokens.view(n, c))
                    x[first + i].view(n, c).add_(tokens.view(n, c))
        return None if coefs is None else self.attempt(statistics, x, block.norm.groups)

    def pixels(self, conv: Output, x: Tensor, norm: Norm, sums: Partials | None, out: Tensor, format: Pixels) -> None:
        """Apply the last norm and convolution, and store finished pixels.

        Args:
            conv: packed weight.
            x: [D, H, W, C].
            norm: norm of x.
            sums: sums of x that the norm needs.
            out: [D, H, W, 3].
            format: range and type of pixels.
        """
        coefs = self.coefficients_of(x, norm, sums)
        with self.arena.scope():
            scratch = self.arena.take((scratch_floats(*out.shape),), torch.float32)
            for i in self.inputs(conv, x, norm, coefs, out.shape[1], _PLAIN):
                self.attempt(to_pixels, i.data, conv.weight, conv.bias, i.rows(out), pixels=format, start=i.start,
                             packed=conv.packed, scratch=scratch, health=self.health)  # fmt: skip

    def inspect(self, x: Tensor) -> None:
        """Look for NaN and Inf in x where no norm does: its sum has them, and finite values do not add up to either."""
        if not self.dry:
            self.health.add_(self.attempt(torch.sum, x, dtype=torch.float32), alpha=0.0)

    # -- where convolutions find their input ------------------------------------------------------------------------

    def joined(self, parts: list[Partials | None], axis: int = 1) -> Partials | None:
        """Join the sums of parts that follow each other in space (axis 1) or time (0)."""
        if not parts or parts[0] is None:
            return None
        return parts[0] if len(parts) == 1 else self.attempt(Partials.concat, parts, axis)

    def coefficients_of(self, x: Tensor, norm: Norm, sums: Partials | None) -> Tensor | None:
        """Return the coefficients [D, 2, C] of a group norm of x; None for other norms and in a dry run."""
        if norm.kind != "group" or self.dry or not x.shape[0]:
            return None
        sums = self.attempt(statistics, x, norm.groups) if sums is None else sums
        return self.attempt(coefficients, sums, norm, x.shape[1] * x.shape[2], health=self.health)

    def inputs(
        self, conv: Conv, x: Tensor, norm: Norm, coefs: Tensor | None, rows: int, geometry: Geometry,
        behind: int = 0,
    ) -> Iterator[Input]:  # fmt: skip
        """Write x as the next input of `conv` after its history, whole or band by band; yield nothing in a dry run.

        Args:
            conv: packed weight.
            x: [D, H, W, C].
            norm: norm of x.
            coefs: result of `coefficients_of` for it.
            rows: output rows.
            geometry: of the convolution.
            behind: bands that are written before the first is yielded. With 1, x's rows of a band are free by then.
        """
        first = self.done[conv.key]
        with self.arena.scope():
            yield from self._inputs(conv, x, self.conditioned(norm, x.shape[3], first), coefs, rows, geometry, behind)
        if self.forgets and not (first or self.dry) and len(x) == 1 and conv.history:
            self.forget(conv.key)

    def _inputs(
        self, conv: Conv, x: Tensor, norm: Norm, coefs: Tensor | None, rows: int, geometry: Geometry, behind: int
    ) -> Iterator[Input]:
        d, h, w, c = x.shape
        starts = self.done[conv.key] == 0
        if conv.history:
            d, _, self.drains = self.coming(conv.key, d, self.drains)
        if d > x.shape[0]:
            self.ended.add(conv.key)
        self.done[conv.key] += d
        if not d:
            return
        # A convolution that looks ahead also computes the frame before the clip's first one, which is not a result.
        late = int(bool(self.after) and starts and conv.history > 0)
        plane = (h + 2, w + 2, padded_channels(c, conv.dtype))
        store = Store(norm is not COPY, self.border, conv.scale, conv.gain)
        work, times = d * h * w // math.prod(geometry.stride) * conv.weight.flops_per_position, self.walk.repeats
        if self.walk.open:
            self.most[conv.key] = max(self.most.get(conv.key, 0), d)
        if self.dry:
            self.visits.setdefault(conv.key, Visit(conv.history)).work += times * work
        if self.still:
            yield from self._bands(conv, x, norm, coefs, store, plane, rows, geometry, behind)
            return
        if not (conv.history and self.parked.parking.holds(conv.key)):
            ring = self.rings.setdefault((plane, conv.dtype), Ring(plane, conv.dtype))
            if self.dry:
                ring.join(conv.key, conv.history, d)
                return
            start, slot = ring.place(conv.key, d, bool(self.after))
            if x.shape[0]:
                self.write(x, norm, ring.data, store, coefs, slot=slot)
            ring.begin(conv.key, self.head, start)
            if d > x.shape[0]:
                self._follow(ring.data, slot + x.shape[0])
            if self.watch is not None:
                self.watch(conv, frames_of(ring.data, slot, d)[:, 1:-1, 1:-1, :c])
            yield Input(ring.data, (start + late) % ring.slots, geometry, 0, rows)
            return
        parked, kernel = self.parked, conv.weight.kernel[1]
        reach = geometry.origin[0] + kernel + int(conv.weight.shifted)
        waiting: deque[tuple[Input, Buffer]] = deque()
        size = conv.history, d, rows, geometry.stride[1], reach
        for band in parked.bands(conv.key, plane, conv.dtype, *size, work, times, starts):
            here = replace(geometry, first_row=band.first, frame_rows=rows)
            if self.dry:
                parked.note(conv.key, band, d)
                continue
            buffer = parked.enter(conv.key, band, d)
            if x.shape[0]:
                self.write(x, norm, buffer.view, store, coefs, slot=conv.history, first=band.top)
            parked.arrive(buffer, self.head)
            if d > x.shape[0]:
                self._follow(buffer.view, conv.history + x.shape[0])
            waiting.append((Input(buffer.view, late, here, band.first, band.last), buffer))
            if len(waiting) > behind:
                yield from _used(parked, waiting)
        while waiting:
            yield from _used(parked, waiting)

    def write(
        self, x: Tensor, norm: Norm, data: Tensor, store: Store, coefs: Tensor | None, *, slot: int = 0,
        first: int | None = None,
    ) -> None:  # fmt: skip
        """Write x, normalised, into `data`.

        Args:
            x: [D, H, W, C].
            norm: norm of x.
            data: frames [slots, H + 2, W + 2, C].
            store: how values are stored.
            coefs: result of `coefficients_of`.
            slot: first slot of `data` to write.
            first: first bordered row that `data` holds, if it holds only a band.
        """
        self.attempt(norm_act, x, norm, data, slot=slot, first=first, store=store, coefs=coefs, health=self.health)

    def _bands(
        self, conv: Conv, x: Tensor, norm: Norm, coefs: Tensor | None, store: Store, plane: Plane, rows: int,
        geometry: Geometry, behind: int,
    ) -> Iterator[Input]:  # fmt: skip
        """Yield `inputs` without history.

        Memory for as many rows as BAND_BYTES or the plan's bands hold is taken only now."""
        d, c = x.shape[0], x.shape[3]
        reach = geometry.origin[0] + conv.weight.kernel[1] + int(conv.weight.shifted)
        asked = self.parked.parking
        height = asked.rows
        if not height:
            line = d * math.prod(plane[1:]) * conv.dtype.itemsize
            room = asked.band_bytes if asked.keys is None else BAND_BYTES
            height = (room // line - reach) // geometry.stride[1] + 1
        bands = list(split_rows(rows, geometry.stride[1], reach, max(height // BAND_ROWS, 1) * BAND_ROWS))
        with self.arena.scope():
            size = d * max(b.bottom - b.top for b in bands) * math.prod(plane[1:])
            memory = [self.arena.take((size,), conv.dtype) for _ in bands[: behind + 1]]
            waiting: deque[Input] = deque()
            for i, band in enumerate(bands if not self.dry else ()):
                shape = d, band.bottom - band.top, *plane[1:]
                data = memory[i % len(memory)][: math.prod(shape)].view(shape)
                self.write(x, norm, data, store, coefs, first=band.top)
                if self.watch is not None:
                    self.watch(conv, data[:, 1:-1, 1:-1, :c])
                here = replace(geometry, first_row=band.first, frame_rows=rows)
                waiting.append(Input(data, 0, here, band.first, band.last))
                if len(waiting) > behind:
                    yield waiting.popleft()
            yield from waiting

    def _follow(self, data: Tensor, slot: int) -> None:
        """Write the input after a clip's end into `slot`, after its last frame: a copy of that, or zeros."""
        count = data.shape[0]
        if self.head == "zero":
            data[slot % count].zero_()
        else:
            data[slot % count].copy_(data[(slot - 1) % count])


def _used(parked: Parked, waiting: deque[tuple[Input, Buffer]]) -> Iterator[Input]:
    given, buffer = waiting.popleft()
    yield given
    parked.leave(buffer)
