"""Turn plain weights into the operands of a policy: 8-bit weights, and the scales of their inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels.conv3d.types import QUANT_MAX
from ..kernels.targets import FP8
from .policy import EXACT, KINDS, Policy, Range

#: fp8 maps the largest measured value to 448 divided by this: values beyond those measured still have an octave.
HEADROOM = 2.0
#: int8 leaves this factor above the largest measured value. Demo VAE, on another clip than the measured one: 46.0 dB
#: without, 50.1 with 1.3, 49.5 with 1.7.
MARGIN = 1.3
#: Exponents of (largest input, largest weight) in the scale of an int8 channel; `balance` takes the best pair.
EXPONENTS = tuple(itertools.product((0.0, 0.35, 0.7, 1.0), (0.0, 0.35, 0.7)))
_TINY = 1e-6
T = TypeVar("T")


@dataclass(frozen=True)
class Form:
    """Storage of one convolution's operands: their type, the scale of the input (operand = value / scale), whether
    products may be summed in fp16, and for int8 the range that determines its channels' scales."""

    dtype: torch.dtype
    scale: float = 1.0
    half_accumulate: bool = False
    range: Range | None = None

    def balancer(self) -> Balancer | None:
        return Balancer(self.range) if self.dtype == torch.int8 else None


@dataclass(frozen=True)
class Operands:
    """The forms of all convolutions of a network whose activations are `dtype`. winograd: use the Winograd form where a
    convolution supports it. scale: rows that the convolution reads for each row of the latent. `packed` caches packed
    weights, for networks that differ in a few convolutions."""

    dtype: torch.dtype
    policy: Policy = EXACT
    winograd: bool = field(default=False, kw_only=True)
    scale: int = field(default=1, kw_only=True)
    packed: dict[tuple[str, Form], Any] = field(default_factory=dict)

    def form(self, key: str, normed: bool = True) -> Form:
        """Return the form of a convolution. normed: the input comes from a norm. Other inputs are residual streams of
        unbounded size: their 16-bit products are never summed in fp16, which ends at 65504."""
        kind = self.policy.kinds.get(key)
        if kind is None:
            fast = self.policy.half_accumulate and normed and self.dtype == torch.float16
            return Form(self.dtype, half_accumulate=fast)
        found = self.policy.ranges.get(key)
        if KINDS[kind] == torch.int8:
            return Form(torch.int8, range=found)
        # Packing keeps fp8 sums inside fp16's range.
        scale = 1.0 if found is None else max(*found.largest, _TINY) * HEADROOM / QUANT_MAX[FP8]
        return Form(FP8, scale, half_accumulate=True)

    def once(self, key: str, form: Form, make: Callable[[], T]) -> T:
        """Return `make()`, or its earlier result for the same convolution in the same form."""
        if (key, form) not in self.packed:
            self.packed[key, form] = make()
        return self.packed[key, form]


class Balancer:
    """Find the int8 scale of each input channel from its range and the weights, and keep it: `gain` is 1 / scale."""

    def __init__(self, found: Range | None) -> None:
        self._range = found
        self.gain: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the scales [C] for a convolution's weights [N, taps, C] in float32."""
        if rows.is_meta:
            scale = rows.new_empty(rows.shape[2])
        elif self._range is None:
            raise ValueError("int8 operands need the range of their input")
        else:
            scale = balance(rows, rows.new_tensor(self._range.largest), rows.new_tensor(self._range.rms))
        self.gain = 1.0 / scale
        return scale


def balance(rows: Tensor, largest: Tensor, rms: Tensor) -> Tensor:
    """Return the scale of each input channel [C] that minimises the joint int8 rounding error of inputs and weights.

    A channel's scale moves error between its inputs (their step is the scale) and its weights, which are multiplied by
    it before each row is rounded with its own step. Candidates are largest^a / weight^b, stretched until the largest
    measured value times MARGIN just fits; the expected squared error of the outputs decides.
    """
    limit = QUANT_MAX[torch.int8]
    largest, rms = largest.clamp_min(_TINY), rms.clamp_min(_TINY)
    peaks = rows.abs().amax(1)  # [N, C]
    power = rows.square().sum((0, 1))
    heaviest = peaks.amax(0).clamp_min(_TINY)
    scales, errors = [], []
    for a, b in EXPONENTS:
        scale = largest**a / heaviest**b
        scale = scale * ((largest / scale).max() * MARGIN / limit)
        steps = (peaks * scale).amax(1).square().sum() / limit**2
        scales.append(scale)
        errors.append((scale.square() * power).sum() + steps * rows.shape[1] * (rms / scale).square().sum())
    return scales[int(torch.stack(errors).argmin())]
