"""Residual blocks: two 3x3x3 (or 1x3x3) convolutions, each after a norm, and a shortcut."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import norm_act
from ...options import Options
from ...precision.forms import Operands
from ...runtime.context import ExecutionContext
from ...runtime.rolling import Layer, rolled, rolls
from ...runtime.weights import Conv
from ..packed import conv_of, norm_of
from ..program import Step
from ..rolling import Layered
from ..state import State
from ..tree import find, graft
from ..values import CAUSAL, Result, Size, Style, Sums, Taps, Work
from .conv import Between, conv_work, pointwise, styled, taps_of
from .norm import Norm, Normed

#: A 1x1x1 convolution to this many channels (or a smaller power of two) is one tile wide on every GPU: no GPU program
#: reads values that another one has written, so the result may take the place of the input.
ONE_TILE = 128


@dataclass(frozen=True)
class Names:
    """Names of the parts of a block in a family's files."""

    norm1: str = "norm1"
    conv1: str = "conv1"
    norm2: str = "norm2"
    conv2: str = "conv2"
    conv_shortcut: str = "conv_shortcut"


NAMES = Names()


class Resnet(nn.Module):
    """y = shortcut(x) + conv2(norm2(conv1(norm1(x)))), norms with SiLU; the shortcut is a 1x1x1 convolution where the
    widths differ."""

    def __init__(
        self, c_in: int, c_out: int, norm: Norm, names: Names = NAMES, style: Style = CAUSAL,
        conv: Callable[[int, int, Style], nn.Module] = styled,
    ) -> None:  # fmt: skip
        super().__init__()
        self.names = names
        graft(self, names.norm1, norm.module(c_in))
        graft(self, names.conv1, conv(c_in, c_out, style))
        graft(self, names.norm2, norm.module(c_out))
        graft(self, names.conv2, conv(c_out, c_out, style))
        if c_in != c_out:
            graft(self, names.conv_shortcut, pointwise(c_in, c_out, style))
        else:
            self._modules["conv_shortcut"] = None

    def __getattr__(self, role: str) -> Any:
        """Return norm1, conv1, norm2, conv2 or conv_shortcut under any name that files have for it. If the file uses
        such a name for a larger module, return that module, as other code follows the names of parameters; `part` finds
        the part."""
        name = getattr(self.__dict__.get("names"), role, role)
        own = name == role or role in self.__dict__.get("_modules", ())
        return super().__getattr__(role) if own else find(self, name)

    def part(self, role: str) -> Any:
        """Return the module for a field of Names; None for an absent shortcut."""
        if self._modules.get(role, self) is None:
            return None
        return find(self, getattr(self.names, role))

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        conv2, shortcut = self.part("conv2"), self.part("conv_shortcut")
        h = self.part("conv1")(self.part("norm1")(x, state), state)
        h = conv2(self.part("norm2")(h, state), state)
        if state is not None:
            x = state.aligned(f"{conv2.key} residual", x, h)
        if shortcut is not None:
            x = shortcut(x)
        return x + h if torch.is_grad_enabled() else h.add_(x)


@dataclass(frozen=True)
class Packed:
    norm1: norm_act.Norm
    conv1: Conv
    norm2: norm_act.Norm
    conv2: Conv
    shortcut: Conv | None


