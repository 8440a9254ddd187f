"""One clip on its way through a fused network: operators, arena, rings and its place in time."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from ..kernels.attention import attention
from ..kernels.conv3d import Epilogue, Geometry, Partials, conv3d, padded_channels
from ..kernels.norm_act import Norm, Store, coefficients, norm_act, statistics
from ..kernels.to_pixels import Pixels, to_pixels
from ..kernels.upsample import upsample
from .memory import Arena, Ring
from .weights import Attention, Conv, Downsampler, Output, Upsampler

COPY = Norm("none")


class Run:
    """Executes a network's steps at one frame size, or, before `allocate`, only learns what memory they take.

    `dtype` is the type of activations and operands. Batch is one clip per Run.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.arena = Arena()
        self.rings: dict[tuple[int, int, int], Ring] = {}
        #: Frames that each stage has taken in so far.
        self.done: Counter[str] = Counter()
        self.dry = True

    @property
    def nbytes(self) -> int:
        return self.arena.peak + sum(r.nbytes for r in self.rings.values())

    def allocate(self) -> None:
        """Get the memory the dry walk asked for; from now on steps compute."""
        self.arena.allocate(self.device)
        for ring in self.rings.values():
            ring.allocate(self.device)
        self.dry = False
        self.restart()

    def free(self) -> None:
        """Give the memory back; `allocate` may follow again."""
        self.arena.free()
        for ring in self.rings.values():
            ring.data = None

    def restart(self) -> None:
        """A new clip of the same size in the same memory."""
        self.done.clear()
        for ring in self.rings.values():
            ring.restart()

    def take(self, *shape: int) -> Tensor:
        return self.arena.take(shape, self.dtype)

    # -- steps ----------------------------------------------------------------------------------------------------

    def feed(self, key: str, halo: int, x: Tensor, norm: Norm = COPY, sums: Partials | None = None) -> tuple[Ring, int]:
        """Write [D, H, W, C] (normalised and activated, or as it is) as the next input of convolution `key`.

        Returns its ring and the slot it reads from.
        """
        d, h, w, c = x.shape
        ring = self._ring(h, w, c)
        if self.dry:
            ring.join(key, halo, d)
            return ring, 0
        start, slot = ring.place(key)
        coefs = coefficients(sums, norm, h * w) if sums is not None else None
        norm_act(x, norm, ring.data, slot=slot, store=Store(silu=norm is not COPY), coefs=coefs)
        ring.begin(key)
        return ring, start

    def advance(self, frames: int, h: int, w: int) -> None:
        """Every convolution at this resolution has had its `frames`."""
        for plane, ring in self.rings.items():
            if plane[:2] == (h + 2, w + 2) and not self.dry:
                ring.advance(frames)

    def conv(
        self, conv: Conv, ring: Ring, start: int, out: Tensor, groups: int, residual: Tensor | None = None,
        geometry: Geometry | None = None,
    ) -> Partials | None:
        """The convolution over what `feed` wrote; `groups` > 0 asks for the sums the next norm needs."""
        if self.dry:
            return None
        epilogue = Epilogue(bias=conv.bias, residual=residual, groups=groups)
        return conv3d(ring.data, conv.weight, out, geometry=geometry or Geometry(), epilogue=epilogue, start=start)

    def pointwise(self, conv: Conv, x: Tensor, out: Tensor) -> None:
        """A 1x1x1 convolution straight from a residual stream."""
        if not self.dry:
            conv3d(x, conv.weight, out, epilogue=Epilogue(bias=conv.bias))

    def upsample(self, up: Upsampler, x: Tensor, out: Tensor, first: int, groups: int) -> Partials | None:
        """x [D, H, W, C] -> out at twice the size; `first` is x's first frame within the clip."""
        ring, start = self.feed(up.key, up.halo, x)
        if self.dry:
            return None
        return upsample(ring.data, up.composed, out, first=first, groups=groups, start=start)

    def downsample(self, down: Downsampler, x: Tensor, out: Tensor, starts: bool, groups: int) -> Partials | None:
        """x [D, H, W, C] -> out at half the size (and frame rate). `starts`: the clip begins with x.

        A stride of 2 in time leaves one frame of history where the clip's start has two copies of its first one.
        """
        ring, start = self.feed(down.key, down.halo, x)
        if self.dry:
            return None
        if down.factor == 2 and not starts:
            start = (start + 1) % ring.slots
        # The zero row and column lie below and to the right: taps start inside the border.
        geometry = Geometry(stride=(down.factor, 2, 2), origin=(1, 1))
        return self.conv(down, ring, start, out, groups, geometry=geometry)

    def attend(self, block: Attention, x: Tensor, sums: Partials | None) -> Partials | None:
        """Attention within each frame, added to x in place; returns the sums of the result.

        Frame by frame, so that the shapes of the products (and with them their rounding) never depend on the chunk.
        """
        _, h, w, c = x.shape
        n = h * w
        with self.arena.scope():
            tokens = self.take(1, h, w, c)
            q, k, v, y = (self.take(1, n, c) for _ in range(4))
            if self.dry:
                return None
            coefs = coefficients(sums, block.norm, n)
            for i in range(x.shape[0]):
                norm_act(x[i : i + 1], block.norm, tokens, border=0, store=Store(silu=False), coefs=coefs[i : i + 1])
                flat = tokens.view(n, c)
                for (weight, bias), out in zip((block.q, block.k, block.v), (q, k, v), strict=True):
                    torch.addmm(bias, flat, weight, out=out[0])
                y.copy_(attention(q, k, v))
                weight, bias = block.out
                torch.addmm(bias, y[0], weight, out=q[0])
                x[i].view(n, c).add_(q[0])
        return statistics(x, block.norm.groups)

    def pixels(self, conv: Output, x: Tensor, norm: Norm, sums: Partials | None, out: Tensor, format: Pixels) -> None:
        """Last norm and convolution, stored as finished pixels in `out` [D, H, W, 3]."""
        ring, start = self.feed(conv.key, 2, x, norm, sums)
        if not self.dry:
            to_pixels(ring.data, conv.weight, conv.bias, out, pixels=format, start=start, packed=conv.packed)

    def _ring(self, h: int, w: int, channels: int) -> Ring:
        plane = (h + 2, w + 2, padded_channels(channels, self.dtype))
        if plane not in self.rings:
            self.rings[plane] = Ring(plane, self.dtype)
        return self.rings[plane]
