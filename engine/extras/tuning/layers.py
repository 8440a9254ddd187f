"""Kinds of layers of a VAE, found by dry runs, and a representative call of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...kernels.conv3d.tuned import Kind
from ...kernels.targets import Target
from ...planning.fused_walk import FusedWalk
from ...runtime.memory import Call

#: Pixels (height, width) of the frames whose layers are tuned: the lowest planes of the second are small ones.
SIZES = ((720, 1280), (368, 640))
#: Least share of a component's work: layers with less keep the table's schedule.
LEAST = 0.005


@dataclass(frozen=True)
class Layer:
    """A kind of layer and the call that has most of its work.

    share: of all work in a chunk, at the size where it is largest. kernel, folded and shifted: of its weight. The
    other fields are as in `Call`."""

    kind: Kind
    share: float
    kernel: tuple[int, int, int]
    phases: tuple[int, int, int]
    folded: int
    shifted: bool
    stride: tuple[int, int, int]
    origin: tuple[int, int]
    frames: int
    frame: tuple[int, int]
    groups: int
    residual: bool
    half_accumulate: bool
    bias: int
    out: str

    @property
    def flop(self) -> int:
        """Return the FLOP of the call, as a direct convolution."""
        positions = self.frames * math.prod(self.frame) * math.prod(self.phases)
        return 2 * self.kind.channels * self.kind.outputs * math.prod(self.kernel) * positions

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"kind": list(self.kind)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Layer:
        made = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**made | {"kind": Kind(*values["kind"])})


def layers(walk: FusedWalk, target: Target, sizes: Iterable[tuple[int, int]] = SIZES) -> list[Layer]:
    """Return the layers of both components, where the fused kernels run them; those with most work first.

    Convolutions with a kernel one column wide keep the table's schedule: some of them overwrite their input, which
    takes a tile as wide as they are.

    Args:
        walk: dry run of the VAE.
        target: capabilities of the GPU.
        sizes: (height, width) of frames in pixels.
    """
    found: dict[Kind, Layer] = {}
    spatial = walk.architecture.spatial
    for height, width in sizes:
        shares, calls = Counter[Kind](), {}
        for half in walk.halves:
            made = walk.run(half, height // spatial, width // spatial).calls.values()
            whole = sum(call.work for call in made)
            for call in made:
                if call.weight.tiles:  # there is one schedule for each width
                    continue
                layer = _layer(call, target)
                shares[layer.kind] += call.work / whole
                calls[layer.kind] = max(layer, calls.get(layer.kind, layer), key=lambda one: one.flop)
        for kind, layer in calls.items():
            if kind.row > 1 and (kind not in found or shares[kind] > found[kind].share):
                found[kind] = replace(layer, share=shares[kind])
    return sorted((layer for layer in found.values() if layer.share >= LEAST), key=lambda layer: -layer.share)


def _layer(call: Call, target: Target) -> Layer:
    weight, geometry = call.weight, call.geometry
    dtype = weight.data.dtype
    kind = Kind.of(weight, target.accumulate(dtype, call.half_accumulate), call.frame, geometry, call.groups)
    return Layer(
        kind, 0.0, weight.kernel, weight.phases, weight.folded, weight.shifted,
        geometry.stride, geometry.origin, max(call.frames, 1), call.frame, call.groups, call.residual,
        call.half_accumulate, call.bias, str(call.out).removeprefix("torch."),
    )  # fmt: skip
