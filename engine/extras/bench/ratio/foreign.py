"""Refuse decodes whose products torch's own libraries make: those cannot be slowed, so a time would say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .text import RatioError

#: Largest share of the products that may be torch's.
SHARE = 0.01


def _product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    (rows, depth), (_, columns) = a, b
    return 2 * rows * depth * columns


def refuse_foreign(call: Callable[[], object], flop: float) -> None:
    """Run a decode or encode once.

    Args:
        call: it, at the size that is timed.
        flop: of all its products, as `bench.speed_limit.work` counts them.

    Raises: RatioError where more than SHARE of them are made by torch's own operators.
    """
    ours_too = {torch.ops.aten._int_mm: _product, torch.ops.aten._scaled_mm: _product}
    with FlopCounterMode(display=False, custom_mapping=ours_too) as counted:
        call()
    share = counted.get_total_flops() / flop
    if share > SHARE:
        raise RatioError(f"{100 * share:.0f} % of its products are torch's own (cuBLAS, cuDNN), which cannot be slowed "
                         "to a card's ratio")  # fmt: skip
