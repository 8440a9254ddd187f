"""Which convolutions read 8-bit operands, and what is known of the values they read."""

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

#: Operand types of 8 bit by the name of their precision.
KINDS = {"fp8": FP8, "int8": torch.int8}
#: A narrower convolution spends its time on memory, and 8-bit rows are padded to this many channels.
MIN_CHANNELS = 32
#: How far above the median level of an uncalibrated file's clips one of them may take a range.
WIDEST = 2.0


@dataclass(frozen=True)
class Range:
    """What a convolution's input held while it was measured, per channel."""

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
        """Root mean square of all channels."""
        return math.sqrt(sum(r * r for r in self.rms) / len(self.rms))

    def scaled(self, factor: float) -> Range:
        return Range(*(tuple(_short(factor * x) for x in values) for values in (self.largest, self.rms)))

    def united(self, other: Range) -> Range:
        """The range of both inputs together."""
        pairs = (zip(self.largest, other.largest, strict=True), zip(self.rms, other.rms, strict=True))
        return Range(*(tuple(max(pair) for pair in both) for both in pairs))


Ranges = Mapping[str, Range]


@dataclass(frozen=True)
class Policy:
    """kinds: convolution key -> "fp8" or "int8"; all others stay in 16 bit. ranges: of the inputs of those.

    half_accumulate: 16-bit convolutions behind a norm may sum products in fp16, a step at a time.
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
        """For other processes."""
        return Policy, (dict(self.kinds), dict(self.ranges), self.half_accumulate)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kinds": dict(self.kinds),
            "ranges": ranges_as_dict(self.ranges),
            "half_accumulate": self.half_accumulate,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Policy:
        """Raises KeyError, TypeError or ValueError on anything that `as_dict` did not make."""
        return cls(dict(values["kinds"]), ranges_from_dict(values["ranges"]), bool(values["half_accumulate"]))


#: Everything in 16 bit, summed in fp32.
EXACT = Policy()


def ranges_as_dict(ranges: Ranges) -> dict[str, Any]:
    return {key: {"largest": list(r.largest), "rms": list(r.rms)} for key, r in ranges.items()}


def ranges_from_dict(values: Mapping[str, Any]) -> dict[str, Range]:
    """Raises ValueError on NaN and infinity, among others."""
    found = {
        key: Range(tuple(map(float, r["largest"])), tuple(map(float, r["rms"]))) for key, r in values.items()
    }
    if not finite(found):
        raise ValueError("its ranges are not finite")
    return found


def finite(ranges: Ranges) -> bool:
    """Whether they come from values that were finite."""
    return all(r.finite for r in ranges.values())


def united(all_ranges: Sequence[Ranges]) -> dict[str, Range]:
    """Ranges of several clips together. No single clip of three or more takes a convolution further than WIDEST times
    their median level: one that is ten times too bright would leave int8 a tenth of its steps for all others. Of two,
    nobody can tell which one is odd: there it is WIDEST times the lower. A convolution that some clips do not have, as
    those that composing replaces, is left out: none of these takes 8 bit."""
    common = [key for key in all_ranges[0] if all(key in ranges for ranges in all_ranges)]
    return {key: _bounded([ranges[key] for ranges in all_ranges]) for key in common}


def _bounded(found: Sequence[Range]) -> Range:
    levels = sorted(r.level for r in found)
    limit = WIDEST * levels[len(levels) // 2 if len(levels) > 2 else 0]
    return functools.reduce(Range.united, (r if r.level <= limit else r.scaled(limit / r.level) for r in found))


def eligible(half: torch.nn.Module) -> list[str]:
    """Keys of the convolutions of an encoder or decoder that may take 8-bit operands: from MIN_CHANNELS channels on all
    with a 3x3 window but the first and the last. Shortcuts (1x1) read the 16-bit residual stream as it is.

    Convolutions of single frames (Wan) are among them where they upsample. Those that downsample, and what halves or
    doubles frames, are 1 to 3 % of the work and read residual streams: 8 bits would cost more there than they save.
    """
    return half.program.eligible(MIN_CHANNELS)  # type: ignore[operator,union-attr]


def _short(value: float) -> float:
    """Three digits: a range is a sample, and tables stay small."""
    return float(f"{value:.3g}")
