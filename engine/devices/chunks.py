"""Longer chunks of a decoder where hosts launch for longer than their devices compute: 10 to 17 ms a latent of SeedVR2
at 1280x720, with a thread for each of two H200s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..core import Core
from ..errors import PlanError
from ..request import Request

#: Latents of a chunk in parts with a lead, of which only the first steps take part in it.
LATENTS_WITH_LEAD = 2


def behind_a_lead(
    core: Core, half: str, size: tuple[int, int, int], request: Request, check: Callable[[], None]
) -> Request:
    """The request with such chunks, where nothing else changes with them. size: latents, rows and columns. check:
    called between dry walks, may raise."""
    if half == "encoder" or request.chunk:
        return request
    longer = replace(request, chunk=LATENTS_WITH_LEAD)
    try:
        plans = [core._plan(half, size, r, check=check) for r in (request, longer)]
    except PlanError:
        return request
    alike = all(p.fused and p.parking is None and not p.tiled and not p.note for p in plans)
    return longer if alike and plans[0].steps.latents < LATENTS_WITH_LEAD else request
