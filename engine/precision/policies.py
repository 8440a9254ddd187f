"""The policies of a VAE's components: fixed by the precision, or chosen for each clip by what fills "operands"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..report import Report
from .modes import Mode
from .policy import EXACT, Policy, eligible

T = TypeVar("T")
#: samples(cut, *device) returns the parts of a clip that cut(clip) makes of its latents [B, C, T, h, w] or its frames
#: [F, H, W, 3], unscaled or in the network's units, on the run's device or on the one that is given.
Samples = Callable[..., list[Tensor]]


class Policies(Protocol):
    """The policies of one VAE in one mode. The module of the point "operands" has such a class, `Mixed(mode, model,
    dtype, options, store)`, and the store's, `Store(digest)`."""

    mode: Mode

    def policy(self, half: str) -> Policy:
        """Return the policy to plan and pack "encoder" or "decoder" for."""

    def settle(self, half: str, samples: Samples) -> Policy:
        """Return the policy for a clip; its samples are asked for only when they are needed."""

    def packed(self, make: Callable[[], T], plan: Callable[[], T], made_of: tuple[Any, ...], half: str,
               device: torch.device) -> T:  # fmt: skip
        """Return the packed network of a component.

        Args:
            make: packs it.
            plan: returns it as packed on the meta device.
            made_of: its `forms.Operands`, and all else that packing depends on besides the weights.
            half: the component.
            device: where its tensors are put.
        """

    def describe(self, half: str, report: Report) -> None:
        """Write what was chosen for a component, and what it costs, into the report of a run."""


class Fixed:
    """Policies that no clip changes: nothing is in 8 bit."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def policy(self, half: str) -> Policy:
        return Policy(half_accumulate=self.mode.half_accumulate)

    def settle(self, half: str, samples: Samples) -> Policy:
        return self.policy(half)

    def packed(self, make: Callable[[], T], *_: object) -> T:
        return make()

    def describe(self, half: str, report: Report) -> None:
        """Write nothing: the report names the precision."""


def unsettled(mode: Mode, floor: float, half: nn.Module) -> Policy:
    """Return the policy that a component is planned for before a clip settles it: without scales, and with a floor in
    dB (0: none) the exact one, which needs the most memory."""
    if mode.kind is None:
        return Policy(half_accumulate=mode.half_accumulate)
    return EXACT if floor else Policy(dict.fromkeys(eligible(half), mode.kind))
