"""A call on one device, on several of this process, or on the ranks of torchrun: the results are the same."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

import torch

from ... import log
from ...errors import InputError, PlanError
from ...execution.core import Core
from ...execution.job import Job
from ...execution.results import Finished
from ...execution.video import StreamVideo
from ...network.tiles import grid
from ...planning.plan import Plan
from ...request import OVERLAP, Devices, Request
from .consistency import of_bits, of_contents, of_file, of_network
from .devices import copies_on, kind_of, resolve, same_kind
from .parts import GIVEN, Streamed
from .ranks import Ranks, RankSpread
from .spread import Spread


def run(vae: Core, devices: Devices, mixed: bool, job: Job, plan: Plan | None) -> Generator[Finished, None, None]:
    """Run a job on the given devices. Args, yields: those of `Several.run` in engine/encoding.py."""
    by_place = getattr(vae.model.config, "begins_with_noise", False)
    if job.seed is not None and not by_place and devices not in (None, "auto"):
        log.once("this decoder adds noise by the frames that it has seen: one device decodes the clip")
        if isinstance(devices, Ranks) and devices.rank:
            return
        devices = None
    ranks = devices if isinstance(devices, Ranks) else None
    named = [vae.device] if ranks else _named(vae, devices, mixed)
    if not ranks and len(named) == 1:
        yield from job.alone(vae, plan)
        return
    policy = vae.settled(job.half, job.samples) if ranks is None or ranks.rank == 0 else None
    report = vae._begin(job.half[:-1], job.size)
    feed = Streamed(vae, job.given) if isinstance(job.given, StreamVideo) else GIVEN
    if ranks is None:
        shared = replace(job, request=in_tiles_of(vae, job.half, job.latents, job.request))
        spread = Spread(copies_on(vae, named), shared, policy, feed)
    else:
        _check_alike(vae, ranks, mixed, job)
        shared = (in_tiles_of(vae, job.half, job.latents, job.request), policy) if ranks.rank == 0 else None
        request, policy = ranks.broadcast(shared)
        job = replace(job, request=request)
        spread = RankSpread([vae] * ranks.count, job, policy, feed, ranks)
    if job.into.room is not None:  # a part that is the whole stream would have to be held whole
        alone = spread.alone
        if ranks.broadcast(alone) if ranks else alone:
            if ranks is None or ranks.rank == 0:
                yield from job.alone(vae, None)
            return
    try:
        with closing(spread.run(report)) as done:
            yield from done
    finally:
        vae._tell(report)  # replaces the report of this VAE's own part


def _check_alike(vae: Core, ranks: Ranks, mixed: bool, job: Job) -> None:
    """Raise InputError on all ranks where one has another input, VAE, precision, option or request."""
    network = of_network(vae) if not mixed else None if vae.path is None else of_file(vae.path)
    name, given = ("latent", job.given) if job.half == "decoder" else ("video", getattr(job.given, "all", None))
    asked = {"clip": (job.size, job.clips, job.latents), "part": job.wanted, "output": job.request.output,
             "range": job.request.range}
    precision, contents = None if mixed else vae.precision, {name: of_contents(given)}
    ranks.agree(vae.device, mixed, **asked, precision=precision, VAE=network, options=of_bits(vae), **contents)


def in_tiles_of(vae: Core, half: str, size: tuple[int, int, int], request: Request) -> Request:
    """Return the request with the tiles that one device would choose.

    All devices use them, because memory that is free on another one must not change the bits. size: latents, rows and
    columns of latent pixels."""
    if request.tiling not in ("auto", "blended") or vae.architecture.in_tiles:
        return request
    try:
        plan = vae._plan(half, size, request)
    except PlanError:  # another device may be able to
        return request
    if not plan.tiled:
        return request
    s = vae.architecture.spatial
    tile = s * max(plan.grid.rows.size, plan.grid.cols.size)
    overlaps = (min(o, tile - 1) for o in (request.overlap, OVERLAP, s))  # `tile` may be less than was asked for
    shared = next(o for o in overlaps if grid(*size[1:], tile, o, s) == plan.grid)
    return replace(request, tiling="blended", tile=tile, overlap=shared, chunk=0)


def _named(vae: Core, devices: Devices, mixed: bool) -> list[torch.device]:
    """Return the devices that are named; raise InputError where they cannot be used together with the VAE's own."""
    named = resolve(devices, vae.device)
    same_kind([(device, kind_of(device, vae.options.kernels)) for device in named], mixed)
    if vae.device not in named:
        names = ", ".join(map(str, named))
        raise InputError(f"devices names {names}, and this VAE is on {vae.device}: name that too")
    return named