@dataclass(frozen=True)
class Res(Normed, Layered, Between):
    norm: Norm
    names: Names = NAMES
    below = False
    looks_ahead = True

    @property
    def in_place(self) -> bool:  # type: ignore[override]
        return self.c_in == self.c_out

    @property
    def inside(self) -> bool:  # type: ignore[override]
        return self.c_out <= min(self.c_in, ONE_TILE) and not self.c_out & (self.c_out - 1)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Resnet(self.c_in, self.c_out, self.norm, self.names, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Packed:
        block = part(self.name)
        shortcut = block.part("conv_shortcut")
        return Packed(
            norm_of(block.part("norm1")),
            conv_of(block.part("conv1"), operands),
            norm_of(block.part("norm2")),
            conv_of(block.part("conv2"), operands),
            None if shortcut is None else conv_of(shortcut, operands, normed=False),
        )

    def run(self, packed: Packed, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        """Return the result and its sums.

        Where the widths agree, the result overwrites x. Else it is `out`; or it lies in the first channels of x's
        memory, with the tensor between the convolutions in the next channels if there are enough; or it is new memory.
        """
        if self.in_place and rolls(run, x.shape[0], x.numel(), x.numel()):
            return x, rolled(run, x, sums, self.layers(packed, groups), x)
        d, h, w, _ = x.shape
        k, wide = self.c_out, _room(x) if out is None else x
        inside = out is None and self.inside
        beside = inside and 2 * k <= wide.shape[3]
        if packed.shortcut is None:
            out = x
        elif inside:
            out = wide[..., :k]
        elif out is None:
            out = run.take(d, h, w, k)
        middle, drains = run.foresee((packed.conv1.key,), d, run.drains)
        made, _ = run.foresee((packed.conv2.key,), middle, drains)
        result = run.grown(x, made) if made > d else out[:made]
        with run.arena.scope():
            inner = wide[..., k : 2 * k] if beside else run.take(middle, h, w, k)
            # If `inner` and the result share x's memory, the first convolution overwrites the input of itself and the
            # shortcut.
            shorten = None if packed.shortcut is None else functools.partial(run.pointwise, packed.shortcut, x, out)
            free = shorten if beside else None
            sums = run.conv(packed.conv1, x, inner, packed.norm1, sums, self.groups, free=free)
            if shorten is not None and not beside:
                shorten()
            if run.after:
                delay = run.delay(packed.conv2.key, 2, x)
                scratch = run.arena.take(delay.whole, x.dtype)
                if not run.dry:
                    delay.take(x, made, result, scratch)
                elif not run.walk.open:
                    delay.waiting += d - made
            sums = run.conv(packed.conv2, inner, result, packed.norm2, sums, groups, residual=result)
        return result, sums

    def layers(self, packed: Packed, groups: int) -> tuple[Layer, ...]:
        return Layer(packed.conv1, packed.norm1, self.groups), Layer(packed.conv2, packed.norm2, groups)

    def shortcut(self, packed: Packed) -> Conv | None:
        return packed.shortcut

    def ahead(self, packed: Packed) -> tuple[str, ...]:
        return packed.conv1.key, packed.conv2.key

    def why_not_fused(self, style: Style) -> str | None:
        waits = style.after and self.c_in != self.c_out
        return "its shortcuts to other widths wait for frames ahead in plain torch only" if waits else None

    def taps(self, style: Style) -> Taps:
        return taps_of(style, 2)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        inner = size._replace(channels=self.c_out)
        total = conv_work(size, self.c_out, 9 * style.taps) + conv_work(inner, self.c_out, 9 * style.taps)
        return total if self.in_place else total + conv_work(size, self.c_out, taps=1)

    def eligible(self) -> tuple[tuple[str, int], ...]:
        least = min(self.c_in, self.c_out)
        return (f"{self.name}.{self.names.conv1}", least), (f"{self.name}.{self.names.conv2}", self.c_out)


@dataclass(frozen=True)
class ShortcutOnly(Between):
    """The shortcut of a residual block whose convolutions were pruned. Of a block that keeps its width nothing is left,
    and no step."""

    names: Names = NAMES
    looks_ahead = True

    @property
    def _conv(self) -> str:
        return f"{self.name}.{self.names.conv_shortcut}"

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self._conv: pointwise(self.c_in, self.c_out, style)}

    def plain(self, part: Callable[[str], nn.Module], x: Tensor, state: State | None) -> Tensor:
        return part(self._conv)(x, state)

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv:
        return conv_of(part(self._conv), operands, normed=False)

    def run(self, packed: Conv, run: ExecutionContext, x: Tensor, sums: Sums, out: Tensor | None, groups: int,
            first: int) -> Result:  # fmt: skip
        run.pointwise(packed, x, out)
        return out, None

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, self.c_out, taps=1)


def residual(
    name: str, c_in: int, c_out: int, norm: Norm, names: Names = NAMES, pruned: Collection[str] = ()
) -> tuple[Step, ...]:
    """Return the steps of a residual block, or of what is left of it if its name is among those `pruned`."""
    if name not in pruned:
        return (Res(name, c_in, c_out, norm, names),)
    return () if c_in == c_out else (ShortcutOnly(name, c_in, c_out, names),)


def _room(x: Tensor) -> Tensor:
    """Return x with the channels of memory after its own: those of a wider tensor whose place it has taken."""
    return x if x.is_contiguous() else x.as_strided((*x.shape[:3], x.stride(2)), x.stride())
