"""Attention within square windows of a picture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.attention import attention, scratch_bytes
from ...kernels.norm_act import Store, norm_act, statistics
from ...network.ops.attention import Attention, SplitAttention
from ...network.state import State
from ...network.values import CAUSAL, Result, Size, Style, Sums, Work
from ...runtime.context import ExecutionContext
from ...runtime.weights import Attention as Packed
from .kernels.mixing import places_in, unwindowed, windowed, windows_of


class InWindows(SplitAttention):
    """Attention within windows; copies of positions that fill a window at the edge take part as any key."""

    window = 0

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        b, c, t, h, w = x.shape
        tokens = self.normed()(x).permute(0, 2, 3, 4, 1).reshape(b * t, h * w, c)
        *inputs, output = self.projections()
        parts = []
        at, back = (f(h, w, self.window, x.device) for f in (windows_of, places_in))
        for one in tokens:
            q, k, v = (F.linear(one, *p)[at][:, None] for p in inputs)
            mixed = F.scaled_dot_product_attention(q, k, v).flatten(0, 2)
            parts.append(F.linear(mixed[back], *output))
        return x + torch.stack(parts).view(b, t, h, w, c).permute(0, 4, 1, 2, 3)


@dataclass(frozen=True)
class WindowAttention(Attention):
    """The step of attention within windows of `window` x `window` positions."""

    window: int = 32

    def modules(self, style: Style) -> dict[str, nn.Module]:
        module = InWindows(self.width, self.norm, self.parts)
        module.window = self.window
        return {self.name: module}

    def run(self, packed: Packed, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        """Add it to x, picture by picture, so that a product does not depend on the chunk; return the result's sums."""
        _, h, w, c = x.shape
        size = self.window**2
        count = -(-h // self.window) * -(-w // self.window)
        with run.arena.scope():
            tokens = run.take(1, h, w, c)
            flat, qkv = run.take(count * size, c), run.take(3, count * size, c)
            need = scratch_bytes(size, run.dtype.itemsize, c) if packed.flash else 0
            scratch = run.arena.take((need,), torch.uint8)
            if run.dry:
                return x, None
            coefs = run.coefficients_of(x, packed.norm, sums)
            for i, picture in enumerate(x):
                options = {"border": 0, "store": Store(silu=False), "coefs": coefs[i : i + 1], "health": run.health}
                run.attempt(norm_act, x[i : i + 1], packed.norm, tokens, **options)
                run.attempt(windowed, tokens[0], self.window, flat)
                for (weight, bias), out in zip((packed.q, packed.k, packed.v), qkv, strict=True):
                    run.attempt(torch.addmm, bias, flat, weight, out=out)
                run.inspect(qkv)  # a softmax gives -Inf no weight
                parts = qkv.view(3, count, size, c)
                backend = "auto" if packed.flash else "reference"
                mixed = run.attempt(attention, *parts, out=parts[0], scratch=scratch, backend=backend)
                run.attempt(torch.addmm, packed.out[1], mixed.view(-1, c), packed.out[0], out=flat)
                run.attempt(unwindowed, flat, self.window, picture)
        return x, run.attempt(statistics, x, packed.norm.groups)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        tokens, c = size.height * size.width, self.width
        seen = windows_of(size.height, size.width, self.window, torch.device("meta")).numel()
        flop = size.frames * (4 * 2.0 * tokens * c * c + 4.0 * seen * self.window**2 * c)
        return Work(flop, flop)
