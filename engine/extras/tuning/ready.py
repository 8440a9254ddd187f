"""Schedules of a prebuilt set of kernels: nothing is compiled, and schedules that the set lacks are not tried."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.conv3d.schedules import Schedule
from ...kernels.launching import recording
from ...kernels.prebuilt.keys import key
from ...kernels.prebuilt.library import library
from ...kernels.targets import Target
from .layers import Layer
from .problem import problem, sized


class Ready:
    """Takes the place of compiling, as a `search.Compiler`."""

    def __init__(self, here: Target) -> None:
        """Use the prebuilt set of `here`, the target whose kernels run."""
        self._here = here
        self._schedules: dict[object, list[Schedule]] = {}

    def start(self, jobs: Sequence[tuple[Layer, list[Schedule]]]) -> None:
        self._schedules = {layer.kind: schedules for layer, schedules in jobs}

    def wait(self, layer: Layer, until: float) -> list[str | None]:
        return [self._lacks(layer, schedule) for schedule in self._schedules[layer.kind]]

    def end(self) -> None:
        """Do nothing: there is no process to end."""

    def _lacks(self, layer: Layer, schedule: Schedule) -> str | None:
        with recording(self._here) as calls:
            problem(sized(layer), torch.device("meta")).launch(self._here, schedule)
        has = all(library().has(self._here.set, key(one.kernel, one.arguments, one.constants)) for one in calls)
        return None if has else f"set {self._here.set} of the prebuilt kernels has no such schedule"
