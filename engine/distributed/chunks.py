"""Longer decoder chunks where the host takes longer to launch kernels than the devices take to compute.

Launching takes 10 to 17 ms per latent of SeedVR2 at 1280x720, with a thread for each of two H200s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import PlanError
from ..execution.core import Core
from ..request import Request

#: Latents per chunk in parts with a warm-up, in which only the first steps of the network take part.
LATENTS_WITH_LEAD = 2


def behind_a_lead(
    core: Core, half: str, size: tuple[int, int, int], request: Request, check: Callable[[], None]
) -> Request:
    """Return the request with LATENTS_WITH_LEAD latents per chunk, unless that would change more than the chunk.

    It is unchanged for encoders, where a chunk was asked for, and unless both plans are fused, without parking, tiles
    and notes.

    Args:
        core: VAE of the device that makes the part.
        half: "decoder" or "encoder".
        size: latents, rows and columns of latent pixels.
        request: options of the call.
        check: called between dry runs; may raise, to cancel.
    """
    if half == "encoder" or request.chunk:
        return request
    longer = replace(request, chunk=LATENTS_WITH_LEAD)
    try:
        plans = [core._plan(half, size, r, check=check) for r in (request, longer)]
    except PlanError:
        return request
    alike = all(p.fused and p.parking is None and not p.tiled and not p.note for p in plans)
    return longer if alike and plans[0].steps.latents < LATENTS_WITH_LEAD else request
