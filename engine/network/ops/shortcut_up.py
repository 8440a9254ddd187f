"""Upsampling by a 3x3x3 convolution and a pixel shuffle, with a shortcut of repeated channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...kernels.conv3d import Geometry, Partials, pack_planes, pack_weight
from ...kernels.conv3d.winograd import takes
from ...kernels.duplicate import duplicate
from ...options import Options
from ...precision.forms import Operands
from ...runtime.planes import as_read
from ...runtime.run import COPY, Run
from ...runtime.weights import Conv
from ..packed import scaling
from ..program import CAUSAL, Size, Style, Work
from ..state import State
from .conv import OneConv, conv_work, styled
from .shortcut import Shortcut


def shuffled(x: Tensor, z: int) -> Tensor:
    """Turn channels into samples: [B, 4 * z * C, T, h, w] -> [B, C, z * T, 2h, 2w]; channel ((frame * 2 + row) * 2 +
    column) * C + c."""
    b, c, t, h, w = x.shape
    x = x.view(b, z, 2, 2, c // (4 * z), t, h, w).permute(0, 4, 5, 1, 6, 2, 7, 3)
    return x.reshape(b, c // (4 * z), z * t, 2 * h, 2 * w)


class Upsample(OneConv):
    """Apply a 3x3x3 convolution and pixel shuffle (x2 in height and width, and in time if `temporal`), and add the
    input's channels repeated and shuffled the same way.

    lead: a clip's first frame stays one: it is shuffled in space only, which gives twice as many channels, and the
    first half of them is kept. T frames become 2T - 1 in the first call and 2T in later ones.
    """

    def __init__(
        self, c_in: int, c_out: int, temporal: bool, lead: bool, conv: str, style: Style = CAUSAL
    ) -> None:  # fmt: skip
        z = 2 if temporal else 1
        super().__init__(conv, styled(c_in, 4 * z * c_out, style))
        self.z, self.lead, self.repeats = z, lead and temporal, 4 * z * c_out // c_in

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        lead = int(self.lead and self.convolution.starts(state) and x.shape[2] > 0)
        y = self.convolution(x, state)
        if state is not None:
            x = state.aligned(f"{self.convolution.key} shortcut", x, y)
        rest = shuffled(y[:, :, lead:], self.z)
        rest += shuffled(x[:, :, lead:].repeat_interleave(self.repeats, 1), self.z)
        if not lead:
            return rest
        first = shuffled(y[:, :, :1], 1).chunk(2, 1)[0]
        return torch.cat((first + shuffled(x[:, :, :1].repeat_interleave(self.repeats // 2, 1), 1), rest), 2)


def _by_phase(rows: Tensor, z: int) -> Tensor:
    """Reorder channels ((frame * 2 + row) * 2 + column) * K + k to the order of a convolution's phases: ((row * 2 +
    column) * z + frame) * K + k."""
    return rows.unflatten(0, (z, 2, 2, -1)).movedim(0, 2).flatten(0, 3)


@dataclass(frozen=True)
class ShortcutUp(Shortcut):
    space = (2, 1)

    def modules(self, style: Style) -> dict[str, nn.Module]:
        return {self.name: Upsample(self.c_in, self.c_out, self.temporal, self.lead, self.conv, style)}

    def pack(self, part: Callable[[str], nn.Module], operands: Operands, options: Options) -> Conv:
        conv, z = part(self.name).convolution, self.time[0]
        form = operands.form(conv.key, normed=False)
        # In 16 bit an overflowing difference is detected and computed again; an 8-bit scale that fits values that no
        # norm bounds would not fit their differences.
        planes = operands.winograd and form.dtype.itemsize == 2 and takes(form.dtype, self.c_in, self.c_out)

        def make() -> Conv:
            balancer = form.balancer()
            pack = pack_planes if planes else pack_weight
            weight = pack(_by_phase(conv.weight, z), form.dtype, (z, 2, 2), balance=balancer)
            return Conv(conv.key, weight, _by_phase(conv.bias, z).float(), **scaling(form, balancer))

        return operands.once(conv.key, form, make)

    def run(self, packed: Conv, run: Run, x: Tensor, sums: Partials | None, out: Tensor | None, groups: int,
            first: int) -> tuple[Tensor, Partials | None]:  # fmt: skip
        lead = self.leads(first)
        if packed.weight.winograd or (self.lead and self.temporal):
            groups = 0  # sums by phase, or of the first frame, belong to other tiles: the norm computes its own
        if not run.dry:  # the shortcut, to which the convolution is added; a first frame is shuffled in space only
            duplicate(x[:lead], out[:lead], samples_first=True)
            duplicate(x[lead:], out[lead:], frames=self.time[0], samples_first=True)
        parts = []
        for i in run.inputs(packed, x, COPY, None, x.shape[1], Geometry()):
            target, frames = i.rows(out, 2), []
            with run.arena.scope():
                data = as_read(run, packed, i.data)
                if lead:
                    self._first(packed, run, data, i.start, i.geometry, target[:1])
                if target.shape[0] > lead:
                    start = (i.start + lead) % data.shape[0]
                    frames.append(run.product(packed, data, target[lead:], geometry=i.geometry, residual=target[lead:],
                                              groups=groups, start=start))  # fmt: skip
            parts.append(run.joined(frames, 0))
        return out, run.walk.sums(out, groups, (2, 2)) if run.walk.open else run.joined(parts)

    def _first(self, packed: Conv, run: Run, data: Tensor, start: int, geometry: Geometry, out: Tensor) -> None:
        """Write a clip's first frame, shuffled in space only: phase by phase from the weight rows that make it."""
        weight, k = packed.weight, self.c_out
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            at = 4 * column + row  # of channel 4 * row + 2 * column in ((frame * 2 + row) * 2 + column)
            conv = replace(packed, weight=weight.phase(at), bias=packed.bias[at * k : at * k + k])
            target = out[:, row::2, column::2]
            run.product(conv, data, target, geometry=geometry, residual=target, start=start)

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        return conv_work(size, 4 * self.time[0] * self.c_out)

    def eligible(self) -> tuple[tuple[str, int], ...]:
        return ((f"{self.name}.{self.conv}", min(self.c_in, self.c_out)),)
