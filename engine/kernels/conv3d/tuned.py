"""Schedules chosen by measuring on this GPU, in place of the table's: by kind of layer, for each device.

All calls of a run, and of every other run at the same time, compute with the same schedules: new ones that are offered
meanwhile are used when the last run is over.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..cards import TRITON
from .schedules import SMALL_PLANE, Schedule
from .types import Geometry, Weight


class Kind(NamedTuple):
    """The key of a schedule: properties that a layer and its whole frame share with others, and that no chunk or band
    changes.

    operands: their type as torch names it. accumulate: as `Target.accumulate` returns it.
    channels: as padded in the buffer. small: the plane has fewer than SMALL_PLANE positions. phases, row: as for
    `pick`. strided: its steps are longer than one. sums: it makes the sums of a norm.
    """

    operands: str
    accumulate: str
    channels: int
    outputs: int
    small: bool
    phases: int
    row: int
    strided: bool
    sums: bool

    @classmethod
    def of(cls, weight: Weight, accumulate: str, frame: tuple[int, int], geometry: Geometry, groups: int) -> Kind:
        """Return the kind of calls with a packed weight. frame: the full frame's positions (H, W)."""
        operands, small = str(weight.data.dtype).removeprefix("torch."), frame[0] * frame[1] < SMALL_PLANE
        return cls(operands, accumulate, weight.channels, weight.out_channels, small, math.prod(weight.phases),
                   weight.kernel[2], geometry.stride != (1, 1, 1), groups > 0)  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.operands)

    def __str__(self) -> str:
        what = {8: "upsampling time and space", 4: "upsampling space"}.get(self.phases, "")
        words = [
            self.operands + ("" if self.accumulate in ("f32", "i32", "mx") else f" summed in {self.accumulate}"),
            f"{self.channels}->{self.outputs}", what, "strided" if self.strided else "",
            "with sums" if self.sums else "", "small planes" if self.small else "",
        ]  # fmt: skip
        return " ".join(word for word in words if word)


Table = Mapping[Kind, Schedule]
#: A device, and the way its kernels are launched, as `Target.way` has it: each has measured schedules of its own.
Place = tuple[torch.device, str]
_NONE: Table = {}
_lock = threading.Lock()
_tables: dict[Place, Table] = {}
_waiting: dict[Place, Table] = {}
_runs: Counter[torch.device] = Counter()
_changes: Counter[torch.device] = Counter()


def table(device: torch.device, way: str = TRITON) -> Table:
    """Return the schedules that a device uses now, for kernels launched this way."""
    return _tables.get((device, way), _NONE)


def chosen(
    device: torch.device, way: str, weight: Weight, accumulate: str, frame: tuple[int, int], geometry: Geometry,
    groups: int,
) -> Schedule | None:  # fmt: skip
    """Return the schedule measured to be best for a call; None: the built-in table decides."""
    known = _tables.get((device, way))
    return known.get(Kind.of(weight, accumulate, frame, geometry, groups)) if known else None


def version(device: torch.device) -> int:
    """Return a number that changes whenever the table does."""
    return _changes[device]


def offer(device: torch.device, new: Table, way: str = TRITON) -> None:
    """Use `new` from now on, or from when no run is going on on the device."""
    with _lock:
        _waiting[device, way] = dict(new)
        _settle(device)


@contextmanager
def held(device: torch.device) -> Iterator[None]:
    """Keep the table as it is during a run."""
    with _lock:
        _runs[device] += 1
    try:
        yield
    finally:
        with _lock:
            _runs[device] -= 1
            _settle(device)


def _settle(device: torch.device) -> None:
    if _runs[device]:
        return
    for place in [place for place in _waiting if place[0] == device]:
        new = _waiting.pop(place)
        if new != _tables.get(place, _NONE):
            _tables[place] = new
            _changes[device] += 1
