"""What the planner chooses among: the plans of a component on one route, fused, plain or a family's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from .. import log
from ..errors import InputError
from ..network.plain import Network
from ..network.program import Program
from ..network.tiles import Grid
from .ask import Ask
from .fused_walk import FusedWalk
from .plain_walk import PlainWalk, Torch
from .plan import Plan


@dataclass(frozen=True)
class Known:
    """What plans of one model are made from.

    model: network without values. walk: dry runs of its fused components. plain: dry runs in plain torch. besides:
    (component, True where it runs fused) -> bytes in addition to a run's own memory. how: returns the way in which
    plain torch takes memory. kind: type of 8-bit products that are no convolutions, "fp8" or "int8"; None: they are in
    the type of activations. fuses: returns True where the fused operators run a component."""

    model: Network
    walk: FusedWalk
    plain: PlainWalk
    besides: Callable[[str, bool], int]
    how: Callable[[], Torch]
    kind: str | None
    fuses: Callable[[str], bool]


class Plans(Protocol):
    """Plans of one model on one route; `ask` names the component."""

    def check(self, ask: Ask) -> str:
        """Raise InputError for options that it does not have, and log those without effect.

        Returns:
            The refusal of a component that divides frames itself, for which the planner tries no tiles; "" for others.
        """

    def of(self, ask: Ask, tiles: Grid, target: int | None) -> Iterator[Plan]:
        """Yield plans from most memory to least; their peaks do not include `Known.besides`. Those above the target in
        bytes may be left out, but the last one."""

    def least(self, ask: Ask, tiles: Grid, target: int | None = None) -> int | None:
        """Return the peak of the leanest plan with `Known.besides`; above the target it may be an estimate that is
        more, too. None: finding it takes as long as `of`, and there is a target."""


def check(program: Program, ask: Ask) -> str:
    """Do what all but a family's own component do in `Plans.check`: return "", as the planner may cut frames into
    tiles."""
    if refusal := ask.request.native_refusal():
        raise InputError(refusal)
    if ask.chunk and program.piece:
        log.once(f"chunk={ask.chunk} is not used: the pieces that this network takes a clip in are part of the model")
    return ""
