"""Choose the convolutions that read 8-bit operands, and record the ranges of the values they read."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..kernels.targets import FP8

#: 8-bit operand types by the name of their precision.
KINDS = {"fp8": FP8, "int8": torch.int8}
#: A narrower convolution is limited by memory, and 8-bit rows are padded to this many channels.
MIN_CHANNELS = 32
#: Largest factor over the median level of an uncalibrated file's clips that one clip's range may reach.
WIDEST = 2.0


@dataclass(frozen=True)
class Range:
    """Values of a convolution's input during measurement, per channel: the largest magnitude and the root mean
    square."""

    largest: tuple[float, ...]
    rms: tuple[float, ...]

    @classmethod
    def of(cls, largest: Tensor, rms: Tensor) -> Range:
        return cls(tuple(map(_short, largest.tolist())), tuple(map(_short, rms.tolist())))

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, (*self.largest, *self.rms)))

    @property
    def level(self) -> float:
        """Return the root mean square of all channels."""
        return math.sqrt(sum(r * r for r in self.rms) / len(self.rms))

    def scaled(self, factor: float) -> Range:
        return Range(*(tuple(_short(factor * x) for x in values) for values in (self.largest, self.rms)))

    def united(self, other: Range) -> Range:
        """Return the range of both inputs together."""
        pairs = (zip(self.largest, other.largest, strict=True), zip(self.rms, other.rms, strict=True))
        return Range(*(tuple(max(pair) for pair in both) for both in pairs))


Ranges = Mapping[str, Range]


@dataclass(frozen=True)
class Policy:
    """kinds: convolution key -> "fp8" or "int8"; all others stay in 16 bit. ranges: of the inputs of these
    convolutions.

    half_accumulate: 16-bit convolutions after a norm may sum products in fp16, a step at a time.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    ranges: Ranges = field(default_factory=dict)
    half_accumulate: bool = False

    def __post_init__(self) -> None:
        for key, kind in self.kinds.items():
            if kind not in KINDS:
                raise ValueError(f"{key}: {kind!r} is not one of {', '.join(KINDS)}")
        ranges = {key: self.ranges[key] for key in self.kinds if key in self.ranges}
        object.__setattr__(self, "kinds", MappingProxyType(dict(self.kinds)))
        object.__setattr__(self, "ranges", MappingProxyType(ranges))

    def __reduce__(self) -> tuple:
        """Support pickling for other processes."""
        return Policy, (dict(self.kinds), dict(self.ranges), self.half_accumulate)

    def as_dict(self) -> dict[str, Any]:
        """Return the policy as JSON values."""
        ranges = ranges_as_dict(self.ranges)
        return {"kinds": dict(self.kinds), "ranges": ranges, "half_accumulate": self.half_accumulate}


#: The policy with everything in 16 bit, summed in fp32.
EXACT = Policy()


def ranges_as_dict(ranges: Ranges) -> dict[str, Any]:
    return {key: {"largest": list(r.largest), "rms": list(r.rms)} for key, r in ranges.items()}


def ranges_from_dict(values: Mapping[str, Any]) -> dict[str, Range]:
    """Return the ranges of `ranges_as_dict`. Raises ValueError on NaN and infinity, among others."""
    found = {
        key: Range(tuple(map(float, r["largest"])), tuple(map(float, r["rms"]))) for key, r in values.items()
    }
    if not finite(found):
        raise ValueError("its ranges are not finite")
    return found


def finite(ranges: Ranges) -> bool:
    """Return whether the measured values were finite."""
    return all(r.finite for r in ranges.values())


def united(all_ranges: Sequence[Ranges]) -> dict[str, Range]:
    """Return the ranges of several clips together.

    No single clip of three or more raises a convolution's level above WIDEST times their median: a clip that is ten
    times too bright would leave int8 a tenth of its steps for all others. With two clips, the odd one is unknown, and
    the limit is WIDEST times the lower level. A convolution that some clips do not have, such as those that composing
    replaces, is left out: none of these takes 8 bit.
    """
    common = [key for key in all_ranges[0] if all(key in ranges for ranges in all_ranges)]
    return {key: _bounded([ranges[key] for ranges in all_ranges]) for key in common}


def _bounded(found: Sequence[Range]) -> Range:
    levels = sorted(r.level for r in found)
    limit = WIDEST * levels[len(levels) // 2 if len(levels) > 2 else 0]
    return functools.reduce(Range.united, (r if r.level <= limit else r.scaled(limit / r.level) for r in found))


def eligible(half: torch.nn.Module) -> list[str]:
    """Return the keys of the convolutions of an encoder or decoder that may take 8-bit operands: from MIN_CHANNELS
    channels on, all with a 3x3 window except the first and the last. Shortcuts (1x1) read the 16-bit residual stream as
    it is.

    Convolutions of single frames (Wan) are among them where they upsample. Convolutions that downsample, halve or
    double frames are 1 to 3 % of the work and read residual streams: 8 bits would cost more there than they save.
    """
    return half.program.eligible(MIN_CHANNELS)  # type: ignore[operator,union-attr]


def _short(value: float) -> float:
    """Round to three digits: a range is only a sample, and tables stay small."""
    return float(f"{value:.3g}")
